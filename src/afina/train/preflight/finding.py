"""What a point of the pre-flight looks at, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from afina.config import TrainSettings
from afina.errors import AfinaError
from afina.types import Row

Status = Literal["ok", "note", "warning", "error", "skipped"]
"""ok; worth knowing; probably a mistake; a run would fail or be worthless; not looked at."""

NAMED = 3
"""How many rows a finding names."""


@dataclass(frozen=True)
class Finding:
    """What was seen at one point.

    Attributes:
        name: of the point.
        status: see `Status`.
        seen: what was found, in one line.
        cure: what to do about it; "" where nothing need be done.
        details: further lines.
        values: the numbers behind it, for other programs.
    """

    name: str
    status: Status
    seen: str
    cure: str = ""
    details: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Subject:
    """What the cheap points look at.

    Attributes:
        rows: that train.
        val_rows: that score.
        tokenizer: None where rows were prepared elsewhere and nothing is known of their texts.
        stops: tokens that end an answer when afina generates.
        named_stops: those of them that the model's own generation settings name.
        context: tokens that the model can read; None is not known.
        limit: tokens at which rows were cut, if any was.
        settings: of the training.
        given: the rows were prepared by the caller, who chose their labels.
    """

    rows: Sequence[Row]
    val_rows: Sequence[Row]
    tokenizer: Any
    stops: Sequence[int]
    named_stops: Sequence[int]
    context: int | None
    limit: int | None
    settings: TrainSettings
    given: bool = False


def of_error(name: str, error: AfinaError) -> Finding:
    """An error met at a point, as its finding."""
    what, *more = str(AfinaError(error.what, got=error.got, wanted=error.wanted)).splitlines()
    return Finding(name, "error", what, error.cure or "", tuple(line.strip() for line in more))


def skipped(name: str, why: str) -> Finding:
    """A point that was not looked at."""
    return Finding(name, "skipped", why)


def place(row: Row) -> str:
    """Where a row came from."""
    return row.source or f"row {row.id}"


def places(rows: Sequence[Row]) -> str:
    """Where the first of some rows came from."""
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return ", ".join(place(row) for row in rows[:NAMED]) + more
