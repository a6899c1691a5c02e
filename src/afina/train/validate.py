"""The validation loss: the same definition as training's, over all validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from afina.models.blocks import plainly
from afina.models.forward import own_attention
from afina.train.passes import Passes
from afina.types import Row

ROWS_AT_ONCE = 16
"""Rows that are cut into micro-batches together; their number does not change the loss."""


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    micro_batches: Sequence[Sequence[Row]],
    passes: Passes,
    add: Callable[[float], float] = float,
) -> float:
    """Sum of the token losses of all rows, divided by their trained tokens.

    The model is set to evaluation for the time (no dropout) and put back.

    Args:
        model: of the run.
        micro_batches: of this process.
        passes: rows -> losses.
        add: sums a number over the processes that see different rows.
    """
    training = model.training
    model.eval()
    total, trained = 0.0, 0
    try:
        with plainly(model):
            for rows in micro_batches:
                batch = passes.batch(rows)
                if batch.trained_tokens:
                    total += float(passes.loss(batch))
                    trained += batch.trained_tokens
    finally:
        model.train(training)
    total, trained = add(total), add(trained)
    return total / trained if trained else float("nan")


def scorer(
    rows: Sequence[Row],
    cut: Callable[[Sequence[Row]], list[list[Row]]],
    passes: Passes,
    more: Callable[[nn.Module, Sequence[Row]], Mapping[str, float]] | None,
    own: str | None,
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """What scores a model on the validation rows.

    Args:
        rows: for validation.
        cut: rows -> micro-batches.
        passes: a micro-batch -> its losses.
        more: scores beyond the loss.
        own: the model's own attention, which `more` runs with; None where it is in use anyway.

    Returns:
        The loss and the further scores by name; None without rows.
    """
    if not rows:
        return None
    parts = [m for i in range(0, len(rows), ROWS_AT_ONCE) for m in cut(rows[i : i + ROWS_AT_ONCE])]

    def score(model: nn.Module) -> Mapping[str, float]:
        scores = {"loss": mean_loss(model, parts, passes)}
        if more is not None:
            # Generation knows nothing of packed rows and takes the model's own attention.
            with plainly(model), own_attention(model, own) if own else nullcontext():
                scores.update(more(model, rows))
        return scores

    return score
