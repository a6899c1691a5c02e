"""The header of a GGUF file: its metadata, and whether all its tensors are there.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Read here rather than with the
`gguf` package, whose reader takes seconds for a vocabulary, and so that a damaged file gets one clear error.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself.

    Attributes:
        metadata: scalars and strings by key; of an array only its length.
        tensors: shape by name, the fastest dimension last, as torch has it.
        end_bytes: where the last tensor ends, from the start of the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    end_bytes: int


def read(file: Path) -> Header:
    """The header of `file`.

    Raises:
        ModelError: not GGUF, an unknown version, damaged, or cut short.
    """
    try:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            header, size = _Cursor(data).header(), len(data)
    except (ValueError, struct.error, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise _damaged(file, str(error)) from error
    if size < header.end_bytes:
        raise _damaged(file, f"{size:,} bytes of {header.end_bytes:,}")
    return header


def _damaged(file: Path, got: str) -> ModelError:
    return ModelError(
        f"{file.name} is not a whole GGUF file",
        got=got,
        wanted="GGUF version 2 or 3, little-endian, all tensors present",
        cure="download the file again and compare its size and sha256 with the publisher's",
    )


class _Cursor:
    """A place in the file that moves on with each value read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if size > len(self.data) - self.at:
            raise ValueError(f"a string of {size:,} bytes at byte {self.at:,}")
        text = self.data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count:,} values at byte {self.at:,}")
        if inner in _SCALARS:
            self.at += count * struct.calcsize("<" + _SCALARS[inner])
        else:
            for _ in range(count):
                self.value(inner)
        return count

    def header(self) -> Header:
        magic, version = self.data[:4], struct.unpack_from("<I", self.data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        self.at = 8
        tensor_count, pair_count = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        tensors, ends = {}, [0]
        for _ in range(tensor_count):
            name = self.string()
            shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
            tensors[name] = shape[::-1]
            ends.append(_bytes_of(shape, self.scalar("I")) + self.scalar("Q"))
        step = metadata.get("general.alignment", 32)
        start = -(-self.at // step) * step
        return Header(metadata, tensors, start + max(ends) if tensors else self.at)


def _bytes_of(shape: tuple[int, ...], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(shape) // block_values * block_bytes
