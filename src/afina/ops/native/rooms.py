"""Memory that passes use again: fresh memory of the same size would cost the system more than it costs to fill.

A room is taken for what a block keeps until backward, or for what it needs in between, and given back when it is done
with. One that never comes back (of a graph that is dropped before its backward) is freed as any tensor is.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 1 << 16
"""Numbers to which sizes are rounded up, so that rows of about one length take the same rooms."""


class Rooms:
    """Rooms of one kind of number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._free: list[Tensor] = []

    def take(self, *shape: int) -> Tensor:
        """Memory of this shape, with anything in it."""
        numbers = 1
        for length in shape:
            numbers *= length
        fitting = [i for i, room in enumerate(self._free) if numbers <= room.numel()]
        if fitting:
            best = min(fitting, key=lambda i: self._free[i].numel())
            if self._free[best].numel() <= max(4 * numbers, STEP):
                return self._free.pop(best)[:numbers].view(shape)
        elif self._free:
            # Too small for what passes take by now: the largest makes way for its better.
            largest = max(range(len(self._free)), key=lambda i: self._free[i].numel())
            if self._free[largest].numel() * 4 >= numbers:
                self._free.pop(largest)
        size = -(-numbers // STEP) * STEP
        return torch.empty(size, dtype=self.dtype)[:numbers].view(shape)

    def give(self, *rooms: Tensor) -> None:
        """Takes rooms back; nobody may read them any more."""
        for room in rooms:
            whole = room.untyped_storage()
            full = torch.empty(0, dtype=self.dtype).set_(whole)  # pyright: ignore[reportUnknownMemberType]
            self._free.append(full)

    def clear(self) -> None:
        """Frees all that is not taken."""
        self._free.clear()


rooms = Rooms(torch.bfloat16)
"""Of this process."""
