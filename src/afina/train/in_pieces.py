"""What processes share out, as a checkpoint keeps it: each writes what it has, and any other number of them reads it.

    weights/     what trains and what techniques keep beside it; after full fine-tuning the whole model
    optimiser/   the optimiser's state

A state of a tensor's own shape lies as the tensor's pieces do. One number, such as a count of steps, is the same beside
all of them. What several processes have alike, the first of them writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import Mesh
from afina.parallel.store import Lot, Stored
from afina.tree import Edit
from afina.tree.pieces import Piece, piece_of, whole_box

WEIGHTS = "weights"
OPTIMISER = "optimiser"
"""Folders in a checkpoint; with a file's ending, the latter is that of one process that had all of it."""

SHOWN = 4
"""Tensors that an error names."""


def shared_out(
    mesh: Mesh, edit: Edit, optimiser: Optimiser, *, adapter: bool
) -> dict[str, dict[str, Lot]]:
    """What this process has of what no process has whole, by the folder that it belongs in.

    Args:
        mesh: the processes.
        edit: of the model.
        optimiser: of this process.
        adapter: an adapter's folder can hold what trains; else the whole model is kept.
    """
    found: dict[str, dict[str, Lot]] = {}
    if mesh.plan.shares_weights:
        found[WEIGHTS] = weights_of(mesh, edit, adapter=adapter)
    if mesh.plan.shares_state:
        found[OPTIMISER] = state_of(optimiser, mesh.own(edit.trainable()))
    return found


def weights_of(mesh: Mesh, edit: Edit, *, adapter: bool) -> dict[str, Lot]:
    """What this process has of the weights that are kept, and of what techniques keep beside them."""
    parts, trainable = mesh.parts(edit.model), edit.trainable()
    found = {name: one for name, one in parts.items() if not adapter or name in trainable}
    buffers = edit.state() if adapter else {**edit.state(), **_persistent(edit.model)}
    here = {name: value for name, value in buffers.items() if _is_here(name, edit.model, parts)}
    return found | {name: Lot(value, piece_of(value)) for name, value in here.items()}


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a model's own files have, by name."""
    return {
        f"{name}.{own}" if name else own: buffer
        for name, module in model.named_modules()
        for own, buffer in module.named_buffers(recurse=False)
        if own not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    }


def _is_here(name: str, model: nn.Module, parts: Mapping[str, Lot]) -> bool:
    """Whether this process has the module of a buffer: something of the parameters around it."""
    inside = name
    while inside:
        inside = inside.rpartition(".")[0]
        begin = f"{inside}." if inside else ""
        around = [n for n, _ in model.named_parameters() if n.startswith(begin)]
        if around:
            return any(n in parts for n in around)
    return True


def _whole(tensor: Tensor) -> Lot:
    shape = tuple(tensor.shape)
    return Lot(tensor, Piece(shape, whole_box(shape)))


def state_of(optimiser: Optimiser, own: Mapping[str, nn.Parameter]) -> dict[str, Lot]:
    """What this process has of the optimiser's state, by name.

    Args:
        optimiser: of this process.
        own: the tensors that it moves, or its pieces of them, by name.

    Raises:
        RunError: a state that does not lie as its tensor does.
    """
    found: dict[str, Lot] = {}
    for key, value in optimiser.state_tensors().items():
        parameter = own[key.rpartition(".")[0]]
        piece = piece_of(parameter)
        # Beside an empty piece there is nothing, not even a count of steps that means anything.
        if not parameter.numel():
            continue
        if value.shape == parameter.shape:
            found[key] = Lot(value, piece)
        elif not value.dim() or piece.whole:
            found[key] = _whole(value)
        else:
            raise RunError(
                "this optimiser's state does not lie as the pieces of its tensors do, and is not saved",
                got=f"{key}: {tuple(value.shape)} beside a piece {tuple(parameter.shape)} of {piece.shape}",
                cure="take an optimiser that keeps a number for each weight, such as adamw, or set parallel.zero to 0",
            )
    return found


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


def stored_weights(checkpoint: Path) -> Stored | None:
    """The weights that several processes wrote; None where one had them whole."""
    folder = checkpoint / WEIGHTS
    return Stored(folder.glob("*.safetensors")) if folder.is_dir() else None


def targets_of(mesh: Mesh, edit: Edit) -> dict[str, Lot]:
    """What this process has of what trains and of what techniques keep beside it: where saved values go."""
    trainable = edit.trainable()
    if not mesh.plan.shares_weights:
        return {name: _whole(value) for name, value in {**trainable, **edit.state()}.items()}
    here = weights_of(mesh, edit, adapter=True)
    return {name: one for name, one in here.items() if not one.tensor.is_meta}


@torch.no_grad()
def take(targets: Mapping[str, Lot], stored: Stored, where: Path) -> None:
    """Copies to each target its part of what is stored under its name.

    Raises:
        RunError: it is not there, or of another shape.
    """
    for name in _fitting(targets, stored, where):
        one = targets[name]
        if one.tensor.numel():
            one.tensor.copy_(stored.read(name, one.piece.box))


def _fitting(targets: Mapping[str, Lot], stored: Stored, where: Path) -> Iterator[str]:
    unfit = [n for n, one in targets.items() if stored.shapes.get(n) != one.piece.shape]
    if unfit:
        raise RunError(
            "the checkpoint lacks what is needed to go on",
            got=", ".join(unfit[:SHOWN]),
            wanted=f"them in {where}, in the shapes that they have now",
            cure="resume with the techniques and settings that the run was started with",
        )
    yield from targets
