"""A run in several processes: the mesh over torch.distributed.

Each process sees its own rows of every step; gradients are summed, so that a step is that of one process with all rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from afina.config import ParallelSettings
from afina.errors import RunError
from afina.parallel.copies import Copies, each
from afina.parallel.full_shard import FullShards
from afina.parallel.held import Held, held
from afina.parallel.parts import materialise, parts_of, placed
from afina.parallel.pipeline import Pipeline
from afina.parallel.plan import Plan, plan_of
from afina.parallel.runtime import Fill, Micro, Named, dealt
from afina.parallel.store import Lot
from afina.parallel.tensor import Slices
from afina.parallel.together import by_first, together
from afina.parallel.watch import Watch, is_lost, met
from afina.tree.pieces import Piece, mark, piece_of

T = TypeVar("T")

NAMES = ("pipeline", "replicate", "shard", "tensor")
"""Of the mesh's dimensions; see `Plan`."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process it starts."""


def started() -> int | None:
    """How many processes this one was started among; None where nothing says that there are others."""
    if any(name not in os.environ for name in VARIABLES):
        return None
    return int(os.environ["WORLD_SIZE"])


class Processes:
    """See `runtime.Mesh`.

    Args:
        settings: of the run.
        processes: how many there are; None asks the environment, as torchrun sets it.
        rank: of this one; None asks the environment.
        device: cpu or cuda; None is the GPU of this process's number on its machine, where there are any.

    Attributes:
        plan: how they share the run.
        rank: of this process.
        device: where it computes.

    Raises:
        ConfigError: settings that do not fit the number of processes.
        RunError: not started by torchrun.
    """

    def __init__(
        self,
        settings: ParallelSettings,
        processes: int | None = None,
        rank: int | None = None,
        device: str | None = None,
    ) -> None:
        many = processes if processes is not None else started()
        if many is None:
            raise RunError(
                "this process was not started among others",
                wanted=f"the variables {', '.join(VARIABLES)}",
                cure="start with afina train --nproc N, or with torchrun",
            )
        self.plan: Plan = plan_of(settings, many)
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.timeout = timedelta(seconds=settings.timeout_s)
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self._mesh: DeviceMesh | None = None
        self._watch: Watch | None = None
        self._held: Held = Copies()
        self._places: dict[str, Piece] = {}
        self._pipeline: Pipeline | None = None
        self._slices: Slices | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """Of all processes, its dimensions `NAMES`.

        Raises:
            RunError: before `begin`.
        """
        if self._mesh is None:
            raise RunError("the processes have not met yet", cure="mesh.begin() first")
        return self._mesh

    @property
    def computes(self) -> torch.device | None:
        """The GPU, where what it computes with lies in the CPU."""
        return self.device if self.plan.offload else None

    @property
    def writes(self) -> bool:
        """The first of them does."""
        return self.rank == 0

    def begin(self) -> None:
        """Meets the other processes, unless this has happened."""
        if self._mesh is not None:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            self._watch = met(
                "nccl" if self.device.type == "cuda" else "gloo",
                self.rank,
                self.plan.processes,
                self.timeout,
            )
        self._mesh = init_device_mesh(self.device.type, self.plan.degrees, mesh_dim_names=NAMES)
        # The processes with different rows, as one group.
        self._mesh["replicate", "shard"]._flatten("data")

    def at(self, step: int) -> None:
        """Notes where this process is, for the others."""
        if self._watch is not None:
            self._watch.at(step)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is lost is told by the process that is missed, and the step; see `watch.Watch`."""
        try:
            yield
        except RuntimeError as error:
            if self._watch is None or not is_lost(error):
                raise
            raise self._watch.lost(error) from error

    def group(self, name: str) -> dist.ProcessGroup:
        """The processes that differ from this one in one dimension of the mesh alone.

        Args:
            name: one of `NAMES`, or data: with different rows.
        """
        return self.mesh.get_group(name)

    def hold(self, model: nn.Module, tensors: Named, fill: Fill | None = None) -> None:
        """Takes this process's part of the model, by the plan; see `Mesh.hold`."""
        if self.plan.tensor > 1:
            self._slices = Slices(self.group("tensor"), model, tensors)
        if self.plan.pipeline > 1:
            self._pipeline = Pipeline(self, model, tensors, self._slices)
        tensors = self._mine(tensors)
        self._places = placed(model, self.holds)
        # Only what is shared out by torch is so before it has values.
        later = self.plan.zero == 3 and self.plan.shard > 1
        if fill is not None and not later:
            self._fill(model, fill)
            tensors = {name: model.get_parameter(name) for name in tensors}
        self._held = held(self, model, tensors)
        if fill is not None and isinstance(self._held, FullShards):
            self._held.embody(torch.device("cpu") if self.plan.offload else self.device)
            self._fill(model, fill)
        apart = self.plan.pipeline > 1 or self.plan.tensor > 1
        if apart and self._held.whole and self.plan.data_rank(self.rank):
            # Each group with rows of its own holds a copy; the first one stands for it in sums over all processes.
            for parameter in tensors.values():
                mark(parameter, replace(piece_of(parameter), counted=False))

    def _fill(self, model: nn.Module, fill: Fill) -> None:
        """Gives this process's part of a model on the meta device memory, and its values."""
        materialise(model, self._places, self.device)
        parts = self.parts(model)
        together(self, lambda: fill(parts, self.device))

    def _mine(self, tensors: Named) -> Named:
        """Those that are of this process's part of the model."""
        return tensors if self._pipeline is None else self._pipeline.mine(tensors)

    def holds(self, name: str) -> bool:
        """Whether this process has the values of a parameter of the model, some part of it at least."""
        return self._pipeline is None or self._pipeline.holds(name)

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """What this process moves."""
        return self._held.own(self._mine(tensors))

    def parts(self, model: nn.Module) -> dict[str, Lot]:
        """What is here of each of the model's parameters, by name."""
        return parts_of(model, self._places)

    def within(self, call: Callable[[], T]) -> T:
        """Where weights are shared out they are gathered as it goes on."""
        return self._held.within(call)

    def opened(self) -> AbstractContextManager[None]:
        """See `Mesh.opened`."""
        return self._held.opened()

    def through(
        self, micros: Sequence[Micro], tensors: Named, *, train: bool = True
    ) -> list[float | None]:
        """One after the other, or by a pipeline's schedule; gradients are shared out, if they are, after each round."""
        shares: list[float | None] = []
        if train:
            self._held.begin()
        if self._pipeline is not None:
            with self._held.kept(train=train):
                shares = self._pipeline.through(micros, train=train)
            if train:
                self._held.passed(self._mine(tensors))
            return shares
        for micro in micros:
            shares.append(self._held.taken(micro))
            if train:
                self._held.passed(self._mine(tensors))
        return shares

    def alone(self, run: Callable[[], Tensor]) -> Tensor:
        """By the stages that are here."""
        return run() if self._pipeline is None else self._pipeline.alone(run)

    def at_end(self, run: Callable[[], T]) -> T | None:
        """By the last stage."""
        return run() if self._pipeline is None else self._pipeline.at_end(run)

    def reduce(self, tensors: Named) -> None:
        """Sums gradients over the processes with different rows."""
        self._held.reduce(self._mine(tensors))
        if self._pipeline is not None:
            self._pipeline.add_shared(self.own(tensors))
        if self._slices is not None:
            self._slices.add_partial(self.own(tensors))

    def publish(self, tensors: Named) -> None:
        """Gathers what each process moved."""
        self._held.publish(self._mine(tensors))

    def norm(self, own: Named) -> Tensor:
        """Norm of the whole gradient: each piece counts once."""
        counted = [p.grad for p in own.values() if p.grad is not None and piece_of(p).counted]
        norm = torch.nn.utils.get_total_norm(counted)
        if self._held.whole and self.plan.tensor == self.plan.pipeline == 1:
            return norm
        square = norm.double().square().to(self.device)
        dist.all_reduce(square)
        # In one dtype everywhere: a process that counts nothing would round by another one, and clip otherwise.
        return square.sqrt()

    def share(self, rows: list[T]) -> list[T]:
        """Every so manieth row."""
        return dealt(rows, self.plan.data_rank(self.rank), self.plan.data)

    def rounds(self, micro_batches: int) -> int:
        """As many as the process with the most needs."""
        # A pipeline is one round, whatever is in it.
        if not self._held.in_rounds or self._pipeline is not None:
            return micro_batches
        return -round(self.least(-micro_batches))

    def number(self, micro_batch: int) -> int:
        """Numbers of one process lie as far apart as there are processes with different rows."""
        return micro_batch * self.plan.data + self.plan.data_rank(self.rank)

    def sum(self, value: float) -> float:
        """Over the processes with different rows."""
        return self._all(value, dist.ReduceOp.SUM, self.group("data"))

    def each(self, values: Tensor) -> list[Tensor]:
        """See `Mesh.each`."""
        return each(values, self.group("data"))

    def least(self, value: float) -> float:
        """Over all processes."""
        return self._all(value, dist.ReduceOp.MIN, None)

    def _all(
        self, value: float, kind: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> float:
        if group is not None and group.size() == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, kind, group=group)
        return float(found)

    def everywhere(self, names: Iterable[str], among: Iterable[str]) -> frozenset[str]:
        """See `Mesh.everywhere`."""
        mine = frozenset(names)
        spoken: list[frozenset[str]] = self.gathered(frozenset(among) - mine)
        return mine - frozenset().union(*spoken)

    def told(self, make: Callable[[], T]) -> T:
        """From the first process; what goes wrong there is raised in all."""
        return by_first(self, make)

    def gathered(self, value: Any) -> list[Any]:
        """See `Mesh.gathered`."""
        found: list[Any] = [None] * self.plan.processes
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Waits for every process."""
        dist.barrier()

    def end(self) -> None:
        """Parts from the others."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._mesh, self._watch = None, None


def mesh_of(settings: ParallelSettings, device: str | None = None) -> Processes | None:
    """The mesh of a process that was started among others; None for one that runs alone.

    Args:
        settings: of the run.
        device: the kind of device, as `train.device` says it.
    """
    many = started()
    return None if many is None or many == 1 else Processes(settings, many, device=device)
