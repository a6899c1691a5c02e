"""Files of weights, looked at before anything is made of them: is each whole, and does its header tell the truth?

Format: https://github.com/huggingface/safetensors#format. Read here as well as by the library, because a file that is
cut short is the commonest fault of a model's folder, and its name, its tensor and its size are what helps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError, counted, nearest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one number of each dtype that the format knows."""

WHOLE_NUMBERS = frozenset({"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})

LONGEST_HEADER = 100_000_000
"""Bytes; the library's own limit."""


@dataclass(frozen=True)
class Stored:
    """One tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, every promise of its header checked against the file's size.

    Raises:
        ModelError: it cannot be read, is cut short, or lies.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            header = stream.read(length) if length <= min(size - 8, LONGEST_HEADER) else b""
    except OSError as error:
        raise _damaged(file, error.strerror or str(error)) from error
    if len(start) < 8 or not header:
        raise _damaged(file, f"{size:,} bytes, of which its header is said to take {length:,}")
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"a header that is not JSON: {str(error)[:120]}") from error
    if not isinstance(entries, dict) or header[:1] != b"{":
        raise _damaged(file, "a header that is not a JSON object")
    _check_metadata(file, entries.pop("__metadata__", None))
    found = {name: _stored(file, name, entry) for name, entry in entries.items()}
    _check_layout(file, found, size - 8 - length)
    return found


def _check_metadata(file: Path, metadata: Any) -> None:
    whole = metadata is None or (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    )
    if not whole:
        raise _damaged(file, "metadata that is no table of texts")


def _stored(file: Path, name: str, entry: Any) -> Stored:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        near = nearest(str(dtype).upper(), list(BITS), most=3)
        raise _damaged(
            file,
            f"{name} of dtype {str(dtype)[:40]!r}",
            f"one such as {', '.join(near or ['F32'])}",
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _damaged(
            file,
            f"{name} of shape {str(shape)[:60]} at {str(offsets)[:60]}",
            "lists of whole numbers",
        )
    wanted, rest = divmod(math.prod(shape) * BITS[dtype], 8)
    begin, end = offsets
    if end - begin != wanted or rest:
        raise _damaged(
            file,
            f"{name}: {dtype} of shape {shape} in {end - begin:,} bytes",
            f"{wanted:,} bytes for it",
        )
    return Stored(dtype, tuple(shape), begin, end)


def _counts(value: Any) -> bool:
    """Whether it is a list of whole numbers that a 64-bit machine can count to."""
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**63 for each in value
    )


def _check_layout(file: Path, found: Mapping[str, Stored], size: int) -> None:
    """That the tensors lie end to end and fill the file."""
    at, before = 0, "the header"
    for name, one in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if one.begin != at:
            how = "overlaps" if one.begin < at else "leaves a gap after"
            raise _damaged(
                file, f"{name} at byte {one.begin:,} {how} {before}, which ends at {at:,}"
            )
        at, before = one.end, name
    if at != size:
        short = (
            f"it is cut short by {at - size:,} bytes; {before} ends"
            if at > size
            else f"{before} ends"
        )
        raise _damaged(file, f"{size:,} bytes of tensors, where {short} at {at:,}")


def _damaged(
    file: Path, got: str, wanted: str = "what the header promises, no byte more or less"
) -> ModelError:
    return ModelError(
        f"{file.name} is not a whole safetensors file",
        got=got,
        wanted=wanted,
        cure=f"copy or download it again, and compare its size with the publisher's: {file}",
    )


def check_files(folder: Path) -> dict[str, Stored]:
    """Every tensor that the folder's weights hold, by name, after all files were checked.

    Raises:
        ModelError: no weights under the names that are read, a shard that is missing, lies outside the folder, or is
            damaged.
    """
    return {name: one for named in files_of(folder).values() for name, one in named.items()}


def files_of(folder: Path) -> dict[str, dict[str, Stored]]:
    """The same by the name of the file that holds each.

    Raises:
        ModelError: see `check_files`.
    """
    if (folder / SINGLE).exists():
        return {SINGLE: read_header(folder / SINGLE)}
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        raise ModelError(
            "the weights have another name than a model's",
            got=", ".join(others[:5]),
            wanted=f"{SINGLE}, or shards and {INDEX}",
            cure=f"rename {others[0]} to {SINGLE}"
            if len(others) == 1
            else f"copy {INDEX} too: it says which tensor is in which file",
        )
    shards = _shards(folder / INDEX)
    found: dict[str, dict[str, Stored]] = {}
    for shard in sorted(set(shards.values())):
        if not (folder / shard).exists():
            lost = sum(each == shard for each in shards.values())
            raise ModelError(
                f"a file of weights is missing: {shard}",
                got=f"{folder} without it, and so without {counted(lost, 'tensor')}",
                wanted=f"{counted(len(set(shards.values())), 'file')}, as {INDEX} names them",
                cure="copy or download that file too",
            )
        found[shard] = read_header(folder / shard)
    absent = sorted(set(shards) - {name for named in found.values() for name in named})
    if absent:
        raise ModelError(
            f"{INDEX} names {counted(len(absent), 'tensor')} that no file holds",
            got=", ".join(absent[:5]),
            wanted="files and index of one revision",
            cure="copy or download all of them again",
        )
    return found


def _shards(index: Path) -> dict[str, str]:
    """Tensor -> the name of its file, which lies beside the index and nowhere else."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ModelError(
            f"{INDEX} has no weight_map",
            got=str(table)[:80],
            wanted='{"weight_map": {"a.tensor": "a.file", …}}',
            cure="copy or download it again",
        )
    outside = sorted({name for name in table.values() if not is_plain_name(name)})
    if outside or not table:
        raise ModelError(
            f"{INDEX} names files outside the model's folder"
            if outside
            else f"{INDEX} names no file",
            got=", ".join(outside[:3]) or "an empty weight_map",
            wanted="names of files in the same folder",
            cure="do not use this model unless you know who made it",
        )
    return table


def is_plain_name(name: str) -> bool:
    """Whether it is the name of an entry of a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0") and ":" not in name


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: it cannot be read, or is no JSON object; with the line.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _no_json(file, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _no_json(file, str(error)[:160]) from error
    if not isinstance(value, dict):
        raise _no_json(file, f"a {type(value).__name__}")
    return value


def _no_json(file: Path, got: str) -> ModelError:
    return ModelError(
        f"{file.name} is not a JSON object",
        got=f"{file}: {got}",
        wanted="the file as transformers' save_pretrained writes it",
        cure="copy or download it again",
    )
