"""Tensors that processes hold in pieces, in files: each process writes its own, and any part of any tensor is read.

    part-00000.safetensors   what the first process holds, and in its header where in the whole tensors that lies
    part-00001.safetensors   …

Nothing says how many processes wrote, nothing is padded, and names are the tensors' own: so any other number of
processes reads, each what it holds. A safetensors file that says nothing of pieces holds whole tensors.

The format is the one that torch.distributed.checkpoint writes with `HuggingFaceStorageWriter(save_distributed=True)`,
and its `HuggingFaceStorageReader` reads these folders. It is not written by it: its planner talks to all processes
while it writes, which cannot happen beside training; it copies all that it writes once more; and it does not say how
large the whole tensor is, so that a last piece that is lost is not missed. (Its other writers keep an index that is
unpickled when it is read, which nothing here does.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from afina.errors import RunError, counted
from afina.tree.pieces import Box, Piece, whole_box

PLACES = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
"""Names of torch.distributed.checkpoint for the table in a header, and of an entry's first indices."""

SHAPE = "whole_shape"
"""Of the whole tensor; torch's reader passes over it."""

SHOWN = 4
"""Tensors that an error names."""


@dataclass(frozen=True)
class Lot:
    """A tensor of this process, and which part of the whole one it is."""

    tensor: Tensor
    piece: Piece


def file_of(folder: Path, rank: int) -> Path:
    """What process `rank` writes."""
    return folder / f"part-{rank:05d}.safetensors"


def write(file: Path, held: Mapping[str, Lot]) -> None:
    """Writes what this process holds; pieces without an element are left out, and no file is made for none.

    Raises:
        RunError: a tensor that is empty as a whole, or a piece of another shape than its box.
    """
    empty = [name for name, one in held.items() if not one.piece.numel]
    if empty:
        raise RunError(
            "a tensor without a single number is not saved",
            got=", ".join(empty[:SHOWN]),
            wanted="the tensor whole, or this process's piece of it",
        )
    tensors: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for name, one in sorted(held.items()):
        sizes = tuple(end - begin for begin, end in one.piece.box)
        if tuple(one.tensor.shape) != sizes:
            raise RunError(
                f"{name} is no such piece", got=tuple(one.tensor.shape), wanted=one.piece.box
            )
        if math.prod(sizes):
            tensors[name] = one.tensor.detach().cpu().contiguous()
            offsets = [begin for begin, _ in one.piece.box]
            places[name] = {OFFSETS: offsets, SHAPE: list(one.piece.shape)}
    if tensors:
        # One entry of metadata: the order of several would change from process to process.
        save_file(tensors, file, metadata={PLACES: json.dumps(places, sort_keys=True)})


@dataclass(frozen=True)
class Lying:
    """A piece in a file.

    Attributes:
        file: that has it, under the tensor's name.
        box: what of the whole it is.
    """

    file: Path
    box: Box

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(end - begin for begin, end in self.box)

    def in_common(self, box: Box) -> Box | None:
        """What of a box is here; None for nothing."""
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.box, box, strict=True))
        return common if all(begin < end for begin, end in common) else None


class Stored:
    """Tensors in safetensors files, each whole or in pieces, looked up by their headers.

    Args:
        files: in any order.

    Attributes:
        shapes: of the whole tensors, by name.
        dtypes: of the tensors, by name, as safetensors calls them.

    Raises:
        RunError: two files speak of one tensor in different ways.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._lying: dict[str, list[Lying]] = {}
        # Kept open: to open a file is to read its header again.
        self._opened: dict[Path, Any] = {}
        for file in sorted(files):
            self._opened[file] = safe_open(file, "pt")
            self._look_into(file)

    def _look_into(self, file: Path) -> None:
        opened = self._opened[file]
        places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
        for name in opened.keys():  # noqa: SIM118 - no mapping
            part = opened.get_slice(name)
            sizes, dtype = part.get_shape(), part.get_dtype()
            place = places.get(name, {})
            offsets = place.get(OFFSETS, [0] * len(sizes))
            shape = tuple(place.get(SHAPE, sizes))
            box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
            known = self.shapes.setdefault(name, shape), self.dtypes.setdefault(name, dtype)
            if known != (shape, dtype):
                raise RunError(
                    f"two files hold pieces of different tensors called {name}",
                    got=f"{dtype} {shape} in {file}",
                    wanted=f"{known[1]} {known[0]}",
                )
            self._lying.setdefault(name, []).append(Lying(file, box))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a part of it, on the CPU.

        Args:
            name: as it was written.
            box: which part; None is the whole.

        Raises:
            RunError: there is no such tensor, or some of that part is in no file.
        """
        if name not in self.shapes:
            raise RunError("a tensor is not in these files", got=name, wanted=self._some())
        box = whole_box(self.shapes[name]) if box is None else box
        there = [(lying, lying.in_common(box)) for lying in self._lying[name]]
        if len(there) == 1 and there[0][1] == box:
            return self._cut(there[0][0], name, box)
        found: Tensor | None = None
        filled = 0
        for lying, common in there:
            if common is None:
                continue
            part = self._cut(lying, name, common)
            if found is None:
                found = torch.empty([end - begin for begin, end in box], dtype=part.dtype)
            found[_slices(common, box)] = part
            filled += part.numel()
        wanted = math.prod(end - begin for begin, end in box)
        if found is None or filled != wanted:
            raise RunError(
                f"the files do not hold all of {name}",
                got=f"{filled:,} of {counted(wanted, 'number')} of {box}",
                wanted="every process's file, as it was written",
            )
        return found

    def is_whole(self, name: str) -> bool:
        """Whether one file has all of a tensor."""
        return self._lying[name][0].box == whole_box(self.shapes[name])

    def _cut(self, lying: Lying, name: str, box: Box) -> Tensor:
        """A part of a piece; `box` is in the whole."""
        opened = self._opened[lying.file]
        if box == lying.box:
            return opened.get_tensor(name)
        return opened.get_slice(name)[_slices(box, lying.box)]

    def _some(self) -> str:
        names = sorted(self.shapes)
        return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "") or "no tensor"

    def problems(self) -> list[str]:
        """Tensors of which some number lies in no file or in several, in words."""
        found: list[str] = []
        for name, shape in self.shapes.items():
            lying = self._lying[name]
            twice = [a for a, b in combinations(lying, 2) if a.in_common(b.box) is not None]
            there, wanted = sum(one.numel for one in lying), math.prod(shape)
            if twice:
                found.append(f"{name}: {twice[0].box} of {shape} lies in several files")
            elif there != wanted:
                found.append(f"{name}: {there:,} of {counted(wanted, 'number')}")
        return found

    def check(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Raises unless these tensors are there, every number of them once, and no others.

        Args:
            wanted: shapes of the whole tensors, by name.

        Raises:
            RunError: naming those that are not right.
        """
        found = [f"{name}: no file holds it" for name in sorted(set(wanted) - set(self.shapes))]
        found += [f"{name}: nobody has it" for name in sorted(set(self.shapes) - set(wanted))]
        found += [
            f"{name}: {shape}, and not {tuple(wanted[name])}"
            for name, shape in self.shapes.items()
            if name in wanted and shape != tuple(wanted[name])
        ]
        found += self.problems()
        if found:
            raise RunError(
                f"what the processes wrote does not make up {counted(len(found), 'tensor')}",
                got="\n          ".join(found[:SHOWN]),
                wanted="every number once",
                cure="if the processes run on several machines, put the run's folder on a disk that all of them see",
            )


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in one that holds it."""
    return tuple(
        slice(begin - start, end - start)
        for (begin, end), (start, _) in zip(inner, outer, strict=True)
    )
