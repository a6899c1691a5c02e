"""The validation loss: the same definition as training's, over all validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from afina.models.blocks import plainly
from afina.models.forward import own_attention
from afina.parallel.runtime import Mesh, OneProcess
from afina.train.passes import Passes
from afina.types import Batch, Row

ROWS_AT_ONCE = 16
"""Rows that are cut into micro-batches together; their number does not change the loss."""


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    micro_batches: Sequence[Sequence[Row]],
    passes: Passes,
    mesh: Mesh | None = None,
) -> float:
    """Sum of the token losses of all rows, divided by their trained tokens.

    The model is set to evaluation for the time (no dropout) and put back.

    Args:
        model: of the run.
        micro_batches: of this process.
        passes: rows -> losses.
        mesh: the processes, all of which ask; None for this one alone.
    """
    training, mesh = model.training, mesh or OneProcess()
    more = mesh.rounds(len(micro_batches)) - len(micro_batches)
    scored = [Scored(passes, rows) for rows in (*micro_batches, *[()] * more)]
    model.eval()
    try:
        with plainly(model):
            shares = mesh.through(scored, {}, train=False)
    finally:
        model.train(training)
    total = mesh.sum(sum(share for share in shares if share is not None))
    trained = mesh.sum(sum(micro.trained for micro in scored))
    return total / trained if trained else float("nan")


class Scored:
    """See `parallel.runtime.Micro`: a micro-batch whose losses are measured.

    Attributes:
        trained: its tokens that count, once it has begun.
    """

    seed = 0

    def __init__(self, passes: Passes, rows: Sequence[Row]) -> None:
        self.passes, self.rows = passes, rows
        self.trained = 0

    def begin(self) -> Batch | None:
        """Its tensors; None where none counts."""
        if not self.rows:
            return None
        batch = self.passes.batch(self.rows)
        self.trained = batch.trained_tokens
        return batch if batch.trained_tokens else None

    def widened(self, batch: Batch, rows: int, tokens: int) -> Batch:
        """The batch with padding, its loss the same."""
        return self.passes.widened(batch, rows, tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Sum of its token losses."""
        return self.passes.loss(batch)

    def idle(self) -> Tensor:
        """The loss of a row that is none of the data's."""
        return self.passes.losses(self.passes.idle()).sum()

    def backward(self, loss: Tensor, batch: Batch) -> None:
        """Nothing is learnt."""


def scorer(
    rows: Sequence[Row],
    cut: Callable[[Sequence[Row]], list[list[Row]]],
    passes: Passes,
    more: Callable[[nn.Module, Sequence[Row]], Mapping[str, float]] | None,
    own: str | None,
    mesh: Mesh | None = None,
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """What scores a model on the validation rows.

    Args:
        rows: for validation.
        cut: rows -> micro-batches.
        passes: a micro-batch -> its losses.
        more: scores beyond the loss.
        own: the model's own attention, which `more` runs with; None where it is in use anyway.
        mesh: the processes, which share the rows out; None for this one alone.

    Returns:
        The loss and the further scores by name; None without rows.
    """
    if not rows:
        return None
    mine = list(rows) if mesh is None else mesh.share(list(rows))
    parts = [m for i in range(0, len(mine), ROWS_AT_ONCE) for m in cut(mine[i : i + ROWS_AT_ONCE])]

    def score(model: nn.Module) -> Mapping[str, float]:
        scores = {"loss": mean_loss(model, parts, passes, mesh)}
        if more is not None:
            # Generation knows nothing of packed rows and takes the model's own attention.
            opened = nullcontext() if mesh is None else mesh.opened()
            with opened, plainly(model), own_attention(model, own) if own else nullcontext():
                scores.update(more(model, rows))
        return scores

    return score
