"""The optimiser's state where processes share it out: as it is held, and as a checkpoint in whatever pieces is read.

A state of a tensor's own shape lies as the tensor's pieces do. One number, such as a count of steps, is the same in all
of them, and is kept by the process that has the tensor's first element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.parallel.store import Held, Stored
from afina.tree.pieces import Piece, piece_of, whole_box

OPTIMISER = "optimiser"
"""The folder of the pieces in a checkpoint; with a file's ending, the file of one process that had it all."""


def state_of(
    optimiser: Optimiser, own: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Held], dict[str, tuple[int, ...]]]:
    """What this process holds of the optimiser's state.

    Args:
        optimiser: of this process.
        own: the tensors that it moves, or its pieces of them, by name.

    Returns:
        What it writes, by name; and the shapes of the whole tensors of which it holds something, whoever writes them.

    Raises:
        RunError: a state that does not lie as its tensor does.
    """
    mine: dict[str, Held] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, value in optimiser.state_tensors().items():
        piece, first = _placed(key, value, own[key.rpartition(".")[0]])
        if math.prod(piece.shape):
            shapes[key] = piece.shape
        if piece.counted and first:
            mine[key] = Held(value, piece)
    return mine, shapes


def _placed(key: str, value: Tensor, parameter: nn.Parameter) -> tuple[Piece, bool]:
    """Where a state lies, and whether this process writes it if its piece counts."""
    piece = piece_of(parameter)
    if not value.dim():
        at_origin = all(begin == 0 < end for begin, end in piece.box)
        return Piece((), (), piece.counted), at_origin
    if value.shape == parameter.shape:
        return piece, True
    if piece.whole:
        shape = tuple(value.shape)
        return Piece(shape, whole_box(shape), piece.counted), True
    raise RunError(
        "this optimiser's state does not lie as the pieces of its tensors do, and is not saved",
        got=f"{key}: {tuple(value.shape)} beside a piece {tuple(parameter.shape)} of {piece.shape}",
        cure="take an optimiser that keeps a number for each weight, such as adamw, or set parallel.zero to 0",
    )


def take_state(optimiser: Optimiser, own: Mapping[str, nn.Parameter], stored: Stored) -> None:
    """Gives an optimiser what was saved of the state of its own pieces, however it was shared out then.

    Args:
        optimiser: of this process.
        own: as for `state_of`.
        stored: what was saved.

    Raises:
        RunError: some of it is not there.
    """
    keys: dict[str, list[str]] = {}
    for key in stored.shapes:
        keys.setdefault(key.rpartition(".")[0], []).append(key)
    found: dict[str, Tensor] = {}
    for name, parameter in own.items():
        piece = piece_of(parameter)
        # An empty piece has no state: the optimiser begins one when it first steps.
        if not parameter.numel():
            continue
        for key in keys.get(name, ()):
            same = stored.shapes[key] == piece.shape
            found[key] = stored.read(key, piece.box if same else None)
    optimiser.load_state_tensors(found)


def stored_state(checkpoint: Path) -> Stored:
    """The optimiser's state in a checkpoint, whether one process wrote it or several."""
    whole = checkpoint / f"{OPTIMISER}.safetensors"
    return Stored([whole] if whole.exists() else (checkpoint / OPTIMISER).glob("*.safetensors"))
