"""What a run says of its rows before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from afina import seams
from afina.ops import attention
from afina.train.passes import Passes
from afina.train.plan import Plan


def of_rows(plan: Plan, passes: Passes, why: str | None, *, whole: bool = True) -> Iterator[str]:
    """Which rows are shown when, what they share in a step or why nothing, and how they go through the model.

    Args:
        plan: of the run.
        passes: of the run.
        why: rows do not share their beginnings though the settings say so.
        whole: this process has the model's end, and so knows its head.
    """
    yield from plan.notes()
    if why:
        yield f"rows that begin alike are computed apart: {why}"
    if passes.shared:
        step = plan.usual()
        share = passes.tokens(step) / sum(len(row.tokens) for row in step)
        yield f"rows that begin alike share their beginning: {share:.0%} of the tokens of a step are computed"
    if passes.packed:
        dtype = next(passes.model.parameters()).dtype
        yield f"attention by {attention.backend(passes.device, dtype)}"
    if whole and passes.head is None and seams.classifies(passes.model) is None:
        yield "all logits of a micro-batch are made: the head is not a plain linear"
