"""Changes of tensors that a base's files keep in pieces: each expert apart, where the model has them fused.

Transformers' own table says how a tensor of the model is taken apart into those of the files. Taking apart is linear
(cut, turned, renamed), so the change of a piece is the piece of the change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afina.adapters.base_files import Shards, places
from afina.adapters.merge_changes import Changes
from afina.errors import TechniqueError
from afina.tree import Delta
from afina.tree.fold import fold


class Pieces:
    """The pieces of the tensors that an adapter changes.

    Attributes:
        of: the model's tensor, by the name that a piece has in the files.
    """

    def __init__(self, skeleton: Any, shards: Shards, changes: Changes) -> None:
        """Nothing is computed yet.

        Args:
            skeleton: the base on the meta device.
            shards: the headers of the base's files.
            changes: of the adapter.
        """
        self._skeleton, self._changes = skeleton, changes
        found = places(skeleton, shards)
        self.of = {stored: place.name for stored, place in found.items() if place.piece}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def reaches(self, name: str) -> bool:
        """Whether the files have every piece of the model's tensor, and each change of it is one that is added."""
        mine = {stored for stored, whole in self.of.items() if whole == name}
        if not mine or not all(delta.additive for delta in self._deltas(name)):
            return False
        shape = self._skeleton.get_parameter(name).shape
        return set(self._apart({name: torch.zeros(shape, device="meta")})) == mine

    def changed(self, names: Collection[str]) -> set[str]:
        """Those names in the files that are pieces of these tensors."""
        return {stored for stored, name in self.of.items() if name in names}

    def trained(self, stored: str) -> Tensor | None:
        """The piece of a tensor that was trained itself; None where it was not."""
        name = self.of[stored]
        return self._pieces(name)[stored] if name in self._changes.whole else None

    def folded(self, stored: str, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        """A piece with its piece of the change, in another type; and what the rounding lost; see `fold`."""
        change = self._pieces(self.of[stored])[stored]
        return fold(value, [_Given(change)], name=stored, dtype=dtype)

    def _deltas(self, name: str) -> Sequence[Delta]:
        target, _, own = name.rpartition(".")
        beside = self._changes.deltas.get(target, ())
        return [delta.weights()[own] for delta in beside if own in delta.weights()]

    def _pieces(self, name: str) -> dict[str, Tensor]:
        """Those of a tensor's change, or of its trained values. They lie together in the files: the last are kept."""
        if self._last[0] != name:
            whole = self._changes.whole.get(name)
            if whole is None:
                whole = torch.stack([delta.weight_delta() for delta in self._deltas(name)]).sum(0)
            self._last = (name, self._apart({name: whole}))
        return self._last[1]

    def _apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._skeleton, dict(tensors))


class _Given(Delta):
    """A change that is given."""

    foldable = True

    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self._change = change

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Not called.

        Raises:
            TechniqueError: always.
        """
        raise TechniqueError("a change that is to be folded in does not act beside a module")

    def reset(self, seed: int) -> None:
        """It has no parameters."""

    def weight_delta(self) -> Tensor:
        """The change, in fp32 or wider."""
        return self._change.clone()
