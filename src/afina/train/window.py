"""One micro-batch of a window on its way through the model, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afina.train.ahead import Part
from afina.train.passes import counted
from afina.train.work import Work
from afina.tree import seed_of
from afina.types import Batch, Row


class Micro:
    """See `parallel.runtime.Micro`: what a process, or a pipeline of them, does with a micro-batch in training.

    Args:
        work: what to train and how.
        part: the rows of the micro-batch and their tensors; None for one without rows.
        place: its step and its number in it, both from 0.
        trained: tokens of the whole window.

    Attributes:
        rows: of the micro-batch.
        begun: something was done with it.
        run: the backward pass.
        ids: of its rows, in the order of the batch.
        share: of the window's loss; None before the backward pass, or where nothing trains.
    """

    def __init__(self, work: Work, part: Part | None, place: tuple[int, int], trained: int) -> None:
        self.work, self.place, self.trained = work, place, trained
        self.rows: Sequence[Row] = part.rows if part else ()
        self._batch = part.batch if part else None
        step, number = place
        self.seed = seed_of(work.settings.seed, f"step {step} micro-batch {number}")
        self.begun = False
        self.run: Callable[[Tensor], None] = Tensor.backward
        self.ids: tuple[int, ...] = ()
        self.share: float | None = None

    def begin(self) -> Batch | None:
        """Its tensors, with random numbers set; None when nothing in it trains."""
        self.begun = True
        batch = self._batch
        if batch is None:
            return None
        # Dropout, and what a seam draws from torch, then are pure functions of the step.
        torch.manual_seed(self.seed)
        for change in self.work.seams.on_batch:
            batch = change(batch, self.place[0])
        self.ids = batch.rows
        return batch if batch.trained_tokens else None

    def widened(self, batch: Batch, rows: int, tokens: int) -> Batch:
        """The batch with padding, its loss the same."""
        return self.work.passes.widened(batch, rows, tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Its share of the window's loss."""
        step, number = self.place
        self.begun = True
        with self.work.around(self.rows, step, number):
            losses = self.work.passes.losses(batch, step=step, seed=self.seed)
        for weigh in self.work.seams.loss:
            losses = weigh(losses, batch, step)
        return counted(losses, batch).sum() / self.trained

    def idle(self) -> Tensor:
        """The loss of a row that is none of the data's."""
        passes = self.work.passes
        return passes.losses(passes.idle()).sum()

    def backward(self, loss: Tensor, batch: Batch) -> None:
        """The backward pass of its share, penalties with it."""
        # Each micro-batch adds the share of the penalty that it is of the window, so that cutting changes nothing.
        share = batch.trained_tokens / self.trained
        penalties = self.work.seams.penalty
        self.run(sum((penalty(self.place[0]) * share for penalty in penalties), loss))
        self.share = float(loss.detach())
