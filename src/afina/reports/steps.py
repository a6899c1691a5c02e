"""What a model starts from, and a real first step: does all that trains learn, and how long does it take?"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

import torch

from afina.errors import AfinaError, counted, lasting
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.ops import attention, native
from afina.parallel.runtime import OneProcess
from afina.reports.trial import Trial, untouched, without
from afina.train import micro, plan
from afina.train.audit import AUDITED_STEPS
from afina.train.loop import loop
from afina.train.lowest import place_of
from afina.train.preflight import Finding, of_error, place, skipped
from afina.train.resume import threads
from afina.train.validate import mean_loss
from afina.train.work import Step, Work

WORSE = 0.05
"""Nats a token by which an edit may raise the base's loss before it has learnt."""

BEYOND_CHANCE = 1.0
"""Nats a token above guessing among the whole vocabulary that no model which fits its data starts from."""

DAY_S = 86_400


def start(trial: Trial) -> Finding:
    """The loss before the first step, beside the base's and beside guessing."""
    rows = next(trial.windows())
    parts = trial.passes.cut(rows, rows_each=None, tokens_each=micro.MOST_TOKENS)
    with packing(trial.model, trial.packed):
        loss = mean_loss(trial.model, parts, trial.passes)
        with without(trial.edit):
            base = mean_loss(trial.model, parts, trial.passes)
    chance = math.log(trial.model.config.get_text_config().vocab_size)
    values = {"loss": loss, "base_loss": base, "chance": chance, "rows": len(rows)}
    said = f"loss {loss:.3f} nats a token, the base's {base:.3f}, guessing {chance:.2f}"
    if not (math.isfinite(loss) and math.isfinite(base)):
        return Finding(
            "start",
            "error",
            f"{said}: not a number",
            "train in fp32 (train.dtype=fp32), or look at the model's weights",
            values=values,
        )
    if loss > base + WORSE:
        return Finding(
            "start",
            "warning",
            f"{said}: the change makes the model worse before it has learnt",
            "start from the base, or from an adapter that was trained on such data",
            values=values,
        )
    if base > chance + BEYOND_CHANCE:
        return Finding(
            "start",
            "warning",
            f"{said}: worse than guessing",
            "check that model, tokenizer and chat template belong together",
            values=values,
        )
    return Finding("start", "ok", said, values=values)


def first_steps(trial: Trial) -> tuple[Finding, Finding]:
    """Two real steps: whether every tensor that trains gets a gradient, and how long a step takes."""
    began = time.perf_counter()
    try:
        kept = nullcontext() if trial.disposable else untouched(trial.edit)
        again = Blocks(trial.model, trial.settings.recompute).running()
        way = attention.computed_by(trial.settings.attention, trial.device)
        place_of(trial.edit, trial.plan, trial.seams)
        packed = packing(trial.model, trial.packed)
        plain = native.off(wanted=not trial.settings.kernels)
        with threads(trial.settings.threads), kept, plain, packed, way, again:
            trial.model.train()
            tokens, why = trial.micro_tokens()
            steps = list(islice(loop(_work(trial, tokens), trial.windows()), AUDITED_STEPS))
    except AfinaError as error:
        return of_error("first step", error), skipped("pace", "the first step failed")
    except torch.OutOfMemoryError:
        return out_of_memory("first step", trial), skipped("pace", "the first step failed")
    faults = [step.fault for step in steps if step.fault is not None]
    if faults:
        return of_error("first step", faults[0].error()), skipped("pace", "the first step failed")
    names = trial.edit.trainable()
    norms = [step.gradient_norm for step in steps]
    learnt = Finding(
        "first step",
        "ok",
        f"{counted(len(steps), 'step')} on the rows of the run: {counted(len(names), 'trainable tensor')} with a "
        "gradient each, "
        f"norm {norms[0]:.3g}; nothing of it is kept",
        values={
            "steps": len(steps),
            "tensors": len(names),
            "gradient_norms": norms,
            "losses": [step.loss for step in steps],
        },
    )
    return learnt, pace(trial, steps, why, time.perf_counter() - began)


def out_of_memory(name: str, trial: Trial) -> Finding:
    """That the device could not hold a pass, at the point `name`."""
    longest = max(trial.rows, key=lambda row: len(row.tokens))
    return Finding(
        name,
        "error",
        f"the memory of {trial.device} does not hold one pass; the longest row ({place(longest)}) has "
        f"{counted(len(longest.tokens), 'token')}",
        "set a lower train.micro_tokens or data.max_tokens, or train.dtype=bf16",
    )


def _work(trial: Trial, tokens: int | None) -> Work:
    """The run's own work, with as many steps as it takes to judge every tensor."""
    return Work(
        trial.model,
        trial.edit,
        plan.optimiser_of(trial.edit, trial.settings, trial.seams),
        trial.settings,
        micro.cutter(trial.settings, tokens, trial.passes),
        trial.passes,
        OneProcess(),
        trial.seams,
        max(trial.total_steps, AUDITED_STEPS),
        trial.warmup_steps,
        trial.plan.shown(),
    )


def pace(trial: Trial, steps: Sequence[Step], why: str, spent_s: float) -> Finding:
    """Seconds a step and the time of the run, as measured on the last of some steps; an estimate."""
    last = steps[-1]
    mean_tokens = sum(len(row.tokens) for row in trial.rows) / len(trial.rows) * trial.rows_a_step
    each_s = last.seconds / last.tokens * mean_tokens
    eta_s = each_s * trial.total_steps
    memory = f"; peak so far {last.peak_bytes / 2**30:.2f} GiB" if last.peak_bytes else ""
    said = (
        f"about {each_s:.3g} s a step ({last.tokens / last.seconds:,.0f} tokens/s), so about {lasting(eta_s)} for "
        f"{counted(trial.total_steps, 'step')}, evaluations not counted{memory}"
    )
    values = {
        "seconds_per_step": each_s,
        "eta_s": eta_s,
        "tokens_per_s": last.tokens / last.seconds,
        "peak_bytes": last.peak_bytes,
        "spent_s": spent_s,
    }
    details = (f"micro-batches: {why}",) if why else ()
    if eta_s > DAY_S:
        return Finding(
            "pace",
            "warning",
            f"{said}: more than a day",
            "train fewer steps, on shorter rows, or on a faster device",
            details,
            values,
        )
    return Finding("pace", "ok", said, details=details, values=values)
