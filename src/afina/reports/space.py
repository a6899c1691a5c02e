"""Where the run would be written: whether the folder is free, and whether the disk holds its checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from afina.config import TrainSettings
from afina.errors import AfinaError, counted, sized
from afina.train import folder
from afina.train.preflight import Finding, of_error, skipped
from afina.train.space import checkpoint_bytes, checkpoints_at_once, way_out, weights_bytes
from afina.tree import Edit


def output(
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    reads: Mapping[str, object] | None = None,
) -> Finding:
    """Whether a run may have this folder, in which nothing of what it `reads` lies."""
    if out is None:
        return skipped("folder", "no folder was named")
    try:
        folder.refuse_used(out, resume=resume, overwrite=overwrite)
        if not resume:
            folder.refuse_inside(out, reads or {})
        # Found by making a file that has no name: rights alone do not tell (a read-only disk).
        with tempfile.TemporaryFile(dir=existing(out)):
            pass
    except AfinaError as error:
        return of_error("folder", error)
    except OSError as error:
        return Finding(
            "folder",
            "error",
            f"nothing can be made in {existing(out)} ({error.strerror or error})",
            "name a folder elsewhere",
        )
    said = "is there to go on from" if resume else "will be replaced" if overwrite else "is free"
    return Finding("folder", "ok", f"{out} {said}", values={"folder": str(out)})


def disk(
    edit: Edit,
    settings: TrainSettings,
    total_steps: int,
    out: Path | None,
    *,
    tokenizer: object = None,
    validates: bool = False,
) -> Finding:
    """Whether the disk holds what the run will keep; an estimate.

    Args:
        edit: what trains.
        settings: of the training.
        total_steps: of the run.
        out: the run's folder; None asks for the working directory's disk.
        tokenizer: written beside the weights.
        validates: there are validation rows, so the best checkpoint is kept too.
    """
    each = checkpoint_bytes(edit, settings.optimizer, tokenizer)
    most = checkpoints_at_once(settings, total_steps, validates)
    need = each * most + weights_bytes(edit, tokenizer)
    place = existing(out or Path())
    free = shutil.disk_usage(place).free
    said = (
        f"about {sized(need)} at most: {counted(most, 'checkpoint')} of {sized(each)}, and the result; "
        f"{sized(free)} free in {place}"
    )
    values = {"need_bytes": need, "checkpoint_bytes": each, "checkpoints": most, "free_bytes": free}
    if need > free:
        return Finding(
            "disk",
            "error",
            said,
            way_out(settings, total_steps, validates),
            values=values,
        )
    return Finding("disk", "ok", said, values=values)


def existing(path: Path) -> Path:
    """The nearest folder at or above a path that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
