"""Rows that cannot be used: gathered while a source is read, so that all of them are said at once, or skipped.

Nothing is dropped in silence: `data.on_bad_row=error` stops with the first of each kind and how many there are;
`skip` goes on without them, and the report counts and lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from afina.errors import DataError, counted

SHOWN = 5
"""Kinds of fault in an error, and rows in a report."""

SKIP = "drop such rows, counted and listed: --on-bad-row skip (data.on_bad_row=skip)"

T = TypeVar("T")
Made = TypeVar("Made")


@dataclass
class BadRows:
    """The rows of one source that cannot be used, in the order they were found.

    Attributes:
        found: the place of each row, and its kind of fault.
        first: the fault of the first row of each kind; the others say the same, and a file may have millions.
        shown: the faults of the first rows.
    """

    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    first: dict[str, DataError] = field(default_factory=dict[str, DataError])
    shown: list[DataError] = field(default_factory=list[DataError])

    def __len__(self) -> int:
        return len(self.found)

    def add(self, place: str, error: DataError) -> None:
        """Keeps one row's fault; `place` is its "file:line"."""
        kind = error.what.removeprefix(f"{place}: ")
        self.first.setdefault(kind, error)
        self.found.append((place, sys.intern(kind)))
        if len(self.shown) < SHOWN:
            self.shown.append(error)

    def good(
        self, items: Iterable[T], make: Callable[[T], Made], place: Callable[[T], str]
    ) -> list[tuple[T, Made]]:
        """What `make` gives for each item that it does not refuse, beside the item."""
        made: list[tuple[T, Made]] = []
        for item in items:
            try:
                made.append((item, make(item)))
            except DataError as error:
                self.add(place(item), error)
        return made

    def refuse(self, source: str, of: int, *, offer: str | None = SKIP) -> None:
        """Raises what was found, if anything.

        Args:
            source: the name of what was read.
            of: rows read.
            offer: another way out than correcting them, where some rows are good; None where there is none.

        Raises:
            DataError: the one fault; or the first of each kind, with how many rows have it.
        """
        offer = offer if len(self.found) < of else None
        if len(self.found) == 1:
            error = self.shown[0]
            cure = "; or ".join(way for way in (error.cure, offer) if way) or None
            raise DataError(error.what, got=error.got, wanted=error.wanted, cure=cure)
        if self.found:
            raise DataError(
                f"{source}: {len(self.found)} of {counted(of, 'row')} cannot be used\n{self._kinds()}",
                cure="; or ".join(way for way in ("correct them", offer) if way),
            )

    def _kinds(self) -> str:
        """The first row of each kind of fault, and where the others are."""
        places: dict[str, list[str]] = {}
        for place, kind in self.found:
            places.setdefault(kind, []).append(place)
        shown = list(places.items())[:SHOWN]
        parts = []
        for kind, (_, *others) in shown:
            also = f"\n(also {_places(others)})" if others else ""
            parts.append("  - " + f"{self.first[kind]}{also}".replace("\n", "\n    "))
        left = len(self.found) - sum(len(rows) for _, rows in shown)
        if left:
            parts.append(f"  - and {counted(left, 'row')} with other faults")
        return "\n".join(parts)

    def lines(self) -> tuple[str, ...]:
        """The first few, on a line each, for the report."""
        return tuple(_short(error) for error in self.shown)


def _short(error: DataError) -> str:
    got = "" if error.got is None else f" ({' '.join(str(error.got).split())[:100]})"
    return f"{error.what}{got}"


def _places(places: Sequence[str]) -> str:
    shown = ", ".join(places[: SHOWN - 1])
    left = len(places) - (SHOWN - 1)
    return f"{shown} and {counted(left, 'more row')}" if left > 0 else shown


@contextmanager
def gathering(bad: BadRows | None, source: str) -> Iterator[BadRows]:
    """The caller's bad rows; or, for a caller that has none, new ones that are raised when the block ends."""
    if bad is not None:
        yield bad
        return
    own = BadRows()
    yield own
    own.refuse(source, len(own), offer=None)
