"""The mesh a loop runs on, and its one-process twin, with the same methods.

The loop asks for sums and for permission to write; it never asks how many processes there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Mesh(Protocol):
    """What a training loop needs to know of the processes it is one of."""

    @property
    def writes(self) -> bool:
        """Whether this process writes the run's files."""
        ...

    def sum(self, value: float) -> float:
        """The sum of a number over the processes that see different data."""
        ...

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Sums each gradient in place over the processes that see different data."""
        ...

    def share(self, rows: list[T]) -> list[T]:
        """This process's part of the rows of a step."""
        ...

    def barrier(self) -> None:
        """Waits for every process."""
        ...


class OneProcess:
    """The mesh of a run in one process."""

    @property
    def writes(self) -> bool:
        """Always."""
        return True

    def sum(self, value: float) -> float:
        """The value itself."""
        return value

    def reduce_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Nothing to add."""

    def share(self, rows: list[T]) -> list[T]:
        """All rows."""
        return rows

    def barrier(self) -> None:
        """Nobody to wait for."""
