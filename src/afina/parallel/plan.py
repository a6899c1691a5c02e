"""How processes share a run: degrees, and where each process stands.

Processes are counted so that those of one tensor group are neighbours, then those that share out one copy, then the
copies, then the stages of the pipeline: the closer, the more they have to tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from afina.config import ParallelSettings
from afina.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class Place(NamedTuple):
    """Where a process stands, counted from 0 in each dimension."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Plan:
    """How many processes there are, and what each shares with which.

    Attributes:
        pipeline: stages that share the blocks.
        replicate: groups that each hold one copy.
        shard: processes that share one copy out, by `zero`.
        tensor: processes that share each matrix.
        zero: what is shared out: 0 nothing, 1 the optimiser's state, 2 also gradients, 3 also weights.
        schedule: of the pipeline.
        offload: what zero=3 shares out lies in the CPU.
        split: blocks of each stage of the pipeline; () shares them out evenly.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    zero: int = 0
    schedule: Schedule = "1f1b"
    offload: bool = False
    split: tuple[int, ...] = ()

    @property
    def data(self) -> int:
        """Groups of processes that see different rows."""
        return self.replicate * self.shard

    @property
    def processes(self) -> int:
        """All of them."""
        return self.pipeline * self.data * self.tensor

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """Of the mesh's dimensions, in their order."""
        return self.pipeline, self.replicate, self.shard, self.tensor

    @property
    def shares_weights(self) -> bool:
        """Whether no process holds the whole model."""
        return (self.zero == 3 and self.shard > 1) or self.tensor > 1 or self.pipeline > 1

    @property
    def talks_in_passes(self) -> bool:
        """Whether processes wait for each other within a pass, so that each must make the same ones."""
        return self.zero == 3 or self.tensor > 1

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass runs twice, to what came in and to the weights."""
        return self.pipeline > 1 and self.schedule == "zero_bubble"

    @property
    def shares_state(self) -> bool:
        """Whether no process holds the optimiser's whole state."""
        return (self.zero > 0 and self.shard > 1) or self.shares_weights

    def place(self, rank: int) -> Place:
        """Where process `rank` stands."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Place(pipeline, replicate, shard, tensor)

    def rank(self, place: Place) -> int:
        """The inverse of `place`."""
        number = place.pipeline * self.replicate + place.replicate
        return (number * self.shard + place.shard) * self.tensor + place.tensor

    def data_rank(self, rank: int) -> int:
        """Which of the groups with different rows process `rank` belongs to."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def __str__(self) -> str:
        parts = [f"{self.data} x data"] if self.data > 1 or self.processes == 1 else []
        parts += [f"{self.tensor} x tensor"] if self.tensor > 1 else []
        parts += [f"{self.pipeline} x pipeline ({self.schedule})"] if self.pipeline > 1 else []
        return " x ".join(parts) + (f", zero {self.zero}" if self.zero else "")


def plan_of(settings: ParallelSettings, processes: int) -> Plan:
    """The plan of a run in so many processes.

    Raises:
        ConfigError: the degrees do not make up the number of processes.
    """
    if settings.devices and processes > 1:
        raise ConfigError(
            "parallel.devices shares the blocks out within one process, and there are several",
            got=f"{len(settings.devices)} devices, {processes} processes",
            cure="leave parallel.devices out: parallel.pipeline shares the blocks out between processes",
        )
    fixed = settings.pipeline * settings.tensor
    if processes % fixed:
        raise ConfigError(
            "parallel.pipeline * parallel.tensor does not divide the number of processes",
            got=f"{settings.pipeline} * {settings.tensor} of {processes}",
            wanted=f"a multiple of {fixed} processes",
            cure=f"start {fixed * max(1, round(processes / fixed))} processes (--nproc), or lower the degrees",
        )
    data = processes // fixed
    if data % settings.replicate:
        raise ConfigError(
            "parallel.replicate does not divide the processes that see different rows",
            got=f"{settings.replicate} groups of {data} processes",
            wanted=f"one of {', '.join(map(str, divisors(data)))}",
        )
    if settings.replicate > 1 and settings.zero == 0:
        raise ConfigError(
            "parallel.replicate would do nothing: with parallel.zero=0 every process holds a copy",
            got=f"replicate {settings.replicate}, zero 0",
            cure="leave replicate out, or set zero to 1, 2 or 3",
        )
    return Plan(
        settings.pipeline,
        settings.replicate,
        data // settings.replicate,
        settings.tensor,
        settings.zero,
        settings.schedule,
        settings.offload,
        settings.split or (),
    )


def refuse_alone(settings: ParallelSettings) -> None:
    """Raises for settings that would do nothing in a run of one process.

    Raises:
        ConfigError: naming how to start more.
    """
    default = ParallelSettings()
    asked = [
        f"parallel.{name}={value}"
        for name, value in settings
        if value != getattr(default, name) and name != "timeout_s"
    ]
    if asked:
        many = max(2, settings.tensor * settings.pipeline)
        raise ConfigError(
            "this is for several processes, and would do nothing in one",
            got=", ".join(asked),
            cure=f"start more: --nproc {many}, or torchrun; or leave it out",
        )


def divisors(number: int) -> list[int]:
    """Of a number, in their order."""
    return [n for n in range(1, number + 1) if number % n == 0]
