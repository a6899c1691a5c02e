"""A step whose loss or gradient is not a finite number: what is known of it, kept for whoever looks for the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afina.errors import RunError
from afina.train import durable, ways
from afina.types import Row

RUIN = 2.0
"""A loss that rose so many times (and by as many nats) over rows that were just learnt shows a step that ruined all."""

MOST_IN_A_ROW = 10
"""So many steps skipped one after another stop a run: it is then not a row that is bad, but the model."""

TORN = (
    "some weights had moved before that was known (train.step_in_backward), so they are not saved"
)
"""Said where a step was broken off that cannot be taken back."""


@dataclass(frozen=True)
class Fault:
    """One such step.

    Attributes:
        step: counted from 1.
        loss: of the step.
        gradient_norm: of the whole gradient.
        parts: the micro-batches: ids of their rows, and their losses (a share of the step's).
        tensors: trainable tensors whose gradient has a number that is not finite.
        groups: kind of tensor (`lora.a`) -> how many of them these are, and how many there are.
        rows: of the step.
        relapse: the loss of the rows of the last step that moved the weights, when they were learnt and now; None when
            there was none.
        torn: some weights had moved before it was known, so that the weights are of no step.
    """

    step: int
    loss: float
    gradient_norm: float
    parts: tuple[tuple[tuple[int, ...], float], ...]
    tensors: tuple[str, ...]
    groups: Mapping[str, tuple[int, int]]
    rows: tuple[Row, ...]
    relapse: tuple[float, float] | None = None
    torn: bool = False

    @property
    def ruined(self) -> bool:
        """Whether the step before spoilt the weights: the very rows that it learnt from have a far higher loss now."""
        if self.relapse is None:
            return False
        then, now = self.relapse
        return not math.isfinite(now) or now > RUIN * (then + 1)

    def suspects(self) -> list[Row]:
        """The rows of the micro-batches whose loss is not finite; all rows when every loss is."""
        bad = {i for ids, loss in self.parts if not math.isfinite(loss) for i in ids}
        return [row for row in self.rows if row.id in bad] or list(self.rows)

    def cause(self) -> str:
        """What is not finite, in words."""
        bad = [i for i, (_, loss) in enumerate(self.parts) if not math.isfinite(loss)]
        if bad:
            which = ", ".join(str(i + 1) for i in bad[:5])
            return f"the loss of micro-batch {which} of {len(self.parts)}"
        if self.tensors:
            kinds = ", ".join(f"{n} of {total} {kind}" for kind, (n, total) in self.groups.items())
            return f"the gradient of {kinds}, though every loss is finite"
        return "the sum over the micro-batches or over the gradient, though each part is finite"

    def error(self, kept: Path | None = None, then: str = "", on_nan: str = "stop") -> RunError:
        """As an error that names the rows.

        Args:
            kept: where the batch was written.
            then: what became of the run, as the way on.
            on_nan: as the run was set.
        """
        ids = [row.id for row in self.suspects()]
        places = ", ".join(row.source for row in self.suspects()[:3] if row.source)
        got = f"loss {self.loss}, gradient norm {self.gradient_norm}, rows {ids}"
        lines = [got, f"not finite: {self.cause()}"]
        lines += [f"rows from {places}"] if places else []
        lines += [f"the whole batch: {kept}"] if kept else []
        if self.relapse is not None and self.ruined:
            was, now = self.relapse
            lines.append(
                f"the step before ruined the weights: its rows had loss {was:.4g}, and now {now:.4g}"
            )
        if self.torn:
            lines.append(TORN)
        return RunError(
            f"step {self.step}: the loss or the gradient is not finite",
            got="\n          ".join(lines),
            cure=f"{self._way_out(on_nan)}{then}",
        )

    def _way_out(self, on_nan: str) -> str:
        if self.ruined:
            return "lower train.lr: with it these weights cannot be mended, and no row is to blame"
        ways_out = ["lower train.lr", ways.loaded_as("fp32"), "look at these rows"]
        if on_nan != "skip":
            ways_out.append("leave such steps out: --on-nan skip (in Python on_nan='skip')")
        return ", or ".join(ways_out)


class NotFiniteError(RunError):
    """Raised by the loop at such a step; the weights are those of the step before, unless the fault is `torn`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        told = fault.error()
        super().__init__(told.what, got=told.got, wanted=told.wanted, cure=told.cure)


def fault_of(
    step: int,
    loss: float,
    norm: float,
    parts: Sequence[tuple[tuple[int, ...], float]],
    tensors: Mapping[str, nn.Parameter],
    rows: Sequence[Row],
    relapse: tuple[float, float] | None = None,
) -> Fault:
    """What is known of a step, from the gradients it left.

    Args:
        step: counted from 1.
        loss: of the step.
        norm: of its whole gradient.
        parts: row ids and loss of each micro-batch.
        tensors: the trainable ones by name, with their gradients, not clipped.
        rows: of the step.
        relapse: as `Fault` has it.
    """
    bad = [
        n
        for n, p in tensors.items()
        if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
    total, broken = Counter(map(_kind, tensors)), Counter(map(_kind, bad))
    groups = {kind: (count, total[kind]) for kind, count in sorted(broken.items())}
    return Fault(step, loss, norm, tuple(parts), tuple(bad), groups, tuple(rows), relapse)


def _kind(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.lora.a` is an `lora.a`; `…norm.weight` a `norm.weight`."""
    return ".".join(name.split(".")[-2:])


def write(fault: Fault, out: Path, tokenizer: Any) -> Path:
    """Writes the batch of a step to `nan/step-000123.json` in the run's folder; JSON has no NaN, so as text."""
    path = out / "nan" / f"step-{fault.step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    value = {
        "step": fault.step,
        "loss": str(fault.loss),
        "gradient_norm": str(fault.gradient_norm),
        "not_finite": fault.cause(),
        "micro_batches": [{"rows": list(ids), "loss": str(loss)} for ids, loss in fault.parts],
        "tensors": list(fault.tensors),
        "suspects": [row.id for row in fault.suspects()],
        "rows": [_row(row, tokenizer) for row in fault.rows],
    }
    durable.write_json(path, value)
    return path


def _row(row: Row, tokenizer: Any) -> dict[str, Any]:
    text = {} if tokenizer is None else {"text": tokenizer.decode(list(row.tokens))}
    return {
        "id": row.id,
        "source": row.source,
        **text,
        "tokens": list(row.tokens),
        "trained": [int(flag) for flag in row.trained],
    }
