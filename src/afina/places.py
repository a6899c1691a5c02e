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


def cache_root() -> Path:
    """The cache directory: $AFINA_CACHE, else $XDG_CACHE_HOME/afina, else ~/.cache/afina. It need not exist."""
    if own := os.environ.get("AFINA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "afina"
