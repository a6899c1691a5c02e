"""Settings that are allowed and surprise: too large a step, an unusual rate, rows seen too often or never.

The bounds are those of published practice: "LoRA Without Regret" (Thinking Machines 2025) for the size of a step, the
learning rate of adapters and what their parameters can hold; `TrainSettings` says where its rates come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from afina.config import TrainSettings
from afina.errors import counted
from afina.train.preflight import Finding
from afina.types import Row

MOST_ROWS = 32
"""Rows of a step above which LoRA learns worse than full fine-tuning does with as many."""

USUAL_LR = {"lora": (2e-4, 1e-3), "full": (2e-5, 1e-4)}
"""Learning rates of AdamW by technique, for models of 100 million to 8 billion parameters."""

FAR = 3.0
"""A rate further than this factor outside the usual ones is worth a word."""

MANY_PASSES = 10
"""More passes over the same rows than this mostly learn them by heart."""


def batch(rows: Sequence[Row], settings: TrainSettings, techniques: Sequence[str]) -> Finding:
    """Rows of an optimiser step, beside what adapters stand."""
    mean = sum(len(row.tokens) for row in rows) / len(rows)
    size = settings.rows_per_step or max(1, round((settings.tokens_per_step or 0) / mean))
    size = min(size, len(rows))
    values = {"rows_per_step": size, "tokens_per_step": round(size * mean)}
    said = f"{counted(size, 'row')} a step, about {size * mean:.0f} tokens"
    if "lora" in techniques and size > MOST_ROWS:
        return Finding(
            "batch",
            "warning",
            f"{said}: LoRA loses more than full fine-tuning does by steps of more than {MOST_ROWS} rows",
            f"set train.rows_per_step to {MOST_ROWS} or less",
            values=values,
        )
    return Finding("batch", "ok", said, values=values)


def rate(settings: TrainSettings, techniques: Sequence[str]) -> Finding:
    """The learning rate, beside what the technique usually takes."""
    known = [USUAL_LR[key] for key in techniques if key in USUAL_LR]
    if not known or "adam" not in settings.optimizer.lower():
        return Finding("learning rate", "ok", f"{settings.lr:g} for {settings.optimizer}")
    low, high = min(one[0] for one in known), max(one[1] for one in known)
    said = f"{settings.lr:g}; usual for {' and '.join(techniques)} is {low:g} to {high:g}"
    values = {"lr": settings.lr, "usual": [low, high]}
    if not low / FAR <= settings.lr <= high * FAR:
        side, what = (
            ("below", "may hardly learn") if settings.lr < low else ("above", "may fall apart")
        )
        return Finding(
            "learning rate",
            "warning",
            f"{said}: far {side} it, the model {what}",
            f"set train.lr between {low:g} and {high:g}",
            values=values,
        )
    return Finding("learning rate", "ok", said, values=values)


def schedule(rows: Sequence[Row], seen: float, total_steps: int, warmup_steps: int) -> Finding:
    """The length of the run, in passes over the rows, and its warm-up.

    Args:
        rows: that train.
        seen: rows that all steps see together.
        total_steps: of the run.
        warmup_steps: of the run.
    """
    passes = seen / len(rows)
    over = f"{passes:.3g} {'pass' if passes == 1 else 'passes'} over {counted(len(rows), 'row')}"
    said = f"{counted(total_steps, 'step')}, {over}"
    values = {"steps": total_steps, "passes": passes, "warmup_steps": warmup_steps}
    if warmup_steps >= total_steps and warmup_steps > 1:
        return Finding(
            "schedule",
            "warning",
            f"{said}; the warm-up takes {warmup_steps} of them, so the learning rate never falls",
            "set train.warmup_ratio=0.03, or train longer",
            values=values,
        )
    if passes > MANY_PASSES:
        return Finding(
            "schedule",
            "warning",
            f"{said}: so many passes mostly learn the rows by heart",
            "set fewer train.steps or train.epochs, or give more rows",
            values=values,
        )
    if passes < 1:
        unseen = counted(len(rows) - round(seen), "row")
        return Finding("schedule", "note", f"{said}: {unseen} never seen", values=values)
    return Finding("schedule", "ok", said, values=values)


def capacity(rows: Sequence[Row], trainable: int, techniques: Sequence[str]) -> Finding:
    """Trainable parameters beside the tokens to learn: an adapter holds about one token a parameter."""
    tokens = sum(row.trained_tokens for row in rows)
    ending = "" if tokens == 1 else "s"
    said = f"{trainable:,} trainable parameters for {tokens:,} trained token{ending}"
    values = {"trainable": trainable, "trained_tokens": tokens}
    if "lora" in techniques and tokens > trainable:
        return Finding(
            "capacity",
            "note",
            f"{said}: the adapter may be too small to hold them",
            "raise techniques.lora.rank if the loss stops falling early",
            values=values,
        )
    return Finding("capacity", "ok", said, values=values)


def validation(val_rows: Sequence[Row]) -> Finding:
    """Whether there is anything to see over-fitting by."""
    if val_rows:
        said = f"{counted(len(val_rows), 'validation row')}"
        return Finding("validation", "ok", said, values={"rows": len(val_rows)})
    return Finding(
        "validation",
        "note",
        "no validation rows: over-fitting would not be seen, and the last weights are kept",
        "give some with --val FILE, or --set data.val_fraction=0.1",
        values={"rows": 0},
    )
