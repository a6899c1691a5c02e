"""The rows of the next step become tensors while this step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from afina.train.work import Work
from afina.types import Batch, Row


@dataclass(frozen=True)
class Part:
    """The rows of a micro-batch, and their tensors before anything changes them."""

    rows: Sequence[Row]
    batch: Batch


@dataclass(frozen=True)
class Window:
    """The rows of a step.

    Attributes:
        rows: of all processes.
        own: of this one.
        coming: its micro-batches.
    """

    rows: Sequence[Row]
    own: Sequence[Row]
    coming: Future[list[Part]]

    def parts(self) -> list[Part]:
        """Its micro-batches, as soon as they are there.

        Raises:
            What went wrong when they were made.
        """
        return self.coming.result()


def made(work: Work, rows: Sequence[Row]) -> list[Part]:
    """The micro-batches of some rows of a step."""
    return [Part(part, work.passes.batch(part)) for part in work.cut(rows)]


class Ahead:
    """Windows one after the other, each made by a thread of its own while whoever took the one before works with it.

    Which rows a window has is asked for in the caller's thread, for that may talk to other processes; and one window
    early, which changes nothing, for it depends on nothing but the number of the step. No random number is drawn.

    Args:
        work: what cuts the rows and makes tensors of them.
        windows: the rows of the first step, of the next, and so on.
        count: how many are going to be taken.
    """

    def __init__(self, work: Work, windows: Iterator[Sequence[Row]], count: int) -> None:
        self._work, self._windows, self._left = work, windows, count
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="afina-ahead")
        self._next: Window | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self) -> Window:
        """The next window; the one after it begins to be made."""
        here = self._next or self._begun(next(self._windows))
        self._left -= 1
        rows = next(self._windows, None) if self._left else None
        self._next = None if rows is None else self._begun(rows)
        return here

    def _begun(self, rows: Sequence[Row]) -> Window:
        own = self._work.mesh.share(list(rows))
        return Window(rows, own, self._thread.submit(made, self._work, own))
