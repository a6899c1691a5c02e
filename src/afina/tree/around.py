"""Children that stand around a module's own `forward`: they decide on what it runs, how often, or whether at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, ClassVar

from torch import Tensor, nn

from afina.tree.technique import Delta, Removable

_KEYS = "_afina_around"
_OWN = "_afina_forward"


class Around(Delta):
    """A child that runs the `forward` of the module it belongs to, most often a block.

    Hooks of the module, recomputation and compilation are outside of it: a block that is recomputed in backward runs
    through its children again.

    Attributes:
        recomputes: it runs its block again in backward by itself, so that recomputation and compilation leave it out.
    """

    recomputes: ClassVar[bool] = False
    alone: ClassVar[str] = "both decide on what the same block runs"
    scalable: ClassVar[bool] = False

    @abstractmethod
    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's result.

        Args:
            call: the module's own `forward`, through the children that were attached before this one.
            base: the module.
            args: as the module was called.
            kwargs: as the module was called.
        """

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """What the module gave: after it nothing is added."""
        return y

    def reset(self, seed: int) -> None:
        """Nothing to start from, for most."""

    def hooks(self, module: nn.Module, key: str) -> Sequence[Removable]:
        """Stands around the module's `forward`, outside of what stands there already."""
        return [_Standing(module, key)]


class _Standing:
    """A child that stands around its module's `forward`.

    The module's own attribute is a bound method, which a deep copy binds to the copy.
    """

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module, self.key = module, key
        held = vars(module)
        if _KEYS not in held:
            held[_OWN] = held.get("forward")
            held["forward"] = MethodType(_run, module)
        held[_KEYS] = (*held.get(_KEYS, ()), key)

    def remove(self) -> None:
        """The child stands there no more; without any the module is as it was."""
        held = vars(self.module)
        left = tuple(key for key in held[_KEYS] if key != self.key)
        if left:
            held[_KEYS] = left
            return
        del held[_KEYS], held["forward"]
        own = held.pop(_OWN)
        if own is not None:
            held["forward"] = own


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    held = vars(module)
    call: Callable[..., Any] = held[_OWN] or partial(type(module).forward, module)
    for key in held[_KEYS]:
        child: Any = getattr(module, key)
        if child.acts:
            call = partial(child.around, call, module)
    return call(*args, **kwargs)
