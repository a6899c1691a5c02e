"""The user's cache of converted models: list, build once, remove.

One folder a model under `root()`. A folder appears in one step (built under a temporary name, then renamed), so a
reader never sees half a model, and a lock makes a second process wait for the first instead of converting again.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import ModelError, nearest
from ..places import cache_root

MANIFEST = "afina.json"
"""The file that marks a complete entry and says where it came from."""


@dataclass(frozen=True)
class Entry:
    """One model in the cache.

    Attributes:
        name: what `remove` takes.
        folder: a Hugging Face folder.
        size_bytes: of all its files.
        manifest: where it came from, as written by `build`.
    """

    name: str
    folder: Path
    size_bytes: int
    manifest: dict[str, Any]


def root() -> Path:
    """The cache directory; see `places.cache_root`."""
    return cache_root()


def safe_name(name: str) -> str:
    """`name` as one plain file name: no separators, no leading dot, never empty, at most 100 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "model"


def entries() -> list[Entry]:
    """Every complete model of the cache, by name."""
    folder = root() / "models"
    found = (find(path.name) for path in sorted(folder.iterdir())) if folder.is_dir() else ()
    return [entry for entry in found if entry is not None]


def find(name: str) -> Entry | None:
    """The complete entry called `name`, or None."""
    folder = root() / "models" / safe_name(name)
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Entry(folder.name, folder, size, manifest)


def build(name: str, manifest: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder of `name`, made by `make(folder)` unless an entry with the same manifest is there.

    Safe under several processes: one builds, the others wait and take its folder. When `make` raises, nothing stays.
    """
    final = root() / "models" / safe_name(name)
    if _is_current(name, manifest):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _lock(final.name):
        if _is_current(name, manifest):
            return final
        for left in final.parent.glob(f".building-{final.name}-*"):
            shutil.rmtree(
                left, ignore_errors=True
            )  # of a process that was killed: we hold the lock
        building = Path(tempfile.mkdtemp(prefix=f".building-{final.name}-", dir=final.parent))
        try:
            make(building)
            text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False)
            (building / MANIFEST).write_text(text + "\n", "utf-8")
            building.chmod(0o755)
            _delete(final)
            building.rename(final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return final


def remove(name: str) -> Entry:
    """Delete the entry called `name` and return what it was.

    Raises:
        ModelError: no such entry.
    """
    entry = find(name)
    if entry is None:
        known = [each.name for each in entries()]
        raise ModelError(
            "no such model in the cache",
            got=name,
            wanted=", ".join(nearest(name, known) or known) or "nothing: the cache is empty",
            cure="`afina models list` shows what is there",
        )
    with _lock(entry.name):
        _delete(entry.folder)
    return entry


def _is_current(name: str, manifest: dict[str, Any]) -> bool:
    entry = find(name)
    return entry is not None and entry.manifest == manifest


def _lock(name: str) -> FileLock:
    folder = root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock")


def _delete(folder: Path) -> None:
    """Make `folder` vanish in one step, then free its bytes."""
    if not folder.exists():
        return
    aside = Path(tempfile.mkdtemp(prefix=".removed-", dir=folder.parent))
    folder.rename(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)
