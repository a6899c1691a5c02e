"""The values of a model of which no process holds all: each reads its parts of the base and starts its parts of deltas.

Starting values are those of one process: each child of the twin is given its values whole and alone, from the same seed
and, where a start reads the weight beside it, with that weight; then each process takes its part and the rest is gone.
So what a process has in memory at once is its own share and one child, with one map of the base.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from afina import seams
from afina.models.in_parts import Unread
from afina.parallel.store import Lot
from afina.train.state import digest_of
from afina.tree import Edit, Technique
from afina.tree.pieces import mark, piece_of
from afina.tree.twin import lent

PLAIN = (bool, int, float, str)
"""Types of what a child notes of its start beside tensors."""


def refuse_whole_start(model: nn.Module, techniques: Sequence[Technique]) -> str | None:
    """Which technique cannot start where no process has the whole model, in words; None where all can."""
    return next(
        (
            f"{technique.key} starts from a pass of the whole model"
            for technique in techniques
            if technique.start_reads(model) == "model"
        ),
        None,
    )


class Filling:
    """Gives a model and what techniques attached to it their values, in one process of several.

    Args:
        edit: of the model, all on the meta device.
        twin: of the edit.
        unread: the base's values.
        seed: of starting values.

    Attributes:
        digests: of the starting values of what trains, by name, as far as this process has had them whole.
    """

    def __init__(self, edit: Edit, twin: Edit, unread: Unread, seed: int) -> None:
        self.edit, self.twin, self.unread, self.seed = edit, twin, unread, seed
        self.digests: dict[str, str] = {}

    @torch.no_grad()
    def fill(self, parts: Mapping[str, Lot], device: torch.device) -> None:
        """Fills what this process has.

        Args:
            parts: its part of each parameter, by name.
            device: where buffers go.
        """
        attached = {n for n in self.edit.trainable() if n not in self.edit.in_place}
        for name, lot in parts.items():
            if name not in attached and lot.tensor.numel():
                lot.tensor.copy_(self.unread.read(name, lot.piece.box))
        self._fill_buffers(device)
        for name in self.edit.deltas:
            self._start(name, parts, device)

    def _fill_buffers(self, device: torch.device) -> None:
        """The base's own."""
        state = self.edit.state()
        for name, buffer in list(self.edit.model.named_buffers()):
            if name in state or not buffer.is_meta:
                continue
            made = self.unread.buffers.get(name)
            value = self.unread.read(name) if made is None else made
            owner, _, own = name.rpartition(".")
            setattr(self.edit.model.get_submodule(owner), own, value.to(device))

    def digest_in_place(self, rank: int, processes: int) -> None:
        """The digests of the base's own tensors that train; each process reads its share of them, one at a time."""
        for name in sorted(self.edit.in_place)[rank::processes]:
            self.digests[name] = digest_of(name, self.unread.read(name))

    def _start(self, name: str, parts: Mapping[str, Lot], device: torch.device) -> None:
        """One child: whole in the twin, then this process's part of it."""
        live, child = self.edit.deltas[name], self.twin.deltas[name]
        before = [_plain(module) for module in child.modules()]
        with self._started(name) as whole:
            for own, value in whole.items():
                full = f"{name}.{own}"
                if full in self.edit.trainable():
                    self.digests[full] = digest_of(full, value)
                if full in parts:
                    lot = parts[full]
                    lot.tensor.copy_(lot.piece.of(value))
            for own, buffer in list(live.named_buffers()):
                piece = piece_of(buffer)
                part = piece.of(whole[own]).clone().to(device)
                owner, _, last = own.rpartition(".")
                setattr(live.get_submodule(owner), last, mark(part, piece))
        for module, old, new in zip(live.modules(), before, child.modules(), strict=True):
            noted = {key: value for key, value in _plain(new).items() if old.get(key) != value}
            for key, value in noted.items():
                setattr(module, key, value)

    @contextmanager
    def _started(self, name: str) -> Generator[dict[str, Tensor], None, None]:
        """Inside the block a child of the twin has its starting values, which are given by their names in it."""
        child = self.twin.deltas[name]
        tensors = {**dict(child.named_parameters()), **dict(child.named_buffers())}
        own = {f"{name}.{n}": torch.zeros(t.shape, dtype=t.dtype) for n, t in tensors.items()}
        one = self.twin.only(name)
        (technique,) = one.techniques
        with lent(self.twin.model, {**own, **self._base(technique, name.rpartition(".")[0])}):
            technique.init(one, seed=self.seed)
            yield {**dict(child.named_parameters()), **dict(child.named_buffers())}

    def _base(self, technique: Technique, place: str) -> dict[str, Tensor]:
        """What a start reads of the base, whole."""
        model, reads = self.twin.model, technique.start_reads(self.twin.model)
        if reads == "place":
            own = [name for name, _ in model.get_submodule(place).named_parameters(recurse=False)]
            names = [f"{place}.{name}" for name in own]
        elif reads == "input":
            names = [f"{seams.input_embedding(model)}.weight"]
        else:
            names = []
        return {name: self.unread.read(name) for name in names}


def _plain(module: nn.Module) -> dict[str, object]:
    """What a module notes beside tensors and modules."""
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
