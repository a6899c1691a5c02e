"""What a user calls a place on this machine, as a path that can be asked about without surprises."""

from __future__ import annotations

import os
from pathlib import Path


def local(name: str | os.PathLike[str]) -> Path:
    """The path that a name means, `~` expanded where there is such a home."""
    path = Path(name)
    try:
        return path.expanduser()
    except RuntimeError:  # ~nobody
        return path


def exists(path: Path) -> bool:
    """Whether something is there; a name that no file can have is nowhere."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
