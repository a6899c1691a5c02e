"""Rows laid end to end beside the same rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from afina.errors import AfinaError
from afina.models.forward import packing, token_losses, trained_logits
from afina.models.generate import evaluating
from afina.reports.trial import Trial
from afina.train.preflight import Finding, of_error, skipped
from afina.types import Row

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far the logits of packed rows may lie from those of single ones, as a share of their size, by dtype."""

SOME_ROWS, SOME_TOKENS = 4, 1024
"""Rows that are run packed and alone, and their tokens together."""


def some_rows(rows: Sequence[Row]) -> list[Row]:
    """A few rows that fit into one pass: the first ones that do, or else the two shortest."""
    chosen: list[Row] = []
    for row in rows:
        if row.trained_tokens and sum(len(one.tokens) for one in (*chosen, row)) <= SOME_TOKENS:
            chosen.append(row)
        if len(chosen) == SOME_ROWS:
            break
    if len(chosen) > 1:
        return chosen
    usable = [row for row in rows if row.trained_tokens]
    return sorted(usable, key=lambda row: len(row.tokens))[:2]


@torch.no_grad()
def packed_as_alone(trial: Trial) -> Finding:
    """Whether rows laid end to end give the logits and the loss that each gives alone."""
    if not trial.packed:
        return skipped("packing", "data.packing is off")
    rows = some_rows(next(trial.windows()))
    if len(rows) < 2:
        return skipped("packing", "a step has one row")
    with evaluating(trial.model):
        alone = [_logits(trial, [row], packed=False) for row in rows]
        try:
            with packing(trial.model, True):
                logits, targets = _logits(trial, rows, packed=True)
                shared = _shared_loss(trial, rows)
        except AfinaError as error:
            return of_error("packing", error)
    single = torch.cat([one for one, _ in alone])
    if not bool(torch.isfinite(single).all()):
        return skipped("packing", "the model's numbers are not finite")
    error = float((logits - single).norm() / single.norm())
    packed_loss, loss = (float(token_losses(one, targets).mean()) for one in (logits, single))
    others = [packed_loss] if shared is None else [packed_loss, shared]
    change = max(abs(other - loss) for other in others) / max(abs(loss), 1e-9)
    bound = TOLERANCE.get(trial.dtype, TOLERANCE[torch.bfloat16])
    values = {"relative_error": error, "relative_loss": change, "bound": bound, "rows": len(rows)}
    # Written so that NaN is not within bounds.
    if not (error <= bound and change <= bound):
        return Finding(
            "packing",
            "error",
            f"packed rows see each other: their logits are off by {error:.2g} of their size, the loss by {change:.2g} "
            f"(bound {bound:g})",
            "set data.packing=false",
            values=values,
        )
    said = (
        f"{len(rows)} rows packed give the logits they give alone, within {error:.1g} of their size"
    )
    if shared is not None:
        step = next(trial.windows())
        share = trial.passes.tokens(step) / sum(len(row.tokens) for row in step)
        values["computed_share"] = share
        said += (
            f"; rows that begin alike share their beginning: {share:.0%} of the tokens are computed"
        )
    return Finding("packing", "ok", said, values=values)


def _shared_loss(trial: Trial, rows: Sequence[Row]) -> float | None:
    """The mean loss where rows share their beginnings; None where they do not."""
    if not trial.passes.shared:
        return None
    batch = trial.passes.batch(rows)
    return float(trial.passes.loss(batch)) / batch.trained_tokens


def _logits(trial: Trial, rows: Sequence[Row], *, packed: bool) -> tuple[Tensor, Tensor]:
    passes = replace(trial.passes, packed=packed, shared=False)
    logits, targets = trained_logits(trial.model, passes.batch(rows))
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), targets
