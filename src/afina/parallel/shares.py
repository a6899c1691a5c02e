"""Which part of a tensor each of the processes that share it out has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from afina.parallel.copies import Groups
from afina.tree.pieces import Piece, piece_of


def span(length: int, parts: int, part: int) -> tuple[int, int]:
    """The part of so many parts of a length: `torch.chunk`'s, and empty ones behind those.

    Returns:
        Where it begins and ends.
    """
    each = -(-length // parts)
    first = min(length, part * each)
    return first, min(length, first + each)


def shard_of(parameter: nn.Parameter, groups: Groups) -> Piece:
    """Which part of its whole tensor this process's part of a parameter is; the parameter may be a part already.

    A tensor without dimensions stays whole in all processes, and the first one stands for it.
    """
    base = piece_of(parameter)
    if not parameter.dim():
        first = groups.data.rank() == 0
        return Piece(base.shape, base.box, base.counted and first, base.total)
    (origin, _), *others = base.box
    first, end = span(parameter.shape[0], groups.shard.size(), groups.shard.rank())
    return Piece(
        base.shape,
        ((origin + first, origin + end), *others),
        base.counted and groups.first,
        Total(groups, base.total),
    )


@dataclass(frozen=True)
class Total:
    """Sums over the pieces of a part of a tensor, and over the parts.

    Attributes:
        groups: of the pieces.
        over_parts: of the part; see `Piece.total`.
    """

    groups: Groups
    over_parts: Callable[[Tensor], Tensor]

    def __call__(self, value: Tensor) -> Tensor:
        """The sum; every process that holds a piece asks."""
        return self.over_parts(self.groups.total(value))
