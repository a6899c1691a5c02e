"""Which of six formats the rows have, decided over all of them, and their one common form.

No format is guessed from the first row: a format is accepted only if every row fits it, and otherwise the first row
that differs is named. Columns with other names are not guessed either (`question`/`answer` may be anything); the
error says what to type to map them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afina.data.convert import CHAT_COLUMNS, CONVERT, chat_column
from afina.data.example import Example
from afina.data.settings import DataSettings
from afina.data.sources import RawRow
from afina.errors import DataError, nearest

_EXTRA = ("system", "tools", "choices", "input", "history")

REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text_label": ("text", "label"),
    "text": ("text",),
}
"""Format -> the columns that make it, best first: a row that fits two formats has the first."""

_ALIKE: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "input", "instruction", "source", "user", "problem"),
    "completion": ("answer", "response", "output", "target", "chosen", "reply", "solution"),
    "text": ("content", "sentence", "document", "body", "message"),
    "label": ("class", "category", "intent", "target", "sentiment"),
}
"""Names seen in the wild, used only to word the cure."""


@dataclass(frozen=True)
class Format:
    """The format of a source, and why."""

    name: str
    why: str


def rename(rows: Sequence[RawRow], columns: Mapping[str, str]) -> list[RawRow]:
    """The rows with the columns the user mapped under our names.

    Raises:
        DataError: our name or the file's column does not exist.
    """
    if not columns:
        return list(rows)
    known = sorted({name for names in REQUIRED.values() for name in names} | set(_EXTRA))
    for ours in columns:
        if ours not in known:
            near = nearest(ours, known)
            raise DataError(
                f"data.columns: {ours!r} is no column that afina knows",
                wanted=", ".join(known),
                cure=f"did you mean {near[0]!r}?" if near else "write OURS: THEIRS",
            )
    renamed: list[RawRow] = []
    for row in rows:
        for ours, theirs in columns.items():
            if theirs not in row.columns:
                near = nearest(theirs, list(row.columns))
                raise DataError(
                    f"{row.source}: no column {theirs!r} (mapped to {ours!r} by data.columns)",
                    got=f"columns {list(row.columns)}",
                    cure=f"did you mean {near[0]!r}?" if near else None,
                )
        moved = set(columns.values())
        kept = {name: value for name, value in row.columns.items() if name not in moved}
        mapped = {ours: row.columns[theirs] for ours, theirs in columns.items()}
        renamed.append(RawRow(row.id, row.source, {**kept, **mapped}))
    return renamed


def fits(columns: Mapping[str, Any], mapped: Sequence[str] = ()) -> list[str]:
    """The formats one row fits, best first; with mapped columns only those made of one of them."""
    present = {name for name, value in columns.items() if value is not None}
    chat = chat_column(columns)
    found: list[str] = []
    if chat:
        turns = columns[chat]
        first = turns[0] if isinstance(turns, (list, tuple)) and turns else None
        old = isinstance(first, Mapping) and "from" in first
        found.append("sharegpt" if old else "messages")
    found += [
        name
        for name, needed in REQUIRED.items()
        if name not in ("messages", "sharegpt") and present.issuperset(needed)
    ]
    named = set(mapped) - set(_EXTRA)
    if named:
        found = [name for name in found if named.intersection((*REQUIRED[name], *CHAT_COLUMNS))]
    return found


def recognise(rows: Sequence[RawRow], settings: DataSettings) -> Format:
    """The one format that every row fits.

    Args:
        rows: all rows, columns renamed already.
        settings: `format` and `columns`.

    Raises:
        DataError: naming the first row that differs, its columns, and what to do.
    """
    if settings.format != "auto":
        return _stated(rows, settings.format)
    candidates: list[str] = []
    for row in rows:
        fitting = fits(row.columns, tuple(settings.columns))
        if row is rows[0]:
            candidates = fitting
            if not candidates:
                raise _unknown(row)
        still = [name for name in candidates if name in fitting]
        if not still:
            raise _mixed(rows[0], candidates[0], row, fitting)
        candidates = still
    name, *others = candidates
    needed = _columns_of(name, rows[0].columns)
    all_of = "the one row has" if len(rows) == 1 else f"all {len(rows)} rows have"
    why = f"{all_of} {' and '.join(needed)}"
    if others:
        why += f" (they would also fit {', '.join(others)})"
    return Format(name, why)


def _columns_of(name: str, columns: Mapping[str, Any]) -> tuple[str, ...]:
    if name in ("messages", "sharegpt"):
        return (chat_column(columns),)
    return REQUIRED[name]


def _stated(rows: Sequence[RawRow], name: str) -> Format:
    for row in rows:
        if name not in fits(row.columns):
            raise DataError(
                f"{row.source}: not a row of format {name}, which data.format states",
                got=_columns_and_empty(row),
                wanted=" and ".join(REQUIRED[name]),
                cure=_fill(row, [name])
                or _cure(row.columns)
                or "remove data.format to have it recognised",
            )
    return Format(name, "stated by data.format")


def _empty(row: RawRow) -> list[str]:
    return [name for name, value in row.columns.items() if value is None]


def _columns_and_empty(row: RawRow) -> str:
    empty = _empty(row)
    return f"columns {list(row.columns)}" + (f", of which empty {empty}" if empty else "")


def _fill(row: RawRow, formats: Sequence[str]) -> str | None:
    """The cure for a row that has all the columns of one of the formats, some of them empty."""
    for name in formats:
        empty = [column for column in REQUIRED[name] if column in _empty(row)]
        if empty and set(REQUIRED[name]).issubset(row.columns):
            return f"fill {' and '.join(empty)} in {row.source}, or remove that row"
    return None


def _mixed(first: RawRow, name: str, row: RawRow, fitting: list[str]) -> DataError:
    return DataError(
        f"{row.source}: this row is not like those before it",
        got=f"{_columns_and_empty(row)}: {' or '.join(fitting) or 'no known format'}",
        wanted=f"{name} ({' and '.join(_columns_of(name, first.columns))}), as {first.source} has",
        cure=_fill(row, [name]) or "give one format a file; or complete or remove that row",
    )


def _unknown(row: RawRow) -> DataError:
    formats = "; ".join(f"{name}: {' + '.join(cols)}" for name, cols in REQUIRED.items())
    return DataError(
        f"{row.source}: no known format",
        got=_columns_and_empty(row),
        wanted=formats,
        cure=_fill(row, list(REQUIRED))
        or _cure(row.columns)
        or "map your columns: --set 'data.columns={prompt: YOURS, completion: YOURS}'",
    )


def _cure(columns: Mapping[str, Any]) -> str | None:
    """Up to three mappings worth trying, from the names and types of the columns."""
    lower = {name.lower(): name for name, value in columns.items() if value is not None}

    def alike(ours: str) -> list[str]:
        named = (ours, *_ALIKE[ours])
        return [lower[name] for name in named if name in lower]

    tries: list[str] = []
    for left, right in (("prompt", "completion"), ("text", "label")):
        pairs = [(a, b) for a in alike(left) for b in alike(right) if a != b]
        tries += [_mapping({left: a, right: b}) for a, b in pairs[:1]]
    tries += [_mapping({"text": name}) for name in alike("text")[:1] if name != "text"]
    long = [name for name, value in columns.items() if isinstance(value, str)]
    if not tries and len(long) == 2:
        tries.append(_mapping({"prompt": long[0], "completion": long[1]}))
    if not tries and len(long) == 1:
        tries.append(_mapping({"text": long[0]}))
    return " or ".join(f"--set 'data.columns={one}'" for one in tries[:3]) or None


def _mapping(columns: Mapping[str, str]) -> str:
    """The mapping as `data.columns` takes it; a column that has our name already needs no entry."""
    return (
        "{"
        + ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items() if ours != theirs)
        + "}"
    )


def convert(rows: Sequence[RawRow], format: Format) -> list[Example]:
    """The rows in their common form.

    Raises:
        DataError: a value has the wrong type; the row and column are named.
    """
    make = CONVERT[format.name]
    return [make(row) for row in rows]
