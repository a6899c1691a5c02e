"""Holding rows out by a hash of their content, so that a duplicate never lies on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from afina.errors import DataError, counted
from afina.types import Row


def content_of(row: Row) -> str:
    """A digest of what the row says: of the data as given where `prepare` made the row, else of its tokens."""
    given = row.meta.get("digest")
    if isinstance(given, str):
        return given
    content = repr((row.tokens, row.trained, row.label))
    return hashlib.sha256(content.encode()).hexdigest()


def split(rows: Sequence[Row], fraction: float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), each in the given order.

    A row is held out if the hash of its content and the seed falls below the fraction. So its side depends on
    nothing but itself: not on order, other rows, machine or tokenizer; and rows added later move none. The held-out
    share is therefore the fraction only on average. If no row at all falls below, the content with the lowest hash is
    held out; if all do, the one with the highest stays.

    Args:
        rows: as `prepare` gives them.
        fraction: of 0 (nothing held out) to below 1.
        seed: changes which rows are held out.

    Raises:
        DataError: the fraction is out of range, or all rows have the same content.
    """
    if not 0.0 <= fraction < 1.0:
        raise DataError("val_fraction out of range", got=fraction, wanted="0 to below 1")
    if fraction == 0.0:
        return list(rows), []
    places = [_place(content_of(row), seed) for row in rows]
    if len(set(places)) < 2:
        raise DataError(
            "the data cannot be split: all rows have the same content",
            got=f"{counted(len(rows), 'row')}",
            wanted="at least two different rows",
            cure="data.val_fraction=0, or give validation rows with --val FILE",
        )
    lowest, highest = min(places), max(places)
    held = [(at < fraction or at == lowest) and at != highest for at in places]
    train = [row for row, out in zip(rows, held, strict=True) if not out]
    return train, [row for row, out in zip(rows, held, strict=True) if out]


def shared(train: Sequence[Row], val: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs (training row, validation row) with the same content: what would make a validation score too good."""
    first: dict[str, Row] = {}
    for row in train:
        first.setdefault(content_of(row), row)
    return [(first[at], row) for row in val if (at := content_of(row)) in first]


def _place(digest: str, seed: int) -> float:
    """A number in [0, 1) from the content and the seed (53 bits of a sha256)."""
    salted = hashlib.sha256(f"{seed}:{digest}".encode()).digest()
    return (int.from_bytes(salted[:8], "big") >> 11) / 2.0**53
