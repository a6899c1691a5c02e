"""A child in its place, and base parameters that no longer train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def freeze(model: nn.Module) -> Callable[[], None]:
    """Freezes every parameter; the result puts each flag back."""
    # By name, for a reference to a tensor would keep it in memory after another has taken its place.
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def restore() -> None:
        for name, flag in flags.items():
            model.get_parameter(name).requires_grad_(flag)

    return restore
