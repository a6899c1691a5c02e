"""An adapter's files, written beside their place, read back, compared, and only then put into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from afina.adapters.checking import SHOWN
from afina.adapters.layout import (
    CARD,
    CONFIG,
    RECORD,
    TEMPLATES,
    TOKENIZER,
    WEIGHTS,
    read_tensors,
    refuse_unusable,
)
from afina.adapters.replace import replace_folder
from afina.errors import AdapterError
from afina.table import TECHNIQUES


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    *,
    parts: Collection[str] = (),
    beside: Callable[[Path], object] = lambda folder: None,
    check: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Writes an adapter, whole or not at all.

    Args:
        folder: of an adapter that is there already every file is replaced; others in it stay.
        tensors: by their keys; those of a part begin with `PART/`.
        texts: contents of the other files, by name.
        parts: the folders of an adapter of several techniques.
        beside: writes what goes along, such as a tokenizer, into the folder it is given.
        check: raises when what lies in the folder it is given is not right.

    Raises:
        AdapterError: a tensor is not finite, or what was written reads back otherwise.
    """
    refuse_unusable(dict(tensors), "not saved")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_tensors(temporary, tensors, parts)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        beside(temporary)
        _compare(temporary, tensors, texts)
        check(temporary)
        _take_along(folder, temporary)
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], parts: Collection[str]) -> None:
    for key in parts:
        (folder / key).mkdir()
        inside = {
            n.removeprefix(f"{key}/"): t for n, t in tensors.items() if n.startswith(f"{key}/")
        }
        _write_tensors(folder / key, inside, ())
    if not parts:
        # One entry of metadata: the order of several would change from process to process.
        save_file(dict(sorted(tensors.items())), folder / WEIGHTS, metadata={"format": "pt"})


def _take_along(folder: Path, temporary: Path) -> None:
    """Puts what somebody else laid into an adapter's folder into the one that takes its place."""
    own = {CONFIG, WEIGHTS, RECORD, CARD, TEMPLATES, *TOKENIZER, *TECHNIQUES}
    for path in folder.iterdir() if folder.exists() else ():
        if path.name in own:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, temporary / path.name, symlinks=True, copy_function=_linked)
        else:
            _linked(path, temporary / path.name)


def _linked(source: str | Path, target: str | Path) -> None:
    """The same file under another name where the disk can do that, which costs no room; else a copy."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _compare(folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Reads what was written.

    Raises:
        AdapterError: when it is not what was meant.
    """
    written = read_tensors(folder)
    problems = [f"{key}: missing or too much" for key in sorted(set(written) ^ set(tensors))]
    for key in sorted(set(written) & set(tensors)):
        one, other = written[key], tensors[key]
        if one.shape != other.shape or one.dtype != other.dtype:
            problems.append(
                f"{key}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
            )
        elif not torch.equal(one, other):
            problems.append(f"{key}: other values")
    problems += [
        f"{name}: other text"
        for name, text in texts.items()
        if (folder / name).read_text(encoding="utf-8") != text
    ]
    if problems:
        raise AdapterError(
            "the adapter that was written is not the one in memory, and was not put into its place",
            got="\n          ".join(problems[:SHOWN]),
            cure="check the disk, and save again",
        )
