"""Checkpoints: all that a run needs to go on at the next step, each written whole or not at all.

Here is where they lie; `saving` writes them, and `restoring` reads them.

    checkpoints/step-000200/   adapter/ (or model/), optimiser.safetensors, random.safetensors, state.json,
                               techniques.safetensors where techniques keep more than the adapter holds,
                               manifest.json (every file's size and sha256)
                               optimiser/, weights/ where processes share these out (`in_pieces`)
    checkpoints/latest         the name of the newest, switched once that one is on the disk

The schedule and the order of the data are pure functions of the step, so that the step is all that is kept of them.
"""

from __future__ import annotations

from pathlib import Path

from afina.errors import RunError
from afina.train import durable, manifest, ways
from afina.train.state import State

STATE = "state.json"
LATEST = "latest"


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def point(run: Path, folder: Path) -> None:
    """Makes `folder` the checkpoint that the run goes on from."""
    durable.write_text(folder.parent / LATEST, folder.name)


def pointed(run: Path) -> str | None:
    """The name in `latest`; None without one."""
    try:
        return (run / "checkpoints" / LATEST).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def found(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    named = [path for path in (run / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((path for path in named if path.name[5:].isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def latest(run: Path, wanted: str | int | None = None) -> Path | None:
    """The checkpoint to go on from, with every file as it was written.

    Args:
        run: the run's folder.
        wanted: one by name or number (`step-000200`, or 200); None is the newest.

    Returns:
        Its folder; None when the run was stopped before it saved one.

    Raises:
        RunError: when it is damaged or not there, naming the newest one that is whole.
    """
    there = found(run)
    if wanted is not None:
        wanted = str(wanted)
        name = f"step-{int(wanted):06d}" if wanted.isdecimal() else Path(wanted).name
        folder = run / "checkpoints" / name
        if folder not in there:
            raise RunError(
                "the run has no such checkpoint",
                got=wanted,
                wanted=", ".join(path.name for path in there) or "none was saved",
            )
    elif pointed(run) is None and not there:
        return None
    else:
        folder = run / "checkpoints" / (pointed(run) or there[-1].name)
    damage = manifest.damage(folder)
    if damage:
        raise RunError(
            "the checkpoint to go on from is damaged, and nothing was changed",
            got="\n          ".join([f"{folder}", *damage[:4]]),
            wanted="the files as they were written",
            cure=_way_out(run, there, folder),
        )
    return folder


def _way_out(run: Path, there: list[Path], damaged: Path) -> str:
    for folder in reversed(there):
        if folder != damaged and not manifest.damage(folder):
            return (
                f"{folder.name} is whole, and going on from it gives the same result: "
                f"{ways.resume(run, folder.name)}"
            )
    return f"no other checkpoint is whole: put the files back, or begin anew: {ways.OVERWRITE}"


def prune(run: Path, now: State, keep_last: int | None) -> None:
    """Removes checkpoints of later steps (of a run that went on from an earlier one), and all but the last and best.

    Args:
        run: the run's folder.
        now: the state of the newest checkpoint.
        keep_last: how many are kept beside the best; None keeps all.
    """
    there = found(run)
    current = [folder for folder in there if step_of(folder) <= now.step]
    keep = set(current[-keep_last:] if keep_last is not None else current)
    if now.best_step is not None:
        keep.add(folder_of(run, now.best_step))
    for folder in there:
        if folder not in keep:
            durable.remove_folder(folder)
