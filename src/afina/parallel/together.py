"""What goes wrong in one process ends all of them with its words, so that none waits for one that has given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from afina import errors
from afina.errors import AfinaError, RunError

if TYPE_CHECKING:
    from afina.parallel.runtime import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error as it travels: as text, for what another process raised may not exist here.

    Attributes:
        kind: the class's name; of an `AfinaError` that of the kind it is, in `errors`.
        what, got, wanted, cure: as `AfinaError` has them; of another error what alone.
    """

    kind: str
    what: str
    got: str | None = None
    wanted: str | None = None
    cure: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What an error says."""
        if not isinstance(error, AfinaError):
            return cls(type(error).__name__, str(error))
        got, wanted = (None if x is None else str(x) for x in (error.got, error.wanted))
        kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
        return cls(kind.__name__, error.what, got, wanted, error.cure)

    def error(self, rank: int) -> AfinaError:
        """The same error here; what was no `AfinaError` is a run's, which says whose it was."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, AfinaError):
            return kind(self.what, got=self.got, wanted=self.wanted, cure=self.cure)
        return RunError(
            f"process {rank} failed, and the others end with it", got=f"{self.kind}: {self.what}"
        )


def together(mesh: Mesh, do: Callable[[], T]) -> list[T]:
    """What `do` gives in each process, by rank. All processes call this at the same place.

    Raises:
        Exception: where this process failed, its own; where another did, the first one's, in every process.
    """
    own: Exception | None = None
    given: T | None = None
    try:
        given = do()
    except Exception as error:
        own = error
    found = mesh.gathered(given if own is None else Failure.of(own))
    if own is not None:
        raise own
    for rank, value in enumerate(found):
        if isinstance(value, Failure):
            raise value.error(rank)
    return found  # pyright: ignore[reportReturnType]


LOOKS_EVERY_S = 1.0
"""Who waits for another's long work hears so often that it goes on."""


class Aside(Generic[T]):
    """Work that each process does in a thread, so that those who wait for it can be told that it goes on.

    Args:
        mesh: the processes; all of them make one at the same place.
        do: the work, which talks to no other process.
    """

    def __init__(self, mesh: Mesh, do: Callable[[], T]) -> None:
        self._mesh, self._do = mesh, do
        self._given: list[T] = []
        self._wrong: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._given.append(self._do())
        except Exception as error:
            self._wrong = error

    def done(self) -> bool:
        """Whether it is done in all processes, which ask together."""
        return self._mesh.least(float(not self._thread.is_alive())) == 1

    def wait(self) -> list[T]:
        """What it gave in each process, by rank, once all are done.

        Raises:
            Exception: as `together`.
        """
        while True:
            self._thread.join(LOOKS_EVERY_S)
            if self.done():
                return together(self._mesh, self._result)

    def _result(self) -> T:
        if self._wrong is not None:
            raise self._wrong
        return self._given[0]


def patiently(mesh: Mesh, do: Callable[[], T]) -> T:
    """`by_first` for what may take longer than processes wait for each other.

    Raises:
        Exception: as `together`.
    """
    if mesh.plan.processes == 1:
        return do()
    return Aside(mesh, lambda: do() if mesh.writes else None).wait()[0]  # pyright: ignore[reportReturnType]


def by_first(mesh: Mesh, do: Callable[[], T]) -> T:
    """What `do` gives in the process that writes, which alone does it, told to all.

    Raises:
        Exception: as `together`.
    """
    return together(mesh, lambda: do() if mesh.writes else None)[0]  # pyright: ignore[reportReturnType]
