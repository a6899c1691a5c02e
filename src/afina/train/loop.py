"""The training loop: one plain function that knows no technique and does not ask how many processes there are.

    window of rows -> micro-batches -> forward -> sum of token losses / trained tokens of the window -> backward
    -> reduce -> clip -> before_step -> optimiser -> audit -> after_step

With `train.step_in_backward` reduce, optimiser and audit happen inside the last backward pass (`train.moving`).

The loss of a step is the mean over all trained tokens of its rows, so it does not depend on how the rows are cut into
micro-batches: 8 x 1, 2 x 4 and 1 x 8 give the same gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afina.optim.schedules import factor
from afina.train.ahead import Ahead, Part
from afina.train.audit import AUDITED_STEPS, refuse_silent, silent_tensors
from afina.train.memory import OutOfMemoryError, is_out_of_memory, peak_bytes
from afina.train.moving import Mover
from afina.train.nonfinite import Fault, NotFiniteError, fault_of
from afina.train.validate import mean_loss
from afina.train.window import Micro
from afina.train.work import Step, Work
from afina.tree import seed_of
from afina.types import Row


def loop(
    work: Work,
    windows: Iterator[Sequence[Row]],
    start: int = 0,
    skipped: int = 0,
    learnt: tuple[Sequence[Row], float] | None = None,
) -> Iterator[Step]:
    """Trains from step `start` to the end, yielding after each optimiser step.

    Args:
        work: what to train and how.
        windows: the rows of step `start`, of the next, and so on.
        start: steps already done.
        skipped: those of them that did not move the optimiser.
        learnt: the rows of the newest of them and their loss then, to know by whether it ruined the weights.

    Raises:
        RunError: when a trainable tensor gets no gradient at the first steps.
        NotFiniteError: when a loss or a gradient is not finite, unless `train.on_nan` is skip and that may help.
        OutOfMemoryError: when a micro-batch does not fit.
    """
    moves = start - skipped
    with Ahead(work, windows, work.total_steps - start) as ahead:
        for step in range(start, work.total_steps):
            began = time.perf_counter()
            work.mesh.at(step + 1)
            window = ahead.take()
            lr = _lr(work, step)
            work.optimiser.set_lr(lr)
            for begin in work.seams.at_step:
                begin(step)
            mover = work.mover()
            done = backward(work, window.parts(), step, mover)
            tensors = work.edit.trainable()
            own = work.mesh.own(tensors)
            in_backward = mover is not None and mover.acted
            whole = (
                mover.norm() if mover is not None and in_backward else _reduce(work, tensors, own)
            )
            norm = float(whole)
            fault = _fault(work, step, done, norm, window.own, learnt)
            moved = done.trained > 0 and fault is None
            if moved:
                if mover is not None and in_backward:
                    _judge(work, mover, moves)
                else:
                    _move(work, own, step, whole, audited=moves)
                    work.mesh.publish(tensors)
                moves += 1
                learnt = window.own, done.loss
            _clear(work)
            for bring in work.seams.bring:
                bring(work.mesh.each)
            for after in work.seams.after_step:
                after(step)
            yield Step(
                step + 1,
                done.loss,
                tuple(row.id for row in window.rows),
                done.tokens,
                done.trained,
                norm,
                lr,
                time.perf_counter() - began,
                peak_bytes(work.passes.device),
                moved,
                fault,
            )


def _clear(work: Work) -> None:
    """Drops every gradient: of what this process moves, and of the tensors that it is a piece of."""
    work.optimiser.clear_gradients()
    for parameter in work.edit.trainable().values():
        parameter.grad = None


def _fault(
    work: Work,
    step: int,
    done: Gradient,
    norm: float,
    rows: Sequence[Row],
    learnt: tuple[Sequence[Row], float] | None,
) -> Fault | None:
    """Why a step is left out; None for a step whose loss and gradient are finite.

    Raises:
        NotFiniteError: it is not to be left out, or the next ones would be no better.
    """
    if math.isfinite(done.loss) and math.isfinite(norm):
        return None
    tensors, relapse = work.mesh.own(work.edit.trainable()), _relapse(work, learnt)
    fault = fault_of(step + 1, done.loss, norm, done.parts, tensors, rows, relapse)
    fault = replace(fault, torn=done.torn)
    if work.settings.on_nan == "stop" or fault.ruined:
        raise NotFiniteError(fault)
    return fault


def _relapse(work: Work, learnt: tuple[Sequence[Row], float] | None) -> tuple[float, float] | None:
    """The loss of rows when they were learnt, and now; None where none were, or where losses are weighed."""
    if learnt is None or work.seams.loss or work.seams.on_batch:
        return None
    rows, then = learnt
    return then, mean_loss(work.model, work.cut(rows), work.passes, work.mesh)


def _lr(work: Work, step: int) -> float:
    return work.settings.lr * factor(
        step,
        total_steps=work.total_steps,
        warmup_steps=work.warmup_steps,
        kind=work.settings.schedule,
        shown=work.shown,
    )


def _move(
    work: Work,
    own: dict[str, nn.Parameter],
    step: int,
    norm: Tensor,
    *,
    audited: int,
) -> None:
    """Clips, moves the tensors and, at the first two moves of a run, asks whether every one of them learns."""
    # Asked before anything is added to the gradients: noise would speak for a tensor that is silent.
    silent = silent_tensors(own) if audited < AUDITED_STEPS else None
    if work.settings.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(own.values(), work.settings.clip, norm)
    if work.seams.before_step:
        torch.manual_seed(seed_of(work.settings.seed, f"step {step}"))
    for before in work.seams.before_step:
        before(step, own)
    work.optimiser.step()
    for after in work.seams.moved:
        after(step, own)
    if silent is not None:
        # Of a tensor that is shared out, another process's piece may speak.
        missing, zero = (_everywhere(work, names, own) for names in silent)
        refuse_silent(missing, zero, len(own), audited, _silent(work, audited))


def _everywhere(work: Work, names: list[str], own: dict[str, nn.Parameter]) -> list[str]:
    found = work.mesh.everywhere(names, own)
    return [name for name in names if name in found]


def _judge(work: Work, mover: Mover, audited: int) -> None:
    """At the first two moves of a run: asks whether every tensor learns, as `_move` does."""
    if audited < AUDITED_STEPS:
        every = len(work.edit.trainable())
        refuse_silent(mover.missing(), mover.zero, every, audited, _silent(work, audited))


def _silent(work: Work, audited: int) -> frozenset[str]:
    """Names of tensors whose gradient may be zero at the first move of a run, or at the second."""
    at_start = work.edit.silent_at_start() if audited == 0 else frozenset[str]()
    return at_start | work.edit.silent_at_times()


class Gradient(NamedTuple):
    """What a window's passes came to.

    Attributes:
        loss: mean over its trained tokens.
        tokens: real ones.
        trained: those that were labels.
        parts: row ids and share of the loss, of each micro-batch.
        torn: some tensors moved inside the backward pass, and others could not.
    """

    loss: float
    tokens: int
    trained: int
    parts: list[tuple[tuple[int, ...], float]]
    torn: bool = False


def backward(work: Work, parts: Sequence[Part], step: int, mover: Mover | None = None) -> Gradient:
    """Adds the gradient of the window's mean token loss.

    Each micro-batch is run backward on its own, so only one is ever in memory; a pipeline has some of them at once.

    Args:
        work: what to train and how.
        parts: the window's micro-batches, of this process.
        step: counted from 0.
        mover: moves the tensors inside the last backward pass.
    """
    rows = [row for part in parts for row in part.rows]
    trained = int(work.mesh.sum(sum(row.trained_tokens for row in rows)))
    tokens = int(work.mesh.sum(sum(len(row.tokens) for row in rows)))
    # Processes that talk in every pass make equally many, the last ones of some without rows.
    every = [*parts, *[None] * (work.mesh.rounds(len(parts)) - len(parts))]
    micros = [
        Micro(work, part, (step, work.mesh.number(n)), trained) for n, part in enumerate(every)
    ]
    if mover is not None:
        _move_at_last(micros, mover)
    try:
        shares = work.mesh.through(micros, work.edit.trainable())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _clear(work)
        torn = mover is not None and mover.torn
        reached = [micro.rows for micro in micros if micro.begun]
        raise OutOfMemoryError(step + 1, reached[-1], torn=torn) from None
    found = zip(micros, shares, strict=True)
    shown = [(micro.ids, share) for micro, share in found if share is not None]
    loss = work.mesh.sum(sum(share for _, share in shown))
    return Gradient(loss, tokens, trained, shown, torn=mover is not None and mover.torn)


def _move_at_last(micros: Sequence[Micro], mover: Mover) -> None:
    """Tensors move in the backward pass of the last micro-batch that has something to learn."""
    trains = [micro for micro in micros if any(row.trained_tokens for row in micro.rows)]
    if trains:
        trains[-1].run = lambda loss: mover.backward(
            loss, before=sum(micro.share or 0.0 for micro in micros)
        )


def _reduce(work: Work, tensors: dict[str, nn.Parameter], own: dict[str, nn.Parameter]) -> Tensor:
    """Sums gradients over processes; returns the norm of the whole gradient."""
    work.mesh.reduce(tensors)
    return work.mesh.norm(own)
