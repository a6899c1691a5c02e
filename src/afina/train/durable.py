"""Files that a power cut leaves old or new, never in between.

A rename is atomic, but what is renamed may still be in memory only: so contents are forced to the disk (fsync) before
the rename, and the folder that holds the name after it (fsync(2) and rename(2) of the Linux manual; the same order as
SQLite's and PostgreSQL's).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afina.adapters.files import replace_folder
from afina.errors import RunError, sized
from afina.train import ways

FULL = ("No space left on device", "Disk quota exceeded", "File too large")
"""How the operating system names a disk, a quota and a size that are used up (ENOSPC, EDQUOT, EFBIG)."""


def sync(path: Path) -> None:
    """Forces a file's contents, or a folder's names, to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # Windows opens no folders; NTFS journals names by itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Forces a folder with all that is in it to the disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = temporary_of(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all.

    Raises:
        ValueError: for a number that JSON has no word for (NaN, infinity).
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def publish(temporary: Path, folder: Path) -> None:
    """Puts a finished folder in its place, on the disk; an older one there is gone only after that."""
    sync_tree(temporary)
    replace_folder(temporary, folder)
    sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder; half-removed, it no longer has its name."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def temporary_of(path: Path) -> Path:
    """The name beside `path` under which it is written before it gets its own."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_leftover(path: Path) -> bool:
    """Whether a name is one of those that writing leaves behind when the process is killed."""
    return path.name.startswith(".") and path.suffix in (".tmp", ".old")


def sweep(folder: Path) -> None:
    """Removes what killed processes left in `folder`; whoever calls holds the folder's lock."""
    if not folder.is_dir():
        return
    for path in [path for path in folder.iterdir() if is_leftover(path)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk, a quota or the largest file size is used up.

    Writers in Rust (safetensors, tokenizers) raise errors of their own kinds, with the system's words in the text.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(words in str(error) for words in FULL)


@contextmanager
def writing(what: str, folder: Path, kept: str = "", *, alone: bool = True) -> Iterator[None]:
    """Turns a failure to write into an error that says what was not written, where, and what is still there.

    Args:
        what: that is written, as "the checkpoint of step 200".
        folder: of the run.
        kept: what of the run is on the disk, for the way on.
        alone: the block does nothing but write; else only a full disk and errors about files of `folder` are meant.

    Raises:
        RunError: for an error of the operating system inside the block, whichever library met it.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if is_full(error):
            raise RunError(
                f"{what} could not be written: there is no room",
                got=f"{folder}: {sized(shutil.disk_usage(folder).free)} free ({error})",
                cure=f"make room, and go on: {ways.resume(folder)}{kept}",
            ) from None
        if isinstance(error, OSError) and (alone or _is_of(error, folder)):
            raise RunError(f"{what} could not be written", got=f"{folder}: {error}") from None
        raise


def _is_of(error: OSError, folder: Path) -> bool:
    """Whether an error names a file of the folder."""
    name = error.filename
    return isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())
