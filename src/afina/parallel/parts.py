"""What of a model's tensors this process has, and where in the whole ones it lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from afina.parallel.store import Lot
from afina.tree.pieces import Piece, piece_of
from afina.tree.twin import embody


def placed(model: nn.Module, holds: Callable[[str], bool]) -> dict[str, Piece]:
    """Where each parameter of a model lies in its whole tensor, before weights are shared out (`full_shard`).

    Args:
        model: with what this process has of it.
        holds: whether it has anything of a parameter.
    """
    return {name: piece_of(p) for name, p in model.named_parameters() if holds(name)}


@torch.no_grad()
def materialise(model: nn.Module, places: Mapping[str, Piece], device: torch.device) -> None:
    """Gives memory to what this process has of a model on the meta device; the values are still to come.

    What is not here is one number that stands for all.

    Args:
        model: no tensor of which is shared out by `full_shard`.
        places: see `placed`.
        device: where it computes.
    """
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        if name in places:
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            nothing = torch.full((), math.nan, dtype=parameter.dtype, device=device)
            memory = nothing.expand(parameter.shape)
        embody(model, name, memory)


def parts_of(model: nn.Module, places: Mapping[str, Piece]) -> dict[str, Lot]:
    """What this process has of a model's parameters, by name.

    Args:
        model: as it is now; tensors that were shared out since are torch's DTensors.
        places: see `placed`.
    """
    return {name: _lot(model.get_parameter(name).detach(), piece) for name, piece in places.items()}


def _lot(tensor: Tensor, piece: Piece) -> Lot:
    if not hasattr(tensor, "to_local"):
        return Lot(tensor, piece)
    # Only here, for to import it takes long.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    starts = [
        begin + min(at, end - begin) for (begin, end), at in zip(piece.box, offsets, strict=True)
    ]
    box = tuple((at, at + size) for at, size in zip(starts, sizes, strict=True))
    return Lot(tensor.to_local(), Piece(piece.shape, box, piece.counted))


Place = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""Shape of a whole tensor, and the box of a piece of it."""


def places_of(held: Mapping[str, Lot]) -> dict[str, Place]:
    """Where what a process has lies."""
    return {name: (one.piece.shape, one.piece.box) for name, one in held.items()}


def first_of(rank: int, everybody: Iterable[Mapping[str, Place]]) -> set[str]:
    """The tensors of which process `rank` is the first to have its piece: it writes them, and no other process does.

    Args:
        rank: of a process.
        everybody: what each has, by rank.
    """
    told = list(everybody)
    return {
        name
        for name, place in told[rank].items()
        if not any(other.get(name) == place for other in told[:rank])
    }


def shapes_of(everybody: Iterable[Mapping[str, Place]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole tensors of which somebody has something."""
    found = {name: shape for told in everybody for name, (shape, _) in told.items()}
    return {name: shape for name, shape in found.items() if math.prod(shape)}
