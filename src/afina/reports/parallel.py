"""What layouts of several processes come to, side by side, and in words which of them help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from afina.errors import ConfigError, sized
from afina.parallel.bubbles import CHUNKS, micro_batches, table, waiting
from afina.parallel.plan import Plan
from afina.parallel.predict import Amount, predicted, shapes_of
from afina.parallel.refusals import Facts, explained
from afina.parallel.runtime import Named
from afina.parallel.traffic import Message, counts, sent, traffic
from afina.train.fit import refuse_several
from afina.train.space import STATES
from afina.tree import Edit

HARDLY = 0.05
"""A stage that takes less than this share off hardly helps."""

WAYS = (
    "what would: zero 3, parallel.tensor and parallel.pipeline share the weights out, and quantize "
    "makes them smaller"
)

VALUES = 2
"""Numbers that Adam and its kin keep for each one that trains."""


@dataclass(frozen=True)
class Judged:
    """One layout.

    Attributes:
        plan: it.
        amount: bytes of the process that holds most.
        messages: of a step, with processes that have other rows.
        inside: bytes that one process sends beside those, in a step: inside its tensor group and its pipeline.
        waits: share of a step that a process of the pipeline waits.
        refused: why it cannot be; "" where it can.
    """

    plan: Plan
    amount: Amount | None = None
    messages: Sequence[Message] = ()
    inside: int = 0
    waits: float = 0.0
    refused: str = ""

    @property
    def sent(self) -> int:
        """Bytes that one process sends in a step."""
        return sent(self.messages, self.plan.data) + self.inside


@dataclass(frozen=True)
class Table:
    """Layouts side by side.

    Attributes:
        rows: the layouts.
        frozen: parameters.
        trained: parameters.
        passes: (micro-batches of a step, tokens of each).
    """

    rows: Sequence[Judged]
    frozen: int
    trained: int
    passes: tuple[int, int]

    def lines(self) -> list[str]:
        """For people."""
        names = ("weights", "gradients", "optimiser", "at once", "all", "sent")
        wide = max(len(str(row.plan)) for row in self.rows) + 1
        head = f"{'processes':<{wide}}{''.join(f'{name:>11}' for name in names)}{'waits':>7}"
        many, tokens = self.passes
        return [
            f"{self.frozen:,} parameters are frozen, {self.trained:,} train",
            f"a step is {many} passes of {tokens:,} tokens a process",
            "bytes of the process that holds most, without activations; what it sends in a step; how long it waits",
            "",
            head,
            *(self._line(row, wide) for row in self.rows if row.amount is not None),
            *(f"{row.plan}: refused: {row.refused}" for row in self.rows if row.refused),
            "",
            *self.advice(),
        ]

    def _line(self, row: Judged, wide: int) -> str:
        amount = row.amount
        assert amount is not None
        sizes = (
            amount.weights, amount.gradients, amount.state, amount.gathered, amount.total, row.sent,
        )  # fmt: skip
        cells = "".join(f"{sized(size):>11}" for size in sizes)
        return f"{row.plan!s:<{wide}}{cells}{f'{row.waits:.0%}' if row.waits else '-':>7}"

    def advice(self) -> Iterator[str]:
        """Which stages hardly help, and what would."""
        by_zero = {r.plan.zero: r.amount for r in self.rows if r.plan.data == r.plan.processes > 1}
        whole = by_zero.get(0)
        if whole is None:
            return
        saved = {
            zero: 1 - amount.total / whole.total
            for zero, amount in by_zero.items()
            if zero in (1, 2) and amount is not None
        }
        hardly = [zero for zero, share in saved.items() if share < HARDLY]
        for zero in hardly:
            yield (
                f"zero {zero} hardly helps: it takes {saved[zero]:.1%} off, for what trains is little beside "
                f"{sized(whole.weights)} of weights"
            )
        if hardly:
            yield WAYS

    def document(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "frozen_parameters": self.frozen,
            "trained_parameters": self.trained,
            "micro_batches": self.passes[0],
            "tokens_of_a_pass": self.passes[1],
            "layouts": [_document(row) for row in self.rows],
            "advice": list(self.advice()),
        }


def _document(row: Judged) -> dict[str, Any]:
    plan, amount = row.plan, row.amount
    found: dict[str, Any] = {
        "processes": plan.processes,
        "pipeline": plan.pipeline,
        "schedule": plan.schedule,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "tensor": plan.tensor,
        "zero": plan.zero,
    }
    if amount is None:
        return {**found, "refused": row.refused}
    return {
        **found,
        "bytes": {**amount._asdict(), "all": amount.total},
        "messages": [message._asdict() for message in row.messages],
        "collectives": dict(counts(row.messages)),
        "sent_bytes": row.sent,
        "sent_inside_bytes": row.inside,
        "waits": row.waits,
    }


def judge(
    edit: Edit, plans: Sequence[Plan], facts: Facts, settings: Any, passes: tuple[int, int]
) -> Table:
    """What layouts come to for a model and what is attached to it.

    Args:
        edit: of the model, which may lie on the meta device.
        plans: the layouts.
        facts: of the model.
        settings: of the run (`RunConfig`).
        passes: (micro-batches of a step of each process, tokens of each).
    """
    tensors = edit.trainable()
    trained = sum(p.numel() for p in tensors.values())
    every = sum(p.numel() for p in edit.model.parameters())
    rows = [_judged(edit, plan, facts, settings, passes) for plan in plans]
    return Table(rows, every - trained, trained, passes)


def _judged(edit: Edit, plan: Plan, facts: Facts, settings: Any, passes: tuple[int, int]) -> Judged:
    model, tensors = edit.model, edit.trainable()
    values = STATES.get(settings.train.optimizer.lower(), VALUES)
    try:
        for error in explained(plan, facts):
            raise error
        refuse_several(plan, settings.train, [one.key for one in settings.techniques])
        ranks = _kinds(plan)
        amounts = [predicted(plan, model, tensors, values, rank) for rank in ranks]
    except ConfigError as error:
        wanted = "" if error.wanted is None else f"; {error.wanted} would do"
        return Judged(plan, refused=f"{error.what} ({error.got}{wanted})")
    # What a process says to those with other rows is of what it holds: without groups and stages, of the whole.
    flat = replace(plan, pipeline=1, tensor=1)
    alone = plan.tensor == plan.pipeline == 1
    messages = traffic(flat, model, tensors, passes[0]) if alone else ()
    most = max(amounts, key=lambda amount: amount.total)
    beside = 0 if alone else rows_bytes(plan, model, tensors, passes[0])
    return Judged(
        plan,
        most,
        messages,
        inside_bytes(plan, facts, model, passes) + beside,
        _waits(plan, passes[0]),
    )


def _kinds(plan: Plan) -> list[int]:
    """A process of each stage of a pipeline: others of that stage hold no more."""
    return [
        rank
        for rank in range(plan.processes)
        if plan.data_rank(rank) == plan.place(rank).tensor == 0
    ]


def _waits(plan: Plan, passes: int) -> float:
    """The share of a step that processes of a pipeline wait, on average, where all passes take as long."""
    if plan.pipeline == 1:
        return 0.0
    many = micro_batches(plan.schedule, plan.pipeline, passes)
    order = table(plan.schedule, plan.pipeline, many, CHUNKS[plan.schedule])
    shares = waiting(order).shares
    return sum(shares) / len(shares)


def rows_bytes(plan: Plan, model: nn.Module, tensors: Named, rounds: int) -> int:
    """About what a process with a part of the model sends those with other rows, in a step."""
    if plan.data == 1:
        return 0
    sizes = {n: p.element_size() for n, p in model.named_parameters()}
    here = {n: math.prod(s) * sizes[n] for n, s in shapes_of(plan, model, 0).items()}
    every, trained = sum(here.values()), sum(here[n] for n in tensors if n in here)
    times = {
        0: 2 * trained,
        1: 2 * trained,
        2: (rounds + 1) * trained,
        3: rounds * (2 * every + trained),
    }
    return times[plan.zero] * (plan.data - 1) // plan.data


def inside_bytes(plan: Plan, facts: Facts, model: Any, passes: tuple[int, int]) -> int:
    """Bytes of states that one process sends in its tensor group and to its neighbour in the pipeline, in a step.

    A tensor group sums states twice in a block, forward and backward: behind attention and behind the feed-forward. A
    stage sends states forward and their gradients back.
    """
    many, tokens = passes
    states = many * tokens * facts.width * next(model.parameters()).element_size()
    blocks = -(-facts.layers // plan.pipeline)
    sums = 2 * states * (plan.tensor - 1) // plan.tensor
    return (4 * blocks * sums if plan.tensor > 1 else 0) + (states if plan.pipeline > 1 else 0)
