"""Which part of a tensor a process holds, when several processes share it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

Box = tuple[tuple[int, int], ...]
"""First index, and the one after the last, in each dimension of the whole tensor."""


def _same(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Piece:
    """The part of a whole tensor that a process holds.

    Attributes:
        shape: of the whole tensor.
        box: what of it is here.
        counted: whether this process stands for the piece in sums over all processes; where several hold the same
            piece, one does.
        total: (scalar of this piece) -> its sum over the pieces that make up the whole; every process that holds one
            must ask.
    """

    shape: tuple[int, ...]
    box: Box
    counted: bool = True
    total: Callable[[Tensor], Tensor] = field(default=_same, compare=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.box == whole_box(self.shape)

    @property
    def shared(self) -> bool:
        """Whether the tensor is shared out: then other processes have pieces of it, even if this one has all of it."""
        return self.total is not _same

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor, a view."""
        assert tuple(whole.shape) == self.shape, (tuple(whole.shape), self.shape)
        return whole[tuple(slice(first, end) for first, end in self.box)]


@dataclass(frozen=True)
class Share:
    """The part of a module's work that a process does, where several share each matrix.

    Attributes:
        of: what is cut: the numbers that enter a map (in) or leave it (out), heads of attention, or experts.
        first, end: of the part.
        whole: how many there are of them.
        part, parts: which of the processes this is, and how many there are.
        total: (tensor) -> its sum over the parts, which all of them ask for; backward gives each part the gradient of
            the sum.
    """

    of: Literal["in", "out", "heads", "experts"]
    first: int
    end: int
    whole: int
    part: int
    parts: int
    total: Callable[[Tensor], Tensor] = field(default=_same, compare=False, repr=False)

    def with_total(self, total: Callable[[Tensor], Tensor]) -> Share:
        """The same, told how to sum over the parts."""
        return replace(self, total=total)

    def once(self, value: Tensor) -> Tensor:
        """The value itself, whose gradients in all parts add up to that of one."""
        return value.detach() + (value - value.detach()) / self.parts


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def piece_of(parameter: Tensor) -> Piece:
    """Which part of its tensor a parameter is; the whole where nothing says otherwise."""
    found = getattr(parameter, _NAME, None)
    shape = tuple(parameter.shape)
    return found if isinstance(found, Piece) else Piece(shape, whole_box(shape))


def gathered(parts: Mapping[str, tuple[Piece, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from what processes know of their pieces; every process that holds one asks, for the same names.

    Args:
        parts: which piece this process knows by name, and a value of its shape.
    """
    found = {name: value for name, (piece, value) in parts.items() if not piece.shared}
    together: dict[Any, list[str]] = {}
    for name, (piece, value) in parts.items():
        if piece.shared:
            together.setdefault((piece.total, value.dtype, value.device), []).append(name)
    for (total, *_), names in together.items():
        spread = [value.new_zeros(piece.shape) for piece, value in map(parts.__getitem__, names)]
        for name, whole in zip(names, spread, strict=True):
            piece, value = parts[name]
            piece.of(whole).copy_(value)
        # One message for all of them.
        summed = total(torch.cat([whole.reshape(-1) for whole in spread]))
        shares = summed.split([whole.numel() for whole in spread])
        for name, whole, share in zip(names, spread, shares, strict=True):
            found[name] = share.view(whole.shape)
    return {name: found[name] for name in parts}


def mark(parameter: AnyTensor, piece: Piece) -> AnyTensor:
    """Notes which part of its tensor a parameter (or a buffer) is, and returns it."""
    setattr(parameter, _NAME, piece)
    return parameter


_NAME = "afina_piece"
