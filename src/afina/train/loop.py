"""The training loop: one plain function that knows no technique and does not ask how many processes there are.

    window of rows -> micro-batches -> forward -> sum of token losses / trained tokens of the window -> backward
    -> reduce -> clip -> before_step -> optimiser -> audit -> after_step

The loss of a step is the mean over all trained tokens of its rows, so it does not depend on how the rows are cut into
micro-batches: 8 x 1, 2 x 4 and 1 x 8 give the same gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afina.config import TrainSettings
from afina.errors import RunError
from afina.models.forward import to_device, token_losses, trained_logits
from afina.optim.optimisers import Optimiser
from afina.optim.schedules import factor
from afina.parallel.runtime import Mesh
from afina.train.audit import AUDITED_STEPS, audit
from afina.train.memory import peak_bytes
from afina.tree import Edit, seed_of
from afina.types import Batch, Row


@dataclass(frozen=True)
class Seams:
    """Where techniques that change with time meet the loop; all empty for a plain run.

    Attributes:
        on_batch: (batch, step) -> batch, before it is used.
        loss: (losses (N,), batch, step) -> losses, to weigh token losses.
        param_groups: (name -> scale of its learning rate) -> the same, changed.
        before_step: (step, named tensors), gradients reduced and clipped.
        after_step: (step,), once the tensors have moved.
    """

    on_batch: tuple[Callable[[Batch, int], Batch], ...] = ()
    loss: tuple[Callable[[Tensor, Batch, int], Tensor], ...] = ()
    param_groups: tuple[Callable[[dict[str, float]], dict[str, float]], ...] = ()
    before_step: tuple[Callable[[int, dict[str, nn.Parameter]], None], ...] = ()
    after_step: tuple[Callable[[int], None], ...] = ()


@dataclass(frozen=True)
class Work:
    """All that a step needs.

    Attributes:
        model: the changed model, on its device.
        edit: what was changed.
        optimiser: over the edit's trainable tensors.
        settings: of the run.
        cut: the rows of a step -> micro-batches of rows.
        collate: rows of a micro-batch -> batch.
        mesh: the processes.
        seams: see `Seams`.
        total_steps: of the whole run.
        warmup_steps: of the whole run.
    """

    model: nn.Module
    edit: Edit
    optimiser: Optimiser
    settings: TrainSettings
    cut: Callable[[Sequence[Row]], list[list[Row]]]
    collate: Callable[[Sequence[Row]], Batch]
    mesh: Mesh
    seams: Seams
    total_steps: int
    warmup_steps: int


@dataclass(frozen=True)
class Step:
    """What one optimiser step did.

    Attributes:
        step: steps done, counted from 1.
        loss: mean over the window's trained tokens, in nats.
        rows: ids of the window's rows.
        tokens: real tokens, padding not counted.
        trained_tokens: that were labels.
        gradient_norm: of the whole gradient, before clipping.
        lr: the run's rate at this step.
        seconds: that it took.
        peak_bytes: highest memory use so far, None where unknown.
    """

    step: int
    loss: float
    rows: tuple[int, ...]
    tokens: int
    trained_tokens: int
    gradient_norm: float
    lr: float
    seconds: float
    peak_bytes: int | None

    def line(self) -> dict[str, Any]:
        """As a line of metrics.jsonl."""
        return {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "gradient_norm": self.gradient_norm,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "rows": list(self.rows),
        }


def loop(work: Work, windows: Iterator[Sequence[Row]], start: int = 0) -> Iterator[Step]:
    """Trains from step `start` to the end, yielding after each optimiser step.

    Args:
        work: what to train and how.
        windows: the rows of step `start`, of the next, and so on.
        start: steps already done.

    Raises:
        RunError: when a trainable tensor gets no gradient at the first steps, or a loss is not finite.
    """
    for step in range(start, work.total_steps):
        began = time.perf_counter()
        rows = work.mesh.share(list(next(windows)))
        loss, tokens, trained = backward(work, rows, step)
        tensors = work.edit.trainable()
        norm = _reduce_and_clip(work, tensors)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise RunError(
                f"step {step + 1}: the loss or the gradient is not finite",
                got=f"loss {loss}, gradient norm {norm}, rows {[row.id for row in rows]}",
                cure="lower train.lr, train in fp32 (train.dtype=fp32), or look at these rows",
            )
        lr = work.settings.lr * factor(
            step,
            total_steps=work.total_steps,
            warmup_steps=work.warmup_steps,
            kind=work.settings.schedule,
        )
        if trained:
            for before in work.seams.before_step:
                before(step, tensors)
            work.optimiser.set_lr(lr)
            work.optimiser.step()
            if step < AUDITED_STEPS:
                audit(tensors, step, work.edit.silent_at_start())
        work.optimiser.clear_gradients()
        for after in work.seams.after_step:
            after(step)
        yield Step(
            step + 1,
            loss,
            tuple(row.id for row in rows),
            tokens,
            trained,
            norm,
            lr,
            time.perf_counter() - began,
            peak_bytes(_device(work.model)),
        )


def backward(work: Work, rows: Sequence[Row], step: int) -> tuple[float, int, int]:
    """Adds the gradient of the window's mean token loss; returns loss, real tokens and trained tokens.

    Each micro-batch is run backward on its own, so only one is ever in memory.
    """
    trained = int(work.mesh.sum(sum(row.trained_tokens for row in rows)))
    tokens = int(work.mesh.sum(sum(len(row.tokens) for row in rows)))
    total = 0.0
    device = _device(work.model)
    for number, micro in enumerate(work.cut(rows)):
        batch = to_device(work.collate(micro), device)
        for change in work.seams.on_batch:
            batch = change(batch, step)
        if batch.trained_tokens == 0:
            continue
        seed = seed_of(work.settings.seed, f"step {step} micro-batch {number}")
        # Dropout then is a pure function of the step, and resuming needs no generator's state.
        torch.manual_seed(seed)
        losses = token_losses(*trained_logits(work.model, batch, step=step, seed=seed))
        for weigh in work.seams.loss:
            losses = weigh(losses, batch, step)
        loss = losses.sum() / trained
        loss.backward()
        total += float(loss.detach())
    return work.mesh.sum(total), tokens, trained


def _reduce_and_clip(work: Work, tensors: dict[str, nn.Parameter]) -> float:
    """Sums gradients over processes and clips their norm; returns the norm before."""
    gradients = [p.grad for p in tensors.values() if p.grad is not None]
    work.mesh.reduce_gradients(gradients)
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    if work.settings.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(tensors.values(), work.settings.clip, norm)
    return float(norm)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
