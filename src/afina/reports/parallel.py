"""What layouts of several processes come to, side by side, and in words which of them help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from afina.errors import ConfigError, sized
from afina.parallel.bubbles import chunks_of, micro_batches, table, waiting
from afina.parallel.plan import Plan
from afina.parallel.portion import Portion
from afina.parallel.predict import Amount, predicted
from afina.parallel.refusals import Facts, explained
from afina.parallel.step_traffic import step_traffic
from afina.parallel.tensor_traffic import Pass
from afina.parallel.traffic import Message, counts, sent
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
        messages: of a step, of the process that sends most.
        speaker: that process's rank.
        waits: share of a step that a process of the pipeline waits.
        refused: why it cannot be; "" where it can.
    """

    plan: Plan
    amount: Amount | None = None
    messages: Sequence[Message] = ()
    speaker: int = 0
    waits: float = 0.0
    refused: str = ""

    @property
    def sent(self) -> int:
        """Bytes that that process sends in a step."""
        return sent(self.messages)

    def told(self) -> Iterator[str]:
        """What it says, those of all blocks together, for people."""
        lines: Counter[tuple[str, int, str, int]] = Counter()
        for kind, size, of, among, times in self.messages:
            lines[kind, size, re.sub(r"\b\d+\b", "*", of), among] += times
        if lines:
            yield f"what process {self.speaker}, which sends most, says and hears in a step:"
        for (kind, size, of, among), times in lines.items():
            yield f"{times:>7} x {kind:<14} of {sized(size):>9} among {among}: {of}"


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
            "bytes of the process that holds most, without activations; what the one that sends most sends in a step; "
            "how long processes wait",
            "",
            head,
            *(self._line(row, wide) for row in self.rows if row.amount is not None),
            *(f"{row.plan}: refused: {row.refused}" for row in self.rows if row.refused),
            *(("", *self.rows[0].told()) if len(self.rows) == 1 else ()),
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
        "sent_by": row.speaker,
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
    many, tokens = passes
    # Every token is taken to be trained: the most that a loss can say.
    each = [Pass(tokens, tokens)] * many
    again = settings.train.recompute is True
    said = {
        rank: step_traffic(Portion(plan, rank, model, tensors), each, recompute=again)
        for rank in ranks
    }
    speaker = max(said, key=lambda rank: sent(said[rank]))
    return Judged(
        plan,
        max(amounts, key=lambda amount: amount.total),
        said[speaker],
        speaker,
        _waits(plan, many),
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
    order = table(plan.schedule, plan.pipeline, many, chunks_of(plan))
    shares = waiting(order).shares
    return sum(shares) / len(shares)
