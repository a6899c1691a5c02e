"""Memory that passes use again: fresh memory of the same size would cost the system more than it costs to fill.

A room is taken for what a block keeps until backward, or for what it needs in between, and given back when it is done
with. One that never comes back (of a graph that is dropped before its backward) is freed as any tensor is.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

STEP = 1 << 16
"""Numbers to which sizes are rounded up, so that rows of about one length take the same rooms."""


class Rooms:
    """Rooms of one kind of number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._free: list[Tensor] = []
        self._one = Lock()

    def take(self, *shape: int) -> Tensor:
        """Memory of this shape, with anything in it."""
        numbers = 1
        for length in shape:
            numbers *= length
        with self._one:
            room = self._found(numbers)
        if room is None:
            room = torch.empty(-(-numbers // STEP) * STEP, dtype=self.dtype)
        return room[:numbers].view(shape)

    def _found(self, numbers: int) -> Tensor | None:
        """A free room that is large enough, and not far too large."""
        fitting = [i for i, room in enumerate(self._free) if numbers <= room.numel()]
        if fitting:
            best = min(fitting, key=lambda i: self._free[i].numel())
            if self._free[best].numel() <= max(4 * numbers, STEP):
                return self._free.pop(best)
        elif self._free:
            # Too small for what passes take by now: the largest makes way for its better.
            largest = max(range(len(self._free)), key=lambda i: self._free[i].numel())
            if self._free[largest].numel() * 4 >= numbers:
                self._free.pop(largest)
        return None

    def give(self, *rooms: Tensor) -> None:
        """Takes rooms back; nobody may read them any more."""
        with self._one:
            for room in rooms:
                whole = torch.empty(0, dtype=self.dtype)
                whole.set_(room.untyped_storage())  # pyright: ignore[reportUnknownMemberType]
                self._free.append(whole)

    def clear(self) -> None:
        """Frees all that is not taken."""
        with self._one:
            self._free.clear()


rooms = Rooms(torch.bfloat16)
wide_rooms = Rooms(torch.float32)
"""Of this process."""
