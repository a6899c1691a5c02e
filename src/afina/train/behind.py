"""Checkpoints written beside training: a step waits while values are copied, and a thread writes the copy.

    step 200   copy -> thread: files, hashes, disk      step 201, 202, …      all done: the checkpoint gets its name

The copy lies in the CPU's memory, in buffers that the next one uses again. There is one checkpoint under way at a time:
the next save and the run's end wait for it. A checkpoint gets its name at the end of the first step at which every
process has written its part, and what went wrong in a thread is raised there, in all processes. A run that is killed
meanwhile goes on from the checkpoint before.

Source: the scheme of Mohan et al. 2021, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 21 (snapshot, then
persist).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from afina.parallel.store import Lot
from afina.parallel.together import Aside
from afina.train import checkpoint
from afina.train.saving import Contents, Saving, Values, save
from afina.train.state import State
from afina.tree import Edit
from afina.tree.twin import give


class Copies:
    """Copies values into memory of its own, the same at each time.

    Args:
        edit: whose tensors take those of the run's; None where no process has them whole.
    """

    def __init__(self, edit: Edit | None) -> None:
        self._edit = edit
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, values: Values) -> Values:
        """The copy; the one before is gone."""
        pieces = {
            folder: {
                n: Lot(self._into((folder, n), lot.tensor), lot.piece) for n, lot in lots.items()
            }
            for folder, lots in values.pieces.items()
        }
        state = {name: self._into(("", name), value) for name, value in values.state.items()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if values.edit is not None:
            assert self._edit is not None
            _fill(self._edit, {**values.edit.trainable(), **values.edit.state()})
        return replace(values, edit=values.edit and self._edit, pieces=pieces, state=state)

    def _into(self, place: tuple[str, str], value: Tensor) -> Tensor:
        value, found = value.detach(), self._buffers.get(place)
        if found is None or found.shape != value.shape or found.dtype != value.dtype:
            pinned = value.is_cuda
            found = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._buffers[place] = found
        return found.copy_(value, non_blocking=True)


def _fill(edit: Edit, values: Mapping[str, Tensor]) -> None:
    """Gives a copy of an edit the values of just now, in the CPU's memory."""
    there = {**edit.trainable(), **edit.state()}
    missing = [name for name, tensor in there.items() if tensor.is_meta]
    give(edit, {n: torch.empty(values[n].shape, dtype=values[n].dtype) for n in missing})
    give(edit, values)


class Saver:
    """Saves a run's checkpoints, one after the other. All processes call it at the same places.

    Args:
        run: the run's folder.
        contents: what goes into each checkpoint.
        keep_last: how many are kept beside the best; None keeps all.
        saved: the step of the newest there is; None before the first.

    Attributes:
        saved: the same; one under way does not count.
    """

    def __init__(
        self, run: Path, contents: Contents, keep_last: int | None, saved: int | None
    ) -> None:
        self.run, self.contents, self.keep_last, self.saved = run, contents, keep_last, saved
        self._copies = Copies(contents.copy)
        self._way: tuple[Saving, Aside[Mapping[str, str]]] | None = None

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint, also of one under way."""
        return self.saved if self._way is None else self._way[0].now.step

    def save(self, now: State, scores: Mapping[str, float], *, beside: bool) -> None:
        """Writes a checkpoint, once an earlier one is written.

        Args:
            now: where the run stands.
            scores: see `saving.save`.
            beside: training goes on meanwhile; `look` and `wait` give it its name.

        Raises:
            RunError: see `saving.save`; also for the checkpoint before.
        """
        self.wait()
        if not beside:
            save(self.run, self.contents, now, scores)
            self._note(now)
            return
        saving = Saving(self.run, self.contents, now, scores, self._copies.take)
        self._way = saving, Aside(self.contents.mesh, saving.write)

    def look(self) -> None:
        """Gives the checkpoint under way its name if all processes have written it.

        Raises:
            RunError: one of them could not.
        """
        if self._way is not None and self._way[1].done():
            self.wait()

    def wait(self) -> None:
        """The same, once they have."""
        if self._way is None:
            return
        (saving, written), self._way = self._way, None
        try:
            saving.finish(written.wait())
        finally:
            saving.drop()
        self._note(saving.now)

    def _note(self, now: State) -> None:
        """The checkpoint of this state is there."""
        self.contents.mesh.told(lambda: checkpoint.prune(self.run, now, self.keep_last))
        self.saved = now.step
