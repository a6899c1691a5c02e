"""Which files a checkpoint has, with sizes and hashes: so that a damaged one is known before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = "manifest.json"


def write(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Lists every file of a folder with its size and sha256, in `manifest.json`.

    Args:
        folder: whose files these are.
        known: the sha256 of those whose writers have told it, by their name in the folder.
    """
    known = known or {}
    names = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    files = {
        name: {
            "bytes": names[name].stat().st_size,
            "sha256": known.get(name) or digest(names[name]),
        }
        for name in sorted(names)
        if name != FILE
    }
    text = json.dumps({"format": 1, "files": files}, indent=2)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def digests(folder: Path, inside: Iterable[Path]) -> dict[str, str]:
    """The sha256 of files and of all files in folders, by their names in `folder`."""
    every = [p for one in inside for p in (one.rglob("*") if one.is_dir() else [one])]
    return {p.relative_to(folder).as_posix(): digest(p) for p in every if p.is_file()}


def damage(folder: Path) -> list[str]:
    """What is wrong with the files of a folder, a line each, by its manifest; empty when it is whole.

    Files that the manifest does not name are not looked at.
    """
    if not folder.is_dir():
        return [f"{folder.name} is not there"]
    try:
        listed = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        return [
            found
            for name, known in listed.items()
            if (found := _damage(folder / name, name, known["bytes"], known["sha256"]))
        ]
    except FileNotFoundError:
        return [f"{FILE} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{FILE} cannot be read: {error!r}"]


def _damage(path: Path, name: str, size: int, sha256: str) -> str | None:
    try:
        now = path.stat().st_size
        if now != size:
            return f"{name} has {now:,} bytes, {size:,} were written"
        return None if digest(path) == sha256 else f"{name} does not hold what was written"
    except FileNotFoundError:
        return f"{name} is missing"


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
