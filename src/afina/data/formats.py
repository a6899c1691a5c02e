"""Which of seven formats the rows have, decided over all of them, and their one common form.

No format is guessed from the first row: a format is accepted only if every row fits it, and otherwise the first row
that differs is named. Columns with other names are not guessed either (`question`/`answer` may be anything); the
error says what to type to map them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afina.data.badrows import BadRows, gathering
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
    "tokens_tags": ("tokens", "tags"),
    "text": ("text",),
}
"""Format -> the columns that make it, best first: a row that fits two formats has the first."""

_ALIKE: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "input", "instruction", "source", "user", "problem"),
    "completion": ("answer", "response", "output", "target", "chosen", "reply", "solution"),
    "text": ("content", "sentence", "document", "body", "message"),
    "label": ("class", "category", "intent", "target", "sentiment"),
    "tokens": ("words",),
    "tags": ("ner_tags", "pos_tags", "labels"),
}
"""Names seen in the wild, used only to word the cure."""


@dataclass(frozen=True)
class Format:
    """The format of a source, and why."""

    name: str
    why: str


def rename(
    rows: Sequence[RawRow], columns: Mapping[str, str], bad: BadRows | None = None
) -> list[RawRow]:
    """The rows with the columns the user mapped under our names.

    Args:
        rows: as read.
        columns: our name -> the file's.
        bad: gathers the rows that lack one of the file's columns; None raises them.

    Raises:
        DataError: our name does not exist.
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
    with gathering(bad, "data") as refused:
        return [
            renamed
            for _, renamed in refused.good(
                rows, lambda row: _renamed(row, columns), lambda row: row.source
            )
        ]


def _renamed(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    for ours, theirs in columns.items():
        if theirs not in row.columns:
            near = nearest(theirs, list(row.columns))
            raise DataError(
                f"{row.source}: no column {theirs!r} (mapped to {ours!r} by data.columns)",
                got=f"columns {list(row.columns)}",
                wanted=repr(theirs),
                cure=f"did you mean {near[0]!r}?" if near else "name one of the file's columns",
            )
    moved = set(columns.values())
    kept = {name: value for name, value in row.columns.items() if name not in moved}
    mapped = {ours: row.columns[theirs] for ours, theirs in columns.items()}
    return RawRow(row.id, row.source, {**kept, **mapped})


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


def recognise(
    rows: Sequence[RawRow], settings: DataSettings, bad: BadRows | None = None
) -> tuple[Format, list[RawRow]]:
    """The one format of the rows, and the rows that fit it.

    It is the format that all rows fit, or else the one that most do.

    Args:
        rows: all rows, at least one, columns renamed already.
        settings: `format` and `columns`.
        bad: gathers the rows that do not fit; None raises them.

    Raises:
        DataError: no row has a known format; it says the columns, and what to do.
    """
    fitting = [fits(row.columns, tuple(settings.columns)) for row in rows]
    if settings.format == "auto":
        name = _most(rows, fitting, settings.columns)
    else:
        name, fitting = settings.format, [fits(row.columns) for row in rows]
    first = next((row for row, names in zip(rows, fitting, strict=True) if name in names), None)
    kept: list[RawRow] = []
    with gathering(bad, "data") as refused:
        for row, names in zip(rows, fitting, strict=True):
            if name in names:
                kept.append(row)
            elif settings.format != "auto" or first is None:
                refused.add(row.source, _not_as_stated(row, name, first, settings.columns))
            else:
                refused.add(row.source, _mixed(first, name, row, names))
    if settings.format != "auto":
        return Format(name, "stated by data.format"), kept
    others = [
        each
        for each in fitting[rows.index(kept[0])]
        if each != name and all(each in names for names in fitting)
    ]
    return Format(name, _why(name, kept, len(rows), others)), kept


def _most(
    rows: Sequence[RawRow], fitting: Sequence[Sequence[str]], mapped: Mapping[str, str]
) -> str:
    """The format that most rows fit; of equals the better one, then the first met."""
    counts = Counter(name for names in fitting for name in names)
    if not counts:
        raise _unknown(rows[0], mapped)
    best = max(counts.values())
    return next(name for names in fitting for name in names if counts[name] == best)


def _why(name: str, kept: Sequence[RawRow], total: int, others: Sequence[str]) -> str:
    if total == 1:
        all_of = "the one row has"
    elif len(kept) == total:
        all_of = f"all {total} rows have"
    else:
        all_of = f"{len(kept)} of {total} rows {'has' if len(kept) == 1 else 'have'}"
    why = f"{all_of} {' and '.join(_columns_of(name, kept[0].columns))}"
    return f"{why} (they would also fit {', '.join(others)})" if others else why


def _columns_of(name: str, columns: Mapping[str, Any]) -> tuple[str, ...]:
    if name in ("messages", "sharegpt"):
        return (chat_column(columns),)
    return REQUIRED[name]


def _not_as_stated(
    row: RawRow, name: str, first: RawRow | None, mapped: Mapping[str, str]
) -> DataError:
    """The error of a row that does not fit `data.format`; `first` is one that does, if any."""
    if first is not None:
        cure = f"complete that row as {first.source} is, or remove it"
    else:
        others = fits(row.columns)
        stated = f"data.format={others[0]}, or leave data.format out" if others else None
        cure = _cure(row.columns, mapped, name) or stated or "leave data.format out"
    return DataError(
        f"{row.source}: not a row of format {name}, which data.format states",
        got=_columns_and_empty(row),
        wanted=" and ".join(REQUIRED[name]),
        cure=_fill(row, [name]) or cure,
    )


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
        f"{row.source}: this row is not like the others",
        got=f"{_columns_and_empty(row)}: {' or '.join(fitting) or 'no known format'}",
        wanted=f"{name} ({' and '.join(_columns_of(name, first.columns))}), as {first.source} has",
        cure=_fill(row, [name]) or "give one format a file; or complete or remove that row",
    )


def _unknown(row: RawRow, mapped: Mapping[str, str]) -> DataError:
    formats = "; ".join(f"{name}: {' + '.join(cols)}" for name, cols in REQUIRED.items())
    return DataError(
        f"{row.source}: no known format",
        got=_columns_and_empty(row),
        wanted=formats,
        cure=_fill(row, list(REQUIRED))
        or _cure(row.columns, mapped)
        or "map your columns: --set 'data.columns={prompt: YOURS, completion: YOURS}'",
    )


_JOINED = re.compile(r"\w+([^\w\s.-])\w")
"""Two names in one, with a sign between them."""


def _cure(
    columns: Mapping[str, Any], mapped: Mapping[str, str], stated: str | None = None
) -> str | None:
    """Up to three mappings worth trying, from the names and types of the columns.

    Args:
        columns: of a row, renamed as `mapped` says.
        mapped: our name -> the file's, as given already.
        stated: the one format that they may make; None is any.
    """
    (only, *more) = columns or [""]
    joined = None if more else _JOINED.match(only)
    if joined:
        return (
            f"is {joined[1]!r} what separates the columns? Use a comma, a semicolon, a bar or a tab"
        )
    tries = [
        one
        for one in _guesses(columns)
        if stated is None or sorted(one) == sorted(REQUIRED[stated])
    ]
    said = [_mapping(one, mapped) for one in tries[:3]]
    return " or ".join(dict.fromkeys(one for one in said if one)) or None


def _guesses(columns: Mapping[str, Any]) -> list[dict[str, str]]:
    """Our name -> the column it may be."""
    lower = {name.lower(): name for name, value in columns.items() if value is not None}

    def alike(ours: str) -> list[str]:
        named = (ours, *_ALIKE[ours])
        return [lower[name] for name in named if name in lower]

    tries: list[dict[str, str]] = []
    for left, right in (("prompt", "completion"), ("text", "label"), ("tokens", "tags")):
        pairs = [(a, b) for a in alike(left) for b in alike(right) if a != b]
        tries += [{left: a, right: b} for a, b in pairs[:1]]
    tries += [{"text": name} for name in alike("text")[:1] if name != "text"]
    long = [name for name, value in columns.items() if isinstance(value, str)]
    if not tries and len(long) == 2:
        tries.append({"prompt": long[0], "completion": long[1]})
    if not tries and len(long) == 1:
        tries.append({"text": long[0]})
    return tries


def _mapping(columns: Mapping[str, str], mapped: Mapping[str, str]) -> str:
    """What to type for a mapping; a column that has our name in the file already needs no entry."""
    theirs = {ours: mapped.get(name, name) for ours, name in columns.items()}
    pairs = [f"{ours}: {name}" for ours, name in theirs.items() if ours != name]
    if pairs:
        return f"--set 'data.columns={{{', '.join(pairs)}}}'"
    return "leave data.columns out" if mapped else ""


def convert(rows: Sequence[RawRow], format: Format, bad: BadRows | None = None) -> list[Example]:
    """The rows in their common form.

    Args:
        rows: that fit the format.
        format: as `recognise` says.
        bad: gathers the rows with a value of a wrong type, row and column named; None raises them.
    """
    with gathering(bad, "data") as refused:
        made = refused.good(rows, CONVERT[format.name], lambda row: row.source)
        return [example for _, example in made]
