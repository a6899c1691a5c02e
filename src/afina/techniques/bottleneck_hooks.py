"""How a bottleneck adapter reads at one end of its sublayer and adds at the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from afina.techniques.bottleneck import BottleneckDelta


class Slot:
    """What was read at one end of a sublayer, until the other end takes it; nothing of it is ever copied along."""

    def __init__(self) -> None:
        self.held: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        return Slot()


class Reads:
    """Keeps what a sublayer is given. A deep copy of a model copies this too, with its own child."""

    def __init__(self, delta: BottleneckDelta) -> None:
        self.delta = delta

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the sublayer's beginning."""
        if self.delta.acts:
            self.delta.slot.held = _first(args, kwargs)


class Adds:
    """Calls the child of that name with the first output of a module that may have several."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Behind the sublayer's end; returns what takes the output's place."""
        delta: BottleneckDelta = getattr(module, self.key)
        if not delta.acts:
            return output
        x, delta.slot.held = delta.slot.held, None
        x = _first(args, kwargs) if x is None else x
        acting = delta if delta.strength == 1 else delta.scaled
        if not isinstance(output, tuple):
            return acting(x, output, module)
        several = cast("tuple[Any, ...]", output)
        return (acting(x, several[0], module), *several[1:])


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module is given first: Transformers hands attention its states by name."""
    return args[0] if args else next(iter(kwargs.values()))
