"""How long processes of a pipeline wait: counted in the very tables that torch's schedules run by.

With p processes, m micro-batches and v stages a process, and passes that take as long everywhere:

| schedule | share of a step that a process waits |
|---|---|
| gpipe, 1f1b | (p - 1) / (m + p - 1) |
| interleaved | (p - 1) / (v m + p - 1), where p divides m |
| zero_bubble | less: a backward pass is split, and that of the weights fills what would be waiting |

gpipe keeps what backward needs of m micro-batches, 1f1b that of at most p - rank.

Sources: Huang et al. 2019, "GPipe", arXiv 1811.06965, section 2; Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters", arXiv 2104.04473, section 2.2; Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from afina.parallel.plan import Plan, Schedule

CHUNKS: Mapping[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""Stages of a process, where nobody says how the blocks are split."""


def chunks_of(plan: Plan) -> int:
    """Stages of each process of a pipeline."""
    return len(plan.split) // plan.pipeline if plan.split else CHUNKS[plan.schedule]


KINDS = ("F", "B", "I", "W")
"""Of a `Slot`; whatever else stands in a table is done between them."""


class Slot(NamedTuple):
    """One piece of work of a process.

    Attributes:
        kind: F forward, B backward, I backward of the inputs alone, W backward of the weights alone.
        stage: of which stage.
        micro: of which micro-batch.
    """

    kind: str
    stage: int
    micro: int


@dataclass(frozen=True)
class Waiting:
    """What one step comes to.

    Attributes:
        length: of the step, in units of the costs.
        busy: of each process.
        most: micro-batches whose activations a process keeps at once, of each process; those of each of its stages.
    """

    length: float
    busy: tuple[float, ...]
    most: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the step that each process waits."""
        return tuple(1 - busy / self.length for busy in self.busy)


def micro_batches(schedule: Schedule, processes: int, wanted: int) -> int:
    """The fewest micro-batches, no fewer than wanted, that a schedule takes.

    Args:
        schedule: by name.
        processes: of the pipeline.
        wanted: at least 1.
    """
    if schedule == "gpipe":
        return max(1, wanted)
    found = max(processes, wanted)
    if schedule != "1f1b":
        # These go in rounds of about as many micro-batches as there are processes, all rounds alike.
        while found % max(1, found // processes):
            found += 1
    return found


def table(schedule: Schedule, processes: int, micros: int, chunks: int) -> list[list[Slot]]:
    """What each process does, in its order, as torch's schedule has it.

    Args:
        schedule: by name.
        processes: of the pipeline.
        micros: micro-batches, as many as `micro_batches` says or more.
        chunks: stages of a process.
    """
    made = made_schedule(schedule, _stages(processes, chunks, 0), micros)
    order: Mapping[int, Sequence[Any]] = made.pipeline_order
    found: list[list[Slot]] = []
    for rank in range(processes):
        acts = [a for a in order[rank] if a is not None and a.computation_type.value in KINDS]
        kinds = [(act.computation_type.value, act.stage_index) for act in acts]
        # Of one stage the n-th of a kind is that of micro-batch n. In 1F1B's table the last process counts from 1,
        # which its run does not.
        found.append([Slot(*kind, kinds[:at].count(kind)) for at, kind in enumerate(kinds)])
    return found


def waiting(
    order: Sequence[Sequence[Slot]],
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> Waiting:
    """Runs a table: each piece of work begins when what it needs is there and its process is free.

    Args:
        order: of each process.
        forward: time of a forward pass of one stage.
        inputs: of a backward pass to a stage's input.
        weights: of one to its weights; 0 where next to nothing trains, as with LoRA.

    Raises:
        ValueError: the table waits for itself.
    """
    costs = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    stages = 1 + max(slot.stage for one in order for slot in one)
    ended: dict[tuple[str, int, int], float] = {}
    at = [0] * len(order)
    free = [0.0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for rank, slots in enumerate(order):
            while at[rank] < len(slots):
                slot = slots[at[rank]]
                ready = [ended.get(need) for need in _needs(slot, stages)]
                if any(time is None for time in ready):
                    break
                begins = max([free[rank], *(time or 0.0 for time in ready)])
                free[rank] = begins + costs[slot.kind]
                ended[_result(slot)] = free[rank]
                at[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the table waits for itself")
    busy = tuple(sum(costs[slot.kind] for slot in slots) for slots in order)
    return Waiting(max(free), busy, tuple(_most(slots) for slots in order))


def _result(slot: Slot) -> tuple[str, int, int]:
    """What a piece of work makes: activations, or gradients of its input, or nothing that others wait for."""
    kind = {"F": "F", "B": "B", "I": "B", "W": "W"}[slot.kind]
    return kind, slot.stage, slot.micro


def _needs(slot: Slot, stages: int) -> list[tuple[str, int, int]]:
    if slot.kind == "F":
        return [("F", slot.stage - 1, slot.micro)] if slot.stage else []
    if slot.kind == "W":
        return [("B", slot.stage, slot.micro)]
    own = ("F", slot.stage, slot.micro)
    return [own] if slot.stage == stages - 1 else [own, ("B", slot.stage + 1, slot.micro)]


def _most(slots: Sequence[Slot]) -> int:
    """Forward passes whose backward pass has not ended, at most."""
    now = most = 0
    for slot in slots:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[slot.kind]
        most = max(most, now)
    return most


def made_schedule(schedule: Schedule, stages: Sequence[Any], micros: int) -> Any:
    """torch's schedule over some stages of one process, whose last stage gives the loss itself.

    Args:
        schedule: by name.
        stages: torch's, of this process.
        micros: micro-batches.
    """
    from torch.distributed import pipelining

    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    given: Any = stages[0] if schedule in ("gpipe", "1f1b") else list(stages)
    # The loss of a micro-batch is its share of the window's already, so sums of gradients are right as they are.
    return kinds[schedule](given, micros, loss_fn=_itself, scale_grads=False)


def _itself(loss: Any, target: Any) -> Any:
    return loss


def _stages(processes: int, chunks: int, rank: int) -> list[Any]:
    """What a schedule asks of stages to make its table; they run nothing."""
    return [
        SimpleNamespace(
            num_stages=processes * chunks,
            group_size=processes,
            group_rank=rank,
            stage_index=rank + processes * chunk,
            submod=None,
        )
        for chunk in range(chunks)
    ]
