"""Does the disk have room for what a run will write? Asked before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from afina.adapters.contents import is_adapter
from afina.config import TrainSettings
from afina.errors import RunError, sized
from afina.train import ways
from afina.tree import Edit

STATES = {"sgd": 0, "adagrad": 1, "asgd": 1, "rmsprop": 1, "rprop": 2, "adafactor": 1}
"""Optimisers that keep another number of values for each weight than Adam and its kin, which keep two."""

MASTER_BYTES = 4
"""Optimisers keep fp32 whatever the weights are, and half-precision weights have an fp32 master beside."""


def checkpoint_bytes(edit: Edit, optimizer: str, tokenizer: Any = None) -> int:
    """The size of one checkpoint, estimated: weights, optimiser, tokenizer.

    Args:
        edit: an adapter's tensors are written alone, and a fully trained model whole.
        optimizer: as `train.optimizer`.
        tokenizer: written beside the weights.
    """
    trained = edit.trainable().values()
    written = trained if is_adapter(edit) else edit.model.parameters()
    weights = sum(p.numel() * p.element_size() for p in written)
    each = MASTER_BYTES * STATES.get(optimizer.lower(), 2)
    kept = sum(p.numel() * (each + (MASTER_BYTES if p.element_size() < 4 else 0)) for p in trained)
    return weights + kept + _tokenizer_bytes(tokenizer)


def weights_bytes(edit: Edit, tokenizer: Any = None) -> int:
    """The size of the run's own copy of the kept weights."""
    return checkpoint_bytes(edit, "sgd", tokenizer)


def _tokenizer_bytes(tokenizer: Any) -> int:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return 0 if backend is None else len(backend.to_str(pretty=True).encode())


def checkpoints_at_once(settings: TrainSettings, total_steps: int, validates: bool) -> int:
    """The most checkpoints on the disk at one time: those kept, the best one, and the one being written."""
    every = settings.save_every
    saves = 1 if every is None else -(-total_steps // every)
    best = 1 if validates and settings.eval_every is not None else 0
    kept = saves if settings.keep_last is None else min(saves, settings.keep_last)
    return min(kept + 1, saves) + best


def way_out(settings: TrainSettings, total_steps: int, validates: bool) -> str:
    """What makes a run take less room; only what would, with these settings."""
    now = checkpoints_at_once(settings, total_steps, validates)
    ways_out = ["make room", "name a folder on another disk"]
    for name, value in (("keep_last", 1), ("save_every", None)):
        less = settings.model_copy(update={name: value})
        if checkpoints_at_once(less, total_steps, validates) < now:
            ways_out.append(f"keep fewer: {ways.setting(name, value)}")
            break
    return ", or ".join(ways_out)


def refuse_too_little(out: Path, needed: int, one: int, cure: str) -> None:
    """Raises when the run's folder, with what it holds already, cannot take `needed` bytes.

    Args:
        out: the run's folder, there or not.
        needed: bytes of all that will be there at once.
        one: bytes of one checkpoint, for the message.
        cure: what makes it less, as `way_out`.

    Raises:
        RunError: saying how much is free, how much is needed, and what makes it less.
    """
    held = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    there = next(place for place in (out, *out.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free + held:
        raise RunError(
            "the disk has too little room for this run's checkpoints",
            got=f"{sized(free)} free in {out}",
            wanted=f"about {sized(needed - held)} (one checkpoint takes {sized(one)})",
            cure=cure,
        )
