r"""One reader a file type. Each yields (place, columns); a place is the true line number, counted from 1.

A row that cannot be read is yielded too, as the error that says why, so that a file is read to its end and all its bad
rows are told at once; what spoils a whole file is raised.

The text types go through the standard library, so that reading them imports nothing heavy and a broken row is
named by its own line. Lines end at "\n" alone (with an optional "\r" before it): `str.splitlines` would also cut
a row at U+2028 or U+0085, which JSON allows inside a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from afina.data.decoding import text_of, what_is
from afina.data.tables import read_csv, read_parquet
from afina.errors import DataError

Rows = Iterator[tuple[int | str, dict[str, Any] | DataError]]
"""Rows, or what is wrong with them, each with its place in the file."""


class _Twice(ValueError):
    """A key of an object occurs twice: JSON keeps the last and says nothing."""


def _missing(name: str) -> None:
    """NaN and the infinities, which other programs write for a value they do not have: nothing."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return made


_DECODER = json.JSONDecoder(parse_constant=_missing, object_pairs_hook=_once)
_SPACE = " \t\r\n"


def _decoded(path: Path, line: int, text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value at a place of the text, and where it ends.

    Raises:
        DataError: it is JSON, and cannot be used.
        json.JSONDecodeError: it is not JSON.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except _Twice as error:
        raise DataError(
            f"{path}:{line}: a key occurs twice in one object",
            got=repr(str(error)),
            wanted="each key once; of two, one value would be lost",
            cure="rename or remove one of them",
        ) from error
    except RecursionError as error:
        raise DataError(
            f"{path}:{line}: nested too deeply", got="brackets within brackets without end"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(
            f"{path}:{line}: a number cannot be read", got=error, cure="write it as a text"
        ) from error


def read_jsonl(path: Path) -> Rows:
    """JSON Lines: one object a line; blank lines are skipped."""
    return _jsonl_rows(path, text_of(path))


def _jsonl_rows(path: Path, text: str) -> Rows:
    pieces = text.split("\n")
    for line, piece in enumerate(pieces, start=1):
        piece = piece.strip(_SPACE + "\ufeff")  # a mark between two files that were joined
        if piece:
            yield line, _line(path, line, piece, last=line == len(pieces))


def _line(path: Path, line: int, piece: str, last: bool) -> dict[str, Any] | DataError:
    """The object on one line; `last` is of a line that no line end follows."""
    try:
        value, end = _decoded(path, line, piece)
        if end < len(piece):
            raise json.JSONDecodeError("something follows the object", piece, end)
        return _object(path, line, value)
    except json.JSONDecodeError as error:
        return DataError(
            f"{path}:{line}: not a line of JSON",
            got=f"{piece[:80]!r} ({_said(error)} at column {error.colno})",
            wanted="one whole JSON object a line",
            cure=_cure_of_line(path, line, piece, last),
        )
    except DataError as error:
        return error


def _said(error: json.JSONDecodeError) -> str:
    """What Python's reader says, without the preposition or colon that a place would follow."""
    return error.msg.rstrip(": ").removesuffix(" at")


def _cure_of_line(path: Path, line: int, piece: str, last: bool) -> str:
    if line == 1 and piece in ("{", "["):
        return f"the file looks like one JSON document: name it {path.with_suffix('.json').name}"
    if last and line > 1:
        return "the last line has no end, as when writing was interrupted: complete or remove it"
    if piece.startswith("[{"):
        return f"the file looks like a JSON list: name it {path.with_suffix('.json').name}"
    if piece.startswith("{'"):
        return "this is Python's way of writing, not JSON: write rows with json.dumps"
    if path.suffix.lower() in (".jsonl", ".ndjson") and line == 1 and piece.count(",") > 1:
        return (
            f"if the file is CSV, name it {path.with_suffix('.csv').name}; else correct that line"
        )
    return "correct or remove that line"


def _object(path: Path, place: int | str, value: Any) -> dict[str, Any]:
    """The columns of a row; a string alone is a text, as a line of a .txt file is."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise DataError(
            f"{path}:{place}: a row must be an object of columns",
            got=f"{type(value).__name__} {json.dumps(value)[:60]}",
            wanted='{"prompt": …, "completion": …} or another known format',
            cure=f"a whole list on one line? name the file {path.with_suffix('.json').name}"
            if isinstance(value, list) and path.suffix.lower() in (".jsonl", ".ndjson")
            else "make it an object, or remove it",
        )
    return value


def read_json(path: Path) -> Rows:
    """A JSON document: a list of objects, an object holding one such list, or (mislabelled) JSON Lines.

    Raises:
        DataError: the document is broken, or holds no list of objects.
    """
    text = text_of(path)
    start = _skip(text, 0)
    if start == len(text):
        return
    try:
        if text[start : start + 1] == "[":
            yield from _items(path, text, start, alone=True)
            return
        value, end = _decoded(path, 1, text, start)
        if _skip(text, end) < len(text):  # a second document follows: JSON Lines under a .json name
            yield from _jsonl_rows(path, text)
            return
        if not isinstance(value, dict):
            raise json.JSONDecodeError("neither a list nor an object", text, start)
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if len(lists) != 1:
            raise DataError(
                f"{path}: no single list of rows in the JSON object",
                got=f"keys {list(value)[:10]}, of which lists: {lists}",
                wanted="a list of objects, or an object with exactly one list",
                cure="write one JSON object a line to a .jsonl file",
            )
        yield from _items(path, text, _value_of(path, text, start, lists[0]))
    except json.JSONDecodeError as error:
        raise _not_json(path, text, error) from error


def _not_json(path: Path, text: str, error: json.JSONDecodeError) -> DataError:
    line = text.count("\n", 0, error.pos) + 1
    before, rest = text[: error.pos].rstrip(_SPACE), text[error.pos :].lstrip(_SPACE)
    if before.endswith(",") and rest[:1] in ("]", "}"):
        line = before.count("\n") + 1
        got, cure = f"a comma before {rest[0]!r}", f"remove the last comma of line {line}"
    elif not rest or error.msg.startswith("Unterminated"):
        got, cure = (
            error,
            "the file is cut short, as when writing was interrupted, or a closing quote or bracket is missing",
        )
    else:
        got, cure = error, "correct that line, or write one JSON object a line to a .jsonl file"
    return DataError(
        f"{path}:{line}: not valid JSON",
        got=got,
        wanted="[{…}, {…}], or an object that holds one such list",
        cure=cure,
    )


def _skip(text: str, at: int, also: str = "") -> int:
    while at < len(text) and text[at] in _SPACE + also:
        at += 1
    return at


def _value_of(path: Path, text: str, start: int, wanted: str) -> int:
    """Where the value of key `wanted` begins, in the object that begins at `start`."""
    at = _skip(text, start + 1)
    while True:
        key, at = _decoded(path, 1, text, at)
        at = _skip(text, at, ":")
        if key == wanted:
            return at
        _, at = _decoded(path, 1, text, at)
        at = _skip(text, at, ",")


def _items(path: Path, text: str, start: int, alone: bool = False) -> Rows:
    """The objects of the list that begins at `start`, each with the line it begins on.

    Where several begin on one line, as in a document that is one line, the place is "line[item]", counted from 0 in
    the list, as programs that read JSON do.

    With `alone`, anything after the list is an error, so that no row is lost in silence.
    """
    at = _skip(text, start + 1)
    line, item, beside = 1 + text.count("\n", 0, at), 0, False
    while text[at : at + 1] != "]":
        value, end = _decoded(path, line, text, at)
        following = _following(text, end)
        lines = text.count("\n", at, following)
        more = not lines and text[following] != "]"
        place: int | str = f"{line}[{item}]" if beside or more else line
        try:
            yield place, _object(path, place, value)
        except DataError as error:
            yield place, error
        at, line, item, beside = following, line + lines, item + 1, more
    if alone and (rest := _skip(text, at + 1)) < len(text):
        raise json.JSONDecodeError("something follows the list of rows", text, rest)


def _following(text: str, at: int) -> int:
    """Where the next object of a list begins, or the bracket that ends it; `at` is the end of the one before."""
    at = _skip(text, at)
    if text[at : at + 1] == ",":
        at = _skip(text, at + 1)
        if text[at : at + 1] == "]":
            raise json.JSONDecodeError("a comma before the end of the list", text, at)
    elif text[at : at + 1] != "]":
        raise json.JSONDecodeError("expected ',' or ']'", text, at)
    return at


def read_lines(path: Path) -> Rows:
    """Plain text, each line that is not blank a row with the one column `text`."""
    for line, piece in enumerate(text_of(path).split("\n"), start=1):
        if piece.strip():
            yield line, _text(path, line, piece.rstrip("\r"))


def read_paragraphs(path: Path) -> Rows:
    """Plain text, each run of lines between blank lines a row with the one column `text`."""
    begin, kept = 0, []
    for line, piece in enumerate([*text_of(path).split("\n"), ""], start=1):
        if piece.strip():
            begin = begin or line
            kept.append(piece.rstrip("\r"))
        elif kept:
            yield begin, _text(path, begin, "\n".join(kept))
            begin, kept = 0, []


def _text(path: Path, line: int, text: str) -> dict[str, Any] | DataError:
    if "\0" in text:
        return DataError(
            f"{path}:{line}: NUL bytes in a text",
            got=repr(text[max(0, text.index("\0") - 20) :][:60]),
            cure="remove them, or that line",
        )
    return {"text": text}


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_lines,
}
"""By suffix, also before a final .gz (Parquet compresses itself)."""


def kind(path: Path) -> str | None:
    """The known suffix of a file name, or None."""
    suffixes = path.suffixes
    last = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else path.suffix
    return last.lower() if last.lower() in READERS else None


def read_file(path: Path, *, paragraphs: bool = False) -> Rows:
    """The rows of a file, by the reader that its name asks for.

    Args:
        path: of the file.
        paragraphs: of a .txt, a run of lines is a row, and not a line.

    Raises:
        DataError: no reader is for such a name; it says what the file looks like.
    """
    suffix = kind(path)
    if suffix is None:
        raise _unknown_kind(path)
    return read_paragraphs(path) if suffix == ".txt" and paragraphs else READERS[suffix](path)


def _unknown_kind(path: Path) -> DataError:
    try:
        with path.open("rb") as file:
            found = what_is(path, file.read(4096))
    except OSError:
        found = None
    return DataError(
        f"{path}: unknown kind of file",
        got=f"suffix {path.suffix!r}" + (f", and it holds {found[0]}" if found else ""),
        wanted=", ".join(READERS) + " (the text kinds also with .gz)",
        cure=found[1] if found else "rename the file after what it holds",
    )
