"""Checkpoints: all that a run needs to go on at the next step, each written whole or not at all.

    checkpoints/step-000200/   adapter/ (or model/), optimiser.safetensors, random.safetensors, state.json,
                               techniques.safetensors where techniques keep more than the adapter holds,
                               manifest.json (every file's size and sha256)
                               optimiser/ instead of its file where processes share its state out (`parallel.store`)
    checkpoints/latest         the name of the newest, switched once that one is on the disk

The schedule and the order of the data are pure functions of the step, so that the step is all that is kept of them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afina.adapters import contents as adapters
from afina.adapters import files
from afina.adapters.card import Record
from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.parallel import store
from afina.parallel.runtime import Mesh, OneProcess
from afina.parallel.together import by_first, together
from afina.train import durable, in_pieces, manifest, randomness, state, ways
from afina.train.state import State
from afina.tree import Edit

RANDOM = "random.safetensors"
TECHNIQUES = "techniques.safetensors"
STATE = "state.json"
LATEST = "latest"

T = TypeVar("T")


@dataclass(frozen=True)
class Contents:
    """What goes into every checkpoint of a run, beside its state.

    Attributes:
        edit: what trains.
        optimiser: over it.
        base: name of the base model.
        tokenizer: saved with the weights.
        record: what the adapter's card says of data and settings.
        mesh: the processes; all of them save, and one writes what all have.
    """

    edit: Edit
    optimiser: Optimiser
    base: str
    tokenizer: Any
    record: Record
    mesh: Mesh = field(default_factory=OneProcess)


@dataclass(frozen=True)
class Part:
    """What one process wrote of a checkpoint.

    Attributes:
        shapes: of the whole tensors of which it holds something, by name.
        digests: sha256 of its files, by their name in the checkpoint.
    """

    shapes: Mapping[str, tuple[int, ...]]
    digests: Mapping[str, str]


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def save(run: Path, contents: Contents, now: State, scores: Mapping[str, float]) -> Path:
    """Writes the checkpoint of `now.step`, and makes it the latest.

    Nothing that is there already is touched before the new one is on the disk.

    Args:
        run: the run's folder.
        contents: what goes into each.
        now: where the run stands.
        scores: of these weights on validation rows, for the adapter's card; empty when they were not measured.

    Raises:
        RunError: when weights are not finite, or cannot be written; the older checkpoints are as they were.
    """
    mesh = contents.mesh
    together(mesh, lambda: _refuse_broken(mesh.own(contents.edit.trainable()), now.step, run))
    folder = folder_of(run, now.step)

    def alone(do: Callable[[], T]) -> Callable[[], T]:
        return lambda: _writing(run, now.step, do)

    temporary = by_first(mesh, alone(lambda: _begun(folder)))
    try:
        parts = together(mesh, alone(lambda: _write_part(temporary, contents)))
        by_first(mesh, alone(lambda: _complete(temporary, folder, contents, (now, scores), parts)))
    finally:
        if mesh.writes:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _writing(run: Path, step: int, do: Callable[[], T]) -> T:
    """What `do` gives; where it fails to write, an error that says so."""
    before = _pointed(run)
    kept = f"  ({f'{before} is whole' if before else 'no step was saved yet'})"
    with durable.writing(f"the checkpoint of step {step}", run, kept):
        return do()


def _begun(folder: Path) -> Path:
    """An empty folder beside the one that is to be."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = durable.temporary_of(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def _write_part(folder: Path, contents: Contents) -> Part:
    """Writes what this process alone holds."""
    if not contents.mesh.plan.shares_state:
        return Part({}, {})
    own = contents.mesh.own(contents.edit.trainable())
    held, shapes = in_pieces.state_of(contents.optimiser, own)
    file = store.file_of(folder / in_pieces.OPTIMISER, contents.mesh.rank)
    file.parent.mkdir(exist_ok=True)
    store.write(file, held)
    if not file.exists():
        return Part(shapes, {})
    durable.sync(file)
    return Part(shapes, {file.relative_to(folder).as_posix(): manifest.digest(file)})


def _complete(
    temporary: Path,
    folder: Path,
    contents: Contents,
    told: tuple[State, Mapping[str, float]],
    parts: Sequence[Part],
) -> None:
    """Writes what all processes have, looks at what each wrote, and gives the checkpoint its name."""
    now, scores = told
    _write_weights(temporary, contents, replace(contents.record, scores=scores))
    if contents.mesh.plan.shares_state:
        shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
        in_pieces.stored_state(temporary).check(shapes)
    else:
        kept = contents.optimiser.state_tensors()
        file = temporary / f"{in_pieces.OPTIMISER}.safetensors"
        save_file({k: v.detach().cpu().contiguous() for k, v in kept.items()}, file)
    save_file(randomness.states(), temporary / RANDOM)
    beside = _beside(contents.edit)
    if beside:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in beside.items()}, temporary / TECHNIQUES
        )
    (temporary / STATE).write_text(state.to_text(now), encoding="utf-8")
    known = {name: digest for part in parts for name, digest in part.digests.items()}
    manifest.write(temporary, known)
    durable.publish(temporary, folder)
    point(folder.parent.parent, folder)


def _beside(edit: Edit) -> dict[str, Tensor]:
    """What the next step needs of the techniques and `adapter/` does not hold."""
    if adapters.is_adapter(edit) and not adapters.is_exact(edit):
        return {**edit.state(), **edit.trainable()}
    return {**edit.state(), **edit.aiding()}


def _write_weights(folder: Path, contents: Contents, record: Record) -> None:
    """What was trained: `adapter/` in PEFT's layout, or `model/`, the whole model, when its own weights trained."""
    edit, tokenizer = contents.edit, contents.tokenizer
    if adapters.is_adapter(edit):
        files.save(edit, folder / "adapter", base=contents.base, tokenizer=tokenizer, record=record)
        return
    model: Any = edit.model
    aiding = edit.aiding()
    own = {n: t for n, t in model.state_dict().items() if n not in aiding} if aiding else None
    with _no_bar():
        model.save_pretrained(folder / "model", state_dict=own)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "model")


def _refuse_broken(own: Mapping[str, Tensor], step: int, run: Path) -> None:
    """Raises when a weight is not a finite number: such a checkpoint would push the good ones out."""
    broken = [n for n, p in own.items() if not math.isfinite(float(p.detach().sum()))]
    broken = [n for n in broken if not bool(torch.isfinite(own[n]).all())]
    if broken:
        raise RunError(
            f"after step {step} some weights are not finite, so they are not saved",
            got=", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if broken[3:] else ""),
            cure=f"go on from the checkpoint before it with a lower rate: "
            f"{ways.resume(run, allow_changes=True, flags='--lr …')}",
        )


@contextmanager
def _no_bar() -> Iterator[None]:
    """Keeps Transformers from drawing a bar of its own through the run's lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def point(run: Path, folder: Path) -> None:
    """Makes `folder` the checkpoint that the run goes on from."""
    durable.write_text(folder.parent / LATEST, folder.name)


def _pointed(run: Path) -> str | None:
    """The name in `latest`; None without one."""
    try:
        return (run / "checkpoints" / LATEST).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def found(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    named = [path for path in (run / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((path for path in named if path.name[5:].isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def latest(run: Path, wanted: str | int | None = None) -> Path | None:
    """The checkpoint to go on from, with every file as it was written.

    Args:
        run: the run's folder.
        wanted: one by name or number (`step-000200`, or 200); None is the newest.

    Returns:
        Its folder; None when the run was stopped before it saved one.

    Raises:
        RunError: when it is damaged or not there, naming the newest one that is whole.
    """
    there = found(run)
    if wanted is not None:
        wanted = str(wanted)
        name = f"step-{int(wanted):06d}" if wanted.isdecimal() else Path(wanted).name
        folder = run / "checkpoints" / name
        if folder not in there:
            raise RunError(
                "the run has no such checkpoint",
                got=wanted,
                wanted=", ".join(path.name for path in there) or "none was saved",
            )
    elif _pointed(run) is None and not there:
        return None
    else:
        folder = run / "checkpoints" / (_pointed(run) or there[-1].name)
    damage = manifest.damage(folder)
    if damage:
        raise RunError(
            "the checkpoint to go on from is damaged, and nothing was changed",
            got="\n          ".join([f"{folder}", *damage[:4]]),
            wanted="the files as they were written",
            cure=_way_out(run, there, folder),
        )
    return folder


def _way_out(run: Path, there: list[Path], damaged: Path) -> str:
    for folder in reversed(there):
        if folder != damaged and not manifest.damage(folder):
            return (
                f"{folder.name} is whole, and going on from it gives the same result: "
                f"{ways.resume(run, folder.name)}"
            )
    return f"no other checkpoint is whole: put the files back, or begin anew: {ways.OVERWRITE}"


def restore(
    folder: Path, edit: Edit, optimiser: Optimiser | None, mesh: Mesh | None = None
) -> None:
    """Gives the model, the edit, the optimiser and the random generators the values of a checkpoint.

    Args:
        folder: of a whole checkpoint.
        edit: of the model that is to go on.
        optimiser: None for one of another kind, which cannot take the old one's state.
        mesh: the processes, each of which takes what it holds, however it was shared out when it was saved.
    """
    if not adapters.is_adapter(edit):
        _restore_base(edit, folder / "model")
    elif adapters.is_exact(edit):
        files.restore(edit, files.read_tensors(folder / "adapter"))
    _restore_beside(edit, folder)
    if optimiser is not None:
        own = (mesh or OneProcess()).own(edit.trainable())
        in_pieces.take_state(optimiser, own, in_pieces.stored_state(folder))
    randomness.restore(load_file(folder / RANDOM))


@torch.no_grad()
def _restore_beside(edit: Edit, folder: Path) -> None:
    wanted = _beside(edit)
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


def prune(run: Path, now: State, keep_last: int | None) -> None:
    """Removes checkpoints of later steps (of a run that went on from an earlier one), and all but the last and best.

    Args:
        run: the run's folder.
        now: the state of the newest checkpoint.
        keep_last: how many are kept beside the best; None keeps all.
    """
    there = found(run)
    current = [folder for folder in there if step_of(folder) <= now.step]
    keep = set(current[-keep_last:] if keep_last is not None else current)
    if now.best_step is not None:
        keep.add(folder_of(run, now.best_step))
    for folder in there:
        if folder not in keep:
            durable.remove_folder(folder)


def copy_of_weights(run: Path, step: int, name: str) -> Path:
    """Puts the weights of a checkpoint (`adapter` or `model`) into the run's own folder."""
    source = folder_of(run, step) / name
    temporary = durable.temporary_of(run / name)
    with durable.writing(f"{name}/", run):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(source, temporary, copy_function=shutil.copy)
            durable.publish(temporary, run / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return run / name
