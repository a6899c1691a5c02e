"""The run's folder: claimed before anything is written, never overwritten without being told."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from afina.errors import RunError, nearest
from afina.places import exists, local
from afina.train import durable, ways

CONFIG = "config.yaml"
LOCK = ".lock"
BEFORE_CONFIG = {"data.json": "sources", "environment.json": "packages"}
"""Written before config.yaml, and what each tells: a folder with these alone is of a run killed as it began."""
OF_A_RUN = frozenset(
    (
        *BEFORE_CONFIG, CONFIG, "start.json", "result.json", "metrics.jsonl", "loss.png",
        "adapter", "model", "checkpoints", "nan", "inputs", "tensorboard",
    )
)  # fmt: skip
"""All that a run writes into its folder: nothing else is ever removed."""
PACKAGES = ("afina", "torch", "transformers", "tokenizers", "safetensors", "peft", "datasets")


def refuse_used(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Checks, changing nothing, that a run may have this folder.

    Raises:
        RunError: when it holds something and nobody said what to do with it, or there is nothing to resume.
    """
    if resume:
        refuse_no_run(out)
        _refuse_unwritable(out)
        return
    _refuse_unwritable(out)
    if not out.exists() or not _contents(out):
        return
    if not overwrite:
        raise RunError(
            "the output folder is in use",
            got=out,
            cure=f"name a new folder, or go on with the run in it: {ways.resume(out)}, or lose it: "
            f"{ways.OVERWRITE}",
        )
    foreign = sorted(path.name for path in _contents(out) if path.name not in OF_A_RUN)
    # A run.yaml that somebody wrote may be called config.yaml too; a run has written more.
    if foreign or not (out / CONFIG).exists() or not _is_beginning(out / "data.json"):
        raise RunError(
            "the output folder holds something that is not a run, so it is not overwritten",
            got=f"{out} with {', '.join(foreign[:4])}" if foreign else out,
            cure="move it away, or name a new folder" if foreign else "name a new folder",
        )


def refuse_no_run(out: Path) -> None:
    """Raises when there is no run in a folder to go on with, naming those inside it, or one that is called alike.

    Raises:
        RunError: see above.
    """
    if (out / CONFIG).exists():
        return
    inside = sorted(path.parent for path in out.glob(f"*/{CONFIG}"))
    beside = {path.parent.name: path.parent for path in out.parent.glob(f"*/{CONFIG}")}
    alike = [beside[name] for name in nearest(out.name, list(beside))]
    cure = "start one first, without --resume (in Python without resume=True)"
    if inside:
        cure = f"name a run in it: {' or '.join(map(str, inside[:5]))}"
    elif alike:
        cure = f"did you mean {' or '.join(map(str, alike))}?"
    raise RunError(
        "there is no run to resume", got=out, wanted=f"a folder with {CONFIG}", cure=cure
    )


def refuse_inside(out: Path, sources: Mapping[str, object]) -> None:
    """Raises when what a new run is made from lies in its folder, where the run would take its place.

    Args:
        out: the run's folder.
        sources: what the run reads, by what it is ("the model"); all but names of files and folders is passed over.

    Raises:
        RunError: naming it.
    """
    for what, name in sources.items():
        if not isinstance(name, str | Path) or not exists(local(name)):
            continue
        # The run's own configuration has been read, and the new run writes it again.
        if _lies_in(local(name), out) and local(name).resolve() != (out / CONFIG).resolve():
            raise RunError(
                f"{what} lies in the folder of the run that would be made from it, and would be lost",
                got=name,
                wanted=f"a place outside of {out}",
                cure="name another folder for the run, or copy this elsewhere and name the copy",
            )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or a part of it; a link is where it stands, and where it leads."""
    named = path.parent.resolve() / path.name
    return any(one.is_relative_to(folder.resolve()) for one in (path.resolve(), named))


def _refuse_unwritable(out: Path) -> None:
    """Raises when the folder cannot be made: something on the way is a file, or may not be written."""
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not existing.is_dir():
        what = (
            "the run's folder is a file" if existing == out else "the run's folder lies in a file"
        )
        raise RunError(what, got=existing, cure="name a new folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RunError("the run's folder may not be written", got=existing, cure="name another")


def _contents(out: Path) -> list[Path]:
    """What of a folder would be lost to a new run in it."""
    there = [p for p in out.iterdir() if p.name != LOCK and not durable.is_leftover(p)]
    return [] if all(_is_beginning(path) for path in there) else there


def _is_beginning(path: Path) -> bool:
    """Whether a file is one of those that a run writes first, and not somebody's own of that name."""
    if path.name not in BEFORE_CONFIG:
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and BEFORE_CONFIG[path.name] in found


def refuse_busy(out: Path) -> None:
    """Asks, long before the folder is claimed, whether another process is at work in it.

    Raises:
        RunError: when one is.
    """
    if not (out / LOCK).exists() or not os.access(out / LOCK, os.W_OK):
        return
    try:
        with FileLock(out / LOCK, timeout=0):
            pass
    except Timeout:
        raise _busy(out) from None


def _busy(out: Path) -> RunError:
    return RunError(
        "another process is at work in this run's folder",
        got=out,
        cure="wait for it, or name another folder",
    )


@contextmanager
def claimed(out: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Makes the folder of a run and keeps every other process out of it while the block lasts.

    Raises:
        RunError: as `refuse_used`, or when another process is at work in the folder, or it cannot be made.
    """
    refuse_used(out, resume=resume, overwrite=overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise _busy(out) from None
    except OSError as error:
        raise RunError("the run's folder cannot be made", got=f"{out}: {error}") from None
    try:
        refuse_used(out, resume=resume, overwrite=overwrite)
        if overwrite and not resume:
            _empty(out)
        for place in (out, out / "checkpoints"):
            durable.sweep(place)
        yield
    finally:
        # The file stays: to remove it would let two processes hold a lock of the same name.
        lock.release()


def _empty(out: Path) -> None:
    """Removes a run; what shows that it is one goes last, so that an interrupted removal can be said again."""
    last = (CONFIG, *BEFORE_CONFIG)
    for path in sorted(
        _contents(out), key=lambda path: last.index(path.name) + 1 if path.name in last else 0
    ):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def environment() -> dict[str, Any]:
    """Versions and machine of this run."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
