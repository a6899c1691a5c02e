"""The validation loss: the same definition as training's, over all validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from afina.models.forward import own_attention, to_device, token_losses, trained_logits
from afina.types import Batch, Row

ROWS_AT_ONCE = 16
"""Rows that are cut into micro-batches together; their number does not change the loss."""


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    micro_batches: Sequence[Sequence[Row]],
    collate: Callable[[Sequence[Row]], Batch],
) -> float:
    """Sum of the token losses of all rows, divided by their trained tokens.

    The model is set to evaluation for the time (no dropout) and put back.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, trained = 0.0, 0
    try:
        for rows in micro_batches:
            batch = to_device(collate(rows), device)
            if batch.trained_tokens:
                total += float(token_losses(*trained_logits(model, batch)).sum())
                trained += batch.trained_tokens
    finally:
        model.train(training)
    return total / trained if trained else float("nan")


def scorer(
    rows: Sequence[Row],
    cut: Callable[[Sequence[Row]], list[list[Row]]],
    collate: Callable[[Sequence[Row]], Batch],
    more: Callable[[nn.Module, Sequence[Row]], Mapping[str, float]] | None,
    own: str | None,
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """What scores a model on the validation rows.

    Args:
        rows: for validation.
        cut: rows -> micro-batches.
        collate: a micro-batch -> its tensors.
        more: scores beyond the loss.
        own: the model's own attention, which `more` runs with; None where it is in use anyway.

    Returns:
        The loss and the further scores by name; None without rows.
    """
    if not rows:
        return None
    parts = [m for i in range(0, len(rows), ROWS_AT_ONCE) for m in cut(rows[i : i + ROWS_AT_ONCE])]

    def score(model: nn.Module) -> Mapping[str, float]:
        scores = {"loss": mean_loss(model, parts, collate)}
        if more is not None:
            # Generation knows nothing of packed rows and takes the model's own attention.
            with own_attention(model, own) if own else nullcontext():
                scores.update(more(model, rows))
        return scores

    return score
