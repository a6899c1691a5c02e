"""The weights of a checkpoint put into the run's own folder: `adapter/` or `model/`, as one process leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from afina.adapters.merge_shards import Wanted, read_shards, write_shard
from afina.parallel.store import Stored
from afina.train import checkpoint, durable, in_pieces
from afina.train.saving import Contents, no_bar

MAPPED = "model.safetensors"


def put_weights(run: Path, step: int, name: str, contents: Contents) -> Path:
    """Puts the weights of a checkpoint (`adapter` or `model`) into the run's own folder; one process does.

    Args:
        run: the run's folder.
        step: of the checkpoint.
        name: of the weights.
        contents: of the run.
    """
    source = checkpoint.folder_of(run, step) / name
    temporary = durable.temporary_of(run / name)
    with durable.writing(f"{name}/", run):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            if source.is_dir():
                shutil.copytree(source, temporary, copy_function=shutil.copy)
            else:
                write_model(source.parent, temporary, contents)
            durable.publish(temporary, run / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return run / name


def write_model(checkpoint_: Path, folder: Path, contents: Contents) -> None:
    """Writes a whole model from the pieces that processes left, with no more of it in memory than a tensor at a time.

    The tensors are put together on the disk first, and mapped from there: so Transformers itself writes the model, with
    whatever it does to names and tensors on the way.

    Args:
        checkpoint_: whose `weights/` hold the model.
        folder: to make.
        contents: of the run; its twin knows names and ties.
    """
    stored = in_pieces.stored_weights(checkpoint_)
    assert stored is not None
    model: Any = contents.whole.model
    left_out = {*contents.whole.aiding(), *contents.whole.state()}
    named = {n: t for n, t in model.state_dict(keep_vars=True).items() if n not in left_out}
    # A tied tensor was kept under one of its names.
    kept = {id(t): n for n, t in named.items() if n in stored.shapes}
    folder.mkdir()
    beside = folder / "whole"
    beside.mkdir()
    try:
        values = _mapped(stored, sorted(set(kept.values())), beside)
        whole = {name: values[kept[id(tensor)]] for name, tensor in named.items()}
        with no_bar():
            model.save_pretrained(folder, state_dict=whole)
    finally:
        shutil.rmtree(beside)
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(folder)


def _mapped(stored: Stored, names: list[str], folder: Path) -> dict[str, Tensor]:
    """Whole tensors that take no memory: from the files that have them whole, or from one that is written here."""
    found: dict[str, Tensor] = {n: stored.read(n) for n in names if stored.is_whole(n)}
    cut = [name for name in names if name not in found]
    wanted = [
        Wanted(name, stored.dtypes[name], stored.shapes[name], lambda name=name: stored.read(name))
        for name in cut
    ]
    if wanted:
        write_shard(folder / MAPPED, wanted)
        for one in read_shards(folder)[MAPPED]:
            found[one.name] = one.mapped()
    return found
