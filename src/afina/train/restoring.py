"""A checkpoint's values put back into model, techniques, optimiser and random generators, in whatever layout now."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from afina.adapters import contents as adapters
from afina.adapters import files
from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import Mesh, OneProcess
from afina.parallel.store import Stored
from afina.train import in_pieces, randomness
from afina.tree import Edit
from afina.tree.twin import give

RANDOM = "random.safetensors"
TECHNIQUES = "techniques.safetensors"


def restore(
    folder: Path,
    edit: Edit,
    optimiser: Optimiser | None,
    mesh: Mesh | None = None,
    twin: Edit | None = None,
) -> None:
    """Gives the model, the edit, the optimiser and the random generators the values of a checkpoint.

    Args:
        folder: of a whole checkpoint.
        edit: of the model that is to go on.
        optimiser: None for one of another kind, which cannot take the old one's state.
        mesh: the processes, each of which takes what it has, however it was shared out when it was saved.
        twin: of the edit, where no process has its tensors whole.
    """
    mesh = mesh or OneProcess()
    stored = in_pieces.stored_weights(folder)
    if stored is not None:
        in_pieces.take(in_pieces.targets_of(mesh, edit), stored, folder / in_pieces.WEIGHTS)
    elif twin is not None:
        _restore_parts(folder, edit, mesh, twin)
    else:
        _restore_whole(folder, edit)
    if optimiser is not None:
        own = mesh.own(edit.trainable())
        in_pieces.take_state(optimiser, own, in_pieces.stored_state(folder))
    randomness.restore(load_file(folder / RANDOM))


def beside(edit: Edit) -> dict[str, Tensor]:
    """What the next step needs of the techniques and `adapter/` does not hold."""
    if adapters.is_adapter(edit) and not adapters.is_exact(edit):
        return {**edit.state(), **edit.trainable()}
    return {**edit.state(), **edit.aiding()}


def _restore_parts(folder: Path, edit: Edit, mesh: Mesh, twin: Edit) -> None:
    """Each process takes its part of what one had whole."""
    targets = in_pieces.targets_of(mesh, edit)
    beside_it = {name: targets[name] for name in beside(twin) if name in targets}
    if beside_it:
        in_pieces.take(beside_it, Stored([folder / TECHNIQUES]), folder / TECHNIQUES)
    rest = {name: one for name, one in targets.items() if name not in beside_it}
    if not adapters.is_adapter(twin):
        model = folder / "model"
        in_pieces.take(rest, Stored(model.glob("*.safetensors")), model)
        return
    if adapters.is_exact(twin):
        # An adapter is small, and its file goes by other names: the twin takes it whole.
        give(twin, {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in twin.trainable().items()})
        files.restore(twin, files.read_tensors(folder / "adapter"))
        whole = twin.trainable()
        with torch.no_grad():
            for name, one in rest.items():
                one.tensor.copy_(one.piece.of(whole[name]))


def _restore_whole(folder: Path, edit: Edit) -> None:
    if not adapters.is_adapter(edit):
        _restore_base(edit, folder / "model")
    elif adapters.is_exact(edit):
        files.restore(edit, files.read_tensors(folder / "adapter"))
    _restore_beside(edit, folder)


@torch.no_grad()
def _restore_beside(edit: Edit, folder: Path) -> None:
    wanted = beside(edit)
    saved = load_file(folder / TECHNIQUES) if wanted else {}
    unfit = [n for n, t in wanted.items() if n not in saved or saved[n].shape != t.shape]
    if unfit:
        raise RunError(
            "the checkpoint lacks what the techniques need to go on",
            got=", ".join(unfit[:4]),
            wanted=f"them in {folder / TECHNIQUES}, in the shapes that they have now",
            cure="resume with the techniques and settings that the run was started with",
        )
    for name, tensor in wanted.items():
        tensor.copy_(saved[name])


def _restore_base(edit: Edit, folder: Path) -> None:
    saved: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        saved.update(load_file(path))
    missing = [name for name in edit.in_place if name not in saved]
    if missing:
        raise RunError("the checkpoint lacks tensors that train", got=", ".join(missing[:4]))
    with torch.no_grad():
        for name, parameter in edit.in_place.items():
            parameter.copy_(saved[name])
