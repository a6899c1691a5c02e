"""What is in an adapter, in words: facts, a table of its places, and what is strange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from afina.adapters.inspection import Inspection
from afina.adapters.inspection_rows import Row


def lines(found: Inspection, most: int | None = None) -> list[str]:
    """What is there, for people: facts, then a table of the places, then what is strange."""
    said = [f"{found.folder}: {found.method}"]
    said += [f"  {k}: {_short(v)}" for k, v in found.facts.items() if v not in (None, {}, [])]
    for part in found.parts:
        said += ["", *lines(part, most)]
    if found.rows:
        said += ["", *_table(found.rows[:most])]
        if most is not None and len(found.rows) > most:
            said.append(f"  … and {len(found.rows) - most} more")
    if found.strange:
        said += ["", f"STRANGE: {len(found.strange)}", *(f"  {one}" for one in found.strange)]
    return said


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} ({n})" for k, n in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("place", "shape", "rank", "scale", "norm", "largest", "effective rank", "numbers")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    shape = "-" if row.shape is None else " x ".join(map(str, row.shape))
    return (
        row.name,
        shape,
        number(row.rank, "d"),
        number(row.scale, ".4g"),
        number(row.norm, ".4g"),
        number(row.spectral, ".4g"),
        number(row.effective, ".2f"),
        f"{row.parameters:,}",
    )
