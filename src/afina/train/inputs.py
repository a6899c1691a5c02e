"""States of rows on the disk: what enters a block, written once a row and read in later epochs.

    inputs/step-000012-000.safetensors    the states of the rows of one micro-batch, (tokens, width) each

A row's states are named by the hash of its tokens; whatever else they depend on (base, dtype, block) stands in each
file's header, and what was written under another header is removed. A run that goes on finds what it would have: files
of steps after its checkpoint are removed too, since a row's states differ in their last bits with its neighbours.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from afina.train import durable
from afina.types import Row

FOLDER = "inputs"
"""In the run's folder; it goes when the run is finished."""

_NAME = re.compile(r"step-(\d+)-\d+\.safetensors")


def key_of(row: Row) -> str:
    """The name of a row's states: equal tokens, equal name."""
    return hashlib.sha256(array("q", row.tokens).tobytes()).hexdigest()[:32]


class Store:
    """The states that a run keeps.

    Attributes:
        folder: where they lie.
    """

    def __init__(self, out: Path, header: Mapping[str, str], step: int) -> None:
        """Takes what an earlier part of the run left, as far as it is of this one.

        Args:
            out: the run's folder.
            header: what all states depend on beside the tokens.
            step: that the run goes on after, 0 at its beginning.

        Raises:
            RunError: what is there cannot be read or removed.
        """
        self.folder, self._header = out / FOLDER, dict(header)
        self._files: dict[str, Path] = {}
        with durable.writing("the kept states", out):
            self.folder.mkdir(exist_ok=True)
            durable.sweep(self.folder)
            for path in sorted(self.folder.iterdir()):
                found = _NAME.fullmatch(path.name)
                if found is None or int(found[1]) > step or not self._take(path):
                    path.unlink()

    def _take(self, path: Path) -> bool:
        """Notes what a file holds; False for one that is not of this run, or not whole."""
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata() != self._header:
                    return False
                for key in list(file.keys()):
                    self._files.setdefault(key, path)
        except SafetensorError:
            return False
        return True

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def read(self, keys: Sequence[str]) -> list[Tensor]:
        """The states of these names (tokens, width), on the CPU."""
        found: list[Tensor] = []
        for key in keys:
            with safe_open(self._files[key], framework="pt") as file:
                found.append(file.get_tensor(key))
        return found

    def add(self, states: Mapping[str, Tensor], step: int, number: int) -> None:
        """Writes the states of one micro-batch, whole or not at all; those that are there already stay as they are.

        Args:
            states: by name.
            step: counted from 1.
            number: of the micro-batch in its step.

        Raises:
            RunError: they cannot be written.
        """
        new = {k: v.detach().cpu().contiguous() for k, v in states.items() if k not in self._files}
        if not new:
            return
        path = self.folder / f"step-{step:06d}-{number:03d}.safetensors"
        temporary = durable.temporary_of(path)
        with durable.writing(f"the states of step {step}", self.folder.parent):
            try:
                save_file(new, temporary, metadata=self._header)
                durable.sync(temporary)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            durable.sync(self.folder)
        self._files.update(dict.fromkeys(new, path))

    def remove(self) -> None:
        """Takes everything off the disk: the run is finished."""
        with durable.writing("the kept states", self.folder.parent):
            durable.remove_folder(self.folder)
        self._files.clear()
