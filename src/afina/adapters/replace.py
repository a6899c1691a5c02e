"""A finished folder put into the place of an older one, at once where the system can do that."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_HERE = -100
"""AT_FDCWD: paths are as seen from the working directory. Source: Linux, include/uapi/linux/fcntl.h."""

_EXCHANGE = 2
"""RENAME_EXCHANGE. Source: Linux, include/uapi/linux/fs.h."""


def replace_folder(temporary: Path, folder: Path) -> None:
    """Puts a finished folder into its place; an older one there is gone only after that.

    On Linux the two change places in one step, so that whoever is killed leaves the old one or the new one. Elsewhere
    there is a moment between two renames with neither; the old one is then beside the place, as `.NAME.PID.old`.
    """
    if not folder.exists():
        temporary.rename(folder)
        return
    if exchange(temporary, folder):
        shutil.rmtree(temporary)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders of one file system in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    return rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
