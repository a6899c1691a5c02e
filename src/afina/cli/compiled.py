"""Where compiled blocks are kept, so that the next run finds them again instead of compiling for a minute."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch's compiler looks for its cache; unset, that is a folder under /tmp, which a restart empties."""


def folder() -> Path:
    """Where compiled blocks are kept: where the user's variable says, else beside the cached models."""
    from afina.models import cache

    said = _said()
    return Path(said) if said else cache.root() / "compiled"


@contextmanager
def kept() -> Generator[None, None, None]:
    """Inside the block torch keeps what it compiles in `folder()`; the environment is afterwards as before.

    Where nothing can be written there, torch's own place is left as it is.
    """
    place, before = folder(), os.environ.get(VARIABLE)
    if _said() or not _writable(place):
        yield
        return
    os.environ[VARIABLE] = str(place)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _said() -> str | None:
    """What the user says; torch sets the variable itself once its compiler is imported, to its own place."""
    said = os.environ.get(VARIABLE)
    compiler = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if not said or (compiler is not None and said == compiler.default_cache_dir()):
        return None
    return said


def _writable(place: Path) -> bool:
    """Whether a folder is there to write into, or could be made."""
    there = next(path for path in (place, *place.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
