"""Rooms that share their name with a public function: `afina.train(...)` and `afina.train.loop` both work.

Importing any part of a room makes Python set `afina.train` to the room's module, which would hide a function of that
name; so the module itself can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

MAINS = {"afina.train": "afina.train.run", "afina.evaluate": "afina.evaluate.evaluate"}
"""Room -> the module that holds the function of the room's name."""


class CallableRoom(ModuleType):
    """A room's module that acts as its main function when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the main function."""
        return main_function(self.__name__)(*args, **kwargs)


def main_function(room: str) -> Callable[..., Any]:
    """The function that a room's name stands for."""
    return getattr(import_module(MAINS[room]), room.rpartition(".")[2])


def make_callable(room: str) -> None:
    """Lets the module `room` be called."""
    sys.modules[room].__class__ = CallableRoom
