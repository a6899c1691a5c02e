"""A child in its place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from afina.tree.technique import Delta, Removable


class Attached:
    """A child in its place, and the hooks through which it acts."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module, self.key = module, key
        self._handles: Sequence[Removable] = ()

    def hook(self) -> None:
        """The child acts."""
        delta = getattr(self.module, self.key)
        assert isinstance(delta, Delta)
        self._handles = delta.hooks(self.module, self.key)

    def unhook(self) -> None:
        """The child acts no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()
