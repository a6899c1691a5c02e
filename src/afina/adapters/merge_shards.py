"""The safetensors files of a model, read and written one tensor at a time.

A file is a length (8 bytes, little-endian), that many bytes of JSON (for each tensor its dtype, shape and place), and
the data. The library reads whole tensors too, but writes a file only from all its tensors at once.

Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afina.errors import ModelError, counted

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PIECE_BYTES = 1 << 22

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The formats that a change can be folded into; tensors of any other are copied as bytes."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    Attributes:
        file: where it is.
        name: its name there.
        dtype: as the format spells it ("BF16").
        shape: as torch has it.
        start, end: its bytes in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self) -> Tensor:
        """The tensor, in memory of its own.

        Raises:
            ModelError: its format is none of `DTYPES`.
        """
        self.refuse_unknown()
        raw = torch.empty(self.end - self.start, dtype=torch.uint8)
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            stream.readinto(raw.numpy().data)
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)

    def mapped(self) -> Tensor:
        """The tensor where it lies on the disk: a value is read when it is looked at. Not to be written into.

        Raises:
            ModelError: its format is none of `DTYPES`.
        """
        self.refuse_unknown()
        dtype = DTYPES[self.dtype]
        if self.start % dtype.itemsize or self.end == self.start:
            return self.read()  # a map begins at a whole number of values
        file = torch.UntypedStorage.from_file(str(self.file), False, self.file.stat().st_size)
        whole: Any = torch.empty(0, dtype=dtype)
        return whole.set_(file, self.start // dtype.itemsize, self.shape)

    def refuse_unknown(self) -> None:
        """Raises for a format that cannot be computed with.

        Raises:
            ModelError: it is none of `DTYPES`.
        """
        if self.dtype not in DTYPES:
            raise ModelError(
                f"{self.name} is quantised, or of a format that cannot be computed with",
                got=f"{self.dtype} in {self.file}",
                wanted=", ".join(DTYPES),
                cure="use the unquantised model as the base",
            )


def read_shards(folder: Path) -> dict[str, list[Stored]]:
    """The tensors of a model's folder, by file, each file's in the order in which they lie.

    Raises:
        ModelError: there is no safetensors file, or one is damaged or not there.
    """
    return {name: _read_header(folder / name) for name in _files(folder)}


def _files(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        raise ModelError(
            "the base has no safetensors weights", got=folder, wanted=f"{SINGLE} or {INDEX}"
        )
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted({str(name) for name in index["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError("the index of the base's shards is damaged", got=repr(error)) from None
    # A name from a file is never followed out of the folder.
    absent = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
    if absent:
        raise ModelError(
            "shards of the base are not there",
            got=f"{len(absent)} of {counted(len(names), 'shard')} missing: {', '.join(absent[:3])}",
            wanted=f"the files that {INDEX} names",
            cure="download the model again",
        )
    return names


def _read_header(file: Path) -> list[Stored]:
    try:
        with safe_open(file, framework="pt"):
            pass  # the library checks that header and size fit together
    except (SafetensorError, OSError) as error:
        raise ModelError(
            "the base's weights are damaged",
            got=f"{file}: {error}",
            cure="download the model again",
        ) from None
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    found = [
        Stored(
            file,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + size + entry["data_offsets"][0],
            8 + size + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    ]
    return sorted(found, key=lambda stored: stored.start)


@dataclass(frozen=True)
class Wanted:
    """One tensor of a file to be written.

    Attributes:
        name: its name there.
        dtype: as the format spells it.
        shape: as torch has it.
        source: a tensor that is copied as bytes, or what makes the values when their turn comes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Stored | Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        """Of its data."""
        if isinstance(self.source, Stored):
            return self.source.end - self.source.start
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_shard(file: Path, wanted: Sequence[Wanted]) -> None:
    """Writes a file of tensors; no two of them are in memory at once.

    Args:
        file: must not exist.
        wanted: in the order in which they shall lie.
    """
    places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in wanted:
        start, end = end, end + one.size_bytes
        places[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": (start, end)}
    header = json.dumps(places, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("xb") as stream:
        stream.write(len(header).to_bytes(8, "little"))
        stream.write(header)
        for one in wanted:
            _write(stream, one)
        stream.flush()
        os.fsync(stream.fileno())


def _write(stream: BinaryIO, one: Wanted) -> None:
    if isinstance(one.source, Stored):
        with one.source.file.open("rb") as source:
            source.seek(one.source.start)
            left = one.size_bytes
            while left:
                piece = source.read(min(left, PIECE_BYTES))
                if not piece:
                    raise ModelError("the base's weights became shorter", got=one.source.file)
                stream.write(piece)
                left -= len(piece)
        return
    values = one.source()
    if values.shape != one.shape or NAMES[values.dtype] != one.dtype:
        raise ValueError(f"{one.name}: {values.dtype} {tuple(values.shape)} is not as announced")
    stream.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_index(folder: Path, shards: Mapping[str, Iterable[Wanted]]) -> None:
    """The file that says which shard holds which tensor."""
    every = {one.name: (file, one.size_bytes) for file, wanted in shards.items() for one in wanted}
    index = {
        "metadata": {"total_size": sum(size for _, size in every.values())},
        "weight_map": {name: file for name, (file, _) in sorted(every.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
