"""The validation loss: the same definition as training's, over all validation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from afina.models.forward import to_device, token_losses, trained_logits
from afina.types import Batch, Row


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
