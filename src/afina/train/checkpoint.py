"""Checkpoints: all that a run needs to go on at the next step, each written whole or not at all.

    checkpoints/step-000200/   adapter/ (or model/), optimiser.safetensors, state.json
    checkpoints/latest         the name of the newest, switched atomically

Nothing random is stored, for nothing random is kept: data order and dropout are pure functions of (seed, step).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afina.adapters import files
from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.tree import Edit

OPTIMISER = "optimiser.safetensors"
STATE = "state.json"
LATEST = "latest"


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        step: optimiser steps done.
        best_score: of the best evaluation so far (lower is better), None before the first.
        best_step: its step.
        since_best: evaluations since.
        micro_tokens: tokens of a micro-batch, as decided for this machine.
        rows_fingerprint: of the training rows.
        settings: what must be equal for a resumed run to be the same run, by dotted name.
    """

    step: int
    best_score: float | None = None
    best_step: int | None = None
    since_best: int = 0
    micro_tokens: int | None = None
    rows_fingerprint: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def save(
    run: Path, edit: Edit, optimiser: Optimiser, state: State, *, base: str, tokenizer: Any
) -> Path:
    """Writes the checkpoint of `state.step` and makes it the latest."""
    folder = folder_of(run, state.step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_weights(edit, temporary, base=base, tokenizer=tokenizer)
        kept = {k: v.detach().cpu().contiguous() for k, v in optimiser.state_tensors().items()}
        save_file(kept, temporary / OPTIMISER)
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
        files.replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    pointer = folder.parent / f".{LATEST}.tmp"
    pointer.write_text(folder.name, encoding="utf-8")
    os.replace(pointer, folder.parent / LATEST)
    return folder


def save_weights(edit: Edit, folder: Path, *, base: str, tokenizer: Any) -> Path:
    """What was trained: `adapter/` in PEFT's layout, or `model/`, the whole model, when its own weights trained."""
    if edit.deltas:
        return files.save(edit, folder / "adapter", base=base, tokenizer=tokenizer)
    target = folder / "model"
    temporary = folder / f".model.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model: Any = edit.model
    model.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    files.replace_folder(temporary, target)
    return target


def latest(run: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        RunError: when there is none.
    """
    pointer = run / "checkpoints" / LATEST
    if not pointer.exists():
        raise RunError(
            "this run has no checkpoint to go on from",
            got=run,
            cure="start it without --resume, in another folder",
        )
    return run / "checkpoints" / pointer.read_text(encoding="utf-8").strip()


def read_state(folder: Path) -> State:
    """The state of a checkpoint.

    Raises:
        RunError: when it cannot be read.
    """
    try:
        return State(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError("the checkpoint cannot be read", got=f"{folder}: {error}") from None


def restore(folder: Path, edit: Edit, optimiser: Optimiser) -> State:
    """Gives the model, the edit and the optimiser the values of a checkpoint."""
    state = read_state(folder)
    if edit.deltas:
        files.restore(edit, files.read_tensors(folder / "adapter"))
    else:
        _restore_base(edit, folder / "model")
    optimiser.load_state_tensors(load_file(folder / OPTIMISER))
    return state


def _restore_base(edit: Edit, folder: Path) -> None:
    saved: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        saved.update(load_file(path))
    missing = [name for name in edit.in_place if name not in saved]
    if missing:
        raise RunError("the checkpoint lacks tensors that train", got=", ".join(missing[:4]))
    with torch.no_grad():
        for name, parameter in edit.in_place.items():
            parameter.copy_(saved[name])


def prune(run: Path, keep_last: int | None, best_step: int | None) -> None:
    """Removes all but the last checkpoints and the best one; None keeps all."""
    if keep_last is None:
        return
    found = sorted((run / "checkpoints").glob("step-*"))
    keep = set(found[-keep_last:])
    if best_step is not None:
        keep.add(folder_of(run, best_step))
    for folder in found:
        if folder not in keep:
            shutil.rmtree(folder)
