"""The call of a module, exchanged for another in the place where `nn.Module.compile` puts its own.

The module, its hooks and its names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Call = Callable[..., Any]

_SLOT = "_compiled_call_impl"


def calls(modules: Sequence[nn.Module]) -> list[Call | None]:
    """What is called in place of each module's own; None for its own."""
    return [getattr(module, _SLOT) for module in modules]


def put(modules: Sequence[nn.Module], others: Sequence[Call | None]) -> None:
    """Exchanges the call of each module; None is its own."""
    for module, call in zip(modules, others, strict=True):
        setattr(module, _SLOT, call)


@contextmanager
def instead(ways: Mapping[nn.Module, Callable[[Call], Call]]) -> Generator[None, None, None]:
    """Inside the block each of these modules is called as its function says, which is given the call it has now."""
    modules = list(ways)
    before = calls(modules)
    own = [call or module._call_impl for call, module in zip(before, modules, strict=True)]
    try:
        put(modules, [way(call) for way, call in zip(ways.values(), own, strict=True)])
        yield
    finally:
        put(modules, before)
