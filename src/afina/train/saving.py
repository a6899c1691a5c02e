"""A checkpoint written: what all processes have by one of them, and by each what it alone has.

All processes save together. What goes wrong in one of them is raised in all, and what is there already is not touched
before the new one is on the disk. Nobody talks to others in `Saving.write`, so it can happen beside training.
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
from safetensors.torch import save_file
from torch import Tensor

from afina.adapters import contents as adapters
from afina.adapters import files
from afina.adapters.card import Record
from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.parallel import parts, store
from afina.parallel.runtime import Mesh, OneProcess
from afina.parallel.store import Lot, Stored
from afina.parallel.together import Aside, by_first, together
from afina.train import checkpoint, durable, in_pieces, manifest, randomness, state, ways
from afina.train.restoring import RANDOM, TECHNIQUES, beside
from afina.train.state import State
from afina.tree import Edit
from afina.tree.twin import give

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
        twin: of the edit, where no process has its tensors whole.
        copy: of the edit, for checkpoints that are written beside training; None where a process has not all of it, or
            writes none so.
    """

    edit: Edit
    optimiser: Optimiser
    base: str
    tokenizer: Any
    record: Record
    mesh: Mesh = field(default_factory=OneProcess)
    twin: Edit | None = None
    copy: Edit | None = None

    @property
    def whole(self) -> Edit:
        """An edit whose tensors are whole, though they may have no values."""
        return self.twin or self.edit


@dataclass(frozen=True)
class Values:
    """The values of a checkpoint.

    Attributes:
        edit: whose tensors the one process that writes saves; None in the others, and where all have pieces.
        state: the optimiser's, in the same way.
        pieces: what this process alone writes, by folder and name.
        random: the generators' states.
    """

    edit: Edit | None
    state: Mapping[str, Tensor]
    pieces: Mapping[str, Mapping[str, Lot]]
    random: Mapping[str, Tensor]


def values_now(contents: Contents) -> Values:
    """Those of just now, in the memory where they change."""
    mesh, plan = contents.mesh, contents.mesh.plan
    adapter = adapters.is_adapter(contents.whole)
    pieces = in_pieces.shared_out(mesh, contents.edit, contents.optimiser, adapter=adapter)
    return Values(
        contents.edit if mesh.writes and not plan.shares_weights else None,
        contents.optimiser.state_tensors() if mesh.writes and not plan.shares_state else {},
        pieces,
        randomness.states(),
    )


def save(run: Path, contents: Contents, now: State, scores: Mapping[str, float]) -> Path:
    """Writes the checkpoint of `now.step`, and makes it the latest.

    Args:
        run: the run's folder.
        contents: what goes into each.
        now: where the run stands.
        scores: of these weights on validation rows, for the adapter's card; empty when they were not measured.

    Raises:
        RunError: when weights are not finite, or cannot be written; the older checkpoints are as they were.
    """
    saving, mesh = Saving(run, contents, now, scores), contents.mesh
    try:
        # Of several processes one may have more to write than the others wait for without a word.
        alone = mesh.plan.processes == 1
        return saving.finish([saving.write()] if alone else Aside(mesh, saving.write).wait())
    finally:
        saving.drop()


class Saving:
    """One checkpoint on its way to the disk; begun by all processes.

    Args:
        run: the run's folder.
        contents: what goes into each.
        now: where the run stands.
        scores: see `save`.
        copied: takes the values that are to be written; None writes those that are there.

    Raises:
        RunError: see `save`.
    """

    def __init__(
        self,
        run: Path,
        contents: Contents,
        now: State,
        scores: Mapping[str, float],
        copied: Callable[[Values], Values] | None = None,
    ) -> None:
        mesh = contents.mesh
        self.run, self.contents, self.now, self.scores = run, contents, now, scores
        together(mesh, lambda: _refuse_broken(mesh.own(contents.edit.trainable()), now.step, run))
        self.folder = checkpoint.folder_of(run, now.step)
        self._shapes: dict[str, Mapping[str, Sequence[int]]] = {}
        values = self._divided(values_now(contents))
        self.values = values if copied is None else copied(values)
        self.temporary = by_first(mesh, lambda: self._writing(self._begun))

    def _divided(self, values: Values) -> Values:
        """Of what this process has, what it is to write; and what all of them are to make up."""
        mesh = self.contents.mesh
        here = {folder: parts.places_of(held) for folder, held in values.pieces.items()}
        told = together(mesh, lambda: here)
        mine: dict[str, dict[str, Lot]] = {}
        for folder, held in values.pieces.items():
            everybody = [one[folder] for one in told]
            self._shapes[folder] = parts.shapes_of(everybody)
            first = parts.first_of(mesh.rank, everybody)
            mine[folder] = {name: one for name, one in held.items() if name in first}
        return replace(values, pieces=mine)

    def _writing(self, do: Callable[[], T]) -> T:
        """What `do` gives; where it fails to write, an error that says so."""
        before = checkpoint.pointed(self.run)
        kept = f"  ({f'{before} is whole' if before else 'no step was saved yet'})"
        with durable.writing(f"the checkpoint of step {self.now.step}", self.run, kept):
            return do()

    def _begun(self) -> Path:
        """An empty folder beside the one that is to be."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = durable.temporary_of(self.folder)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        return temporary

    def write(self) -> dict[str, str]:
        """Writes this process's files.

        Returns:
            Their sha256, by their name in the checkpoint.
        """
        return self._writing(self._write)

    def _write(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for folder, held in self.values.pieces.items():
            file = store.file_of(self.temporary / folder, self.contents.mesh.rank)
            file.parent.mkdir(exist_ok=True)
            store.write(file, held)
            if file.exists():
                durable.sync(file)
                found[file.relative_to(self.temporary).as_posix()] = manifest.digest(file)
        if self.contents.mesh.writes:
            self._write_shared()
            mine = [p for p in self.temporary.iterdir() if p.name not in self.values.pieces]
            found |= manifest.digests(self.temporary, mine)
        return found

    def _write_shared(self) -> None:
        """What all processes have."""
        values, place = self.values, self.temporary
        if values.edit is not None:
            self._write_weights(values.edit)
            kept = beside(values.edit)
            if kept:
                save_file(_on_cpu(kept), place / TECHNIQUES)
        if in_pieces.OPTIMISER not in values.pieces:
            save_file(_on_cpu(values.state), place / f"{in_pieces.OPTIMISER}.safetensors")
        save_file(dict(values.random), place / RANDOM)
        (place / checkpoint.STATE).write_text(state.to_text(self.now), encoding="utf-8")

    def finish(self, written: Sequence[Mapping[str, str]]) -> Path:
        """Looks at what the processes wrote, and gives the checkpoint its name.

        Args:
            written: what `write` gave in each.
        """
        by_first(self.contents.mesh, lambda: self._writing(lambda: self._complete(written)))
        return self.folder

    def _complete(self, written: Sequence[Mapping[str, str]]) -> None:
        for folder, shapes in self._shapes.items():
            stored = Stored((self.temporary / folder).glob("*.safetensors"))
            stored.check(shapes)
            twin = self.contents.twin
            if folder == in_pieces.WEIGHTS and twin is not None and adapters.is_adapter(twin):
                names = [*twin.trainable(), *twin.state()]
                give(twin, {name: stored.read(name) for name in names})
                self._write_weights(twin)
        known = {name: digest for told in written for name, digest in told.items()}
        manifest.write(self.temporary, known)
        durable.publish(self.temporary, self.folder)
        checkpoint.point(self.run, self.folder)

    def _write_weights(self, edit: Edit) -> None:
        """What was trained: `adapter/` in PEFT's layout, or `model/`, the whole model, when its own weights trained."""
        tokenizer, place = self.contents.tokenizer, self.temporary
        if adapters.is_adapter(edit):
            record = replace(self.contents.record, scores=self.scores)
            base = self.contents.base
            files.save(edit, place / "adapter", base=base, tokenizer=tokenizer, record=record)
            return
        model: Any = edit.model
        aiding = edit.aiding()
        own = {n: t for n, t in model.state_dict().items() if n not in aiding} if aiding else None
        with no_bar():
            model.save_pretrained(place / "model", state_dict=own)
        if tokenizer is not None:
            tokenizer.save_pretrained(place / "model")

    def drop(self) -> None:
        """What was not finished is removed."""
        if self.contents.mesh.writes:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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
def no_bar() -> Iterator[None]:
    """Keeps Transformers from drawing a bar of its own through the run's lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
