"""How hard a row is: by its tokens, or by a number of the user's.

Source: length and rarity are Platanios et al. 2019, arXiv 1903.09848, section 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from afina.data.order import order
from afina.errors import DataError, counted
from afina.types import Row

SHOWN = 5
"""Rows named in an error."""


def tokens_of(row: Row, *, trained: bool) -> tuple[int, ...]:
    """All tokens of a row, or those that are labels; its first has nothing before it and is none."""
    if not trained:
        return row.tokens
    pairs = zip(row.tokens[1:], row.trained[1:], strict=True)
    return tuple(token for token, label in pairs if label)


def lengths(rows: Sequence[Row], *, trained: bool = False) -> list[float]:
    """The number of each row's tokens, or of its labels."""
    return [float(len(tokens_of(row, trained=trained))) for row in rows]


def rarities(rows: Sequence[Row], *, trained: bool = False) -> list[float]:
    """Minus the log-probability of each row's tokens as drawn one by one from all of these rows, in nats.

        d = -Σ log p(w),    p(w) = count of w / count of all

    A sum, as the paper has it: of rows of one kind the longer is harder.
    """
    each = [tokens_of(row, trained=trained) for row in rows]
    counts = Counter(token for tokens in each for token in tokens)
    total = sum(counts.values())
    bits = {token: math.log(total) - math.log(count) for token, count in counts.items()}
    return [math.fsum(bits[token] for token in tokens) for tokens in each]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The numbers in a column of the user's rows.

    Args:
        rows: whose `meta["columns"]` holds it, as reading with `keep` makes them.
        name: of the column.

    Raises:
        DataError: some rows have no number there; it names them.
    """
    values = [_number(row.meta.get("columns", {}).get(name)) for row in rows]
    bad = [row for row, value in zip(rows, values, strict=True) if value is None]
    if bad:
        got: Any = bad[0].meta.get("columns", {}).get(name)
        named = ", ".join(row.source or f"row {row.id}" for row in bad[:SHOWN])
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise DataError(
            f"{counted(len(bad), 'row')} of {len(rows)} have no number in the column {name!r}, which says how hard "
            "they are",
            got=f"{'nothing' if got is None else repr(got)[:40]} at {named}{more}",
            wanted="a finite number in every row",
            cure="fill that column, name another (techniques.curriculum.column), or order by length, rarity or loss "
            '(of rows made in Python: Row(meta={"columns": {NAME: 1.5}}))',
        )
    return [value for value in values if value is not None]


def _number(value: Any) -> float | None:
    """A finite number; a table's text may be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def ranked(values: Sequence[float], seed: int, *, hardest_first: bool = False) -> list[int]:
    """Places from the lowest value to the highest, or the reverse; equal ones in an order of chance."""
    # Python's sort keeps the order of equals, also when it is reversed.
    return sorted(by_chance(len(values), seed), key=values.__getitem__, reverse=hardest_first)


def by_chance(count: int, seed: int) -> list[int]:
    """So many places in an order of chance that is none of an epoch's."""
    return order(count, seed, -1)
