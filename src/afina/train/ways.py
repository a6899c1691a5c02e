"""How a run goes on or begins anew: what to type, and what to give in Python, for errors and for the last line."""

from __future__ import annotations

from pathlib import Path

OVERWRITE = "--overwrite (in Python RunOptions(overwrite=True))"
"""Begins anew in the folder of a run."""

ALLOW_CHANGES = "--allow-changes (in Python RunOptions(allow_changes=True))"
"""Goes on with other data or settings."""


def loaded_as(dtype: str) -> str:
    """The frozen weights in another type."""
    return f"train in {dtype}: --set train.dtype={dtype} (in Python afina.load(…, dtype={dtype!r}))"


def setting(name: str, value: object) -> str:
    """A setting of the training with its value; None is null on the command line."""
    shown = "null" if value is None else value
    return f"--set train.{name}={shown} (in Python {name}={value!r})"


def resume(
    out: Path, since: str | None = None, *, allow_changes: bool = False, flags: str = ""
) -> str:
    """Going on with a run.

    Args:
        out: its folder.
        since: the checkpoint to go on from, as `step-000100`; None is the newest.
        allow_changes: with other settings or data.
        flags: which, on the command line, as "--lr 1e-4".
    """
    words = ["afina train", "--resume" if since is None else f"--resume-from {since}"]
    given = ["resume=True" if since is None else f"resume_from={since!r}"]
    if allow_changes:
        words.append("--allow-changes")
        given.append("allow_changes=True")
    told = " ".join([*words, *([flags] if flags else []), f"-o {out}"])
    return f"{told} (in Python RunOptions({', '.join(given)}))"
