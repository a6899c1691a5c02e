r"""One reader a file type. Each yields (line, columns) with the true line number, counted from 1.

The text types go through the standard library, so that reading them imports nothing heavy and a broken row is
named by its own line. Lines end at "\n" alone (with an optional "\r" before it): `str.splitlines` would also cut
a row at U+2028 or U+0085, which JSON allows inside a string.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from afina.errors import DataError, counted

Rows = Iterator[tuple[int, dict[str, Any]]]


def _missing(name: str) -> None:
    """NaN and the infinities, which other programs write for a value they do not have: nothing."""


_DECODER = json.JSONDecoder(parse_constant=_missing)
_SPACE = " \t\r\n"


def text_of(path: Path) -> str:
    """The file as text, gunzipped when named .gz: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read", got=getattr(error, "strerror", None) or error
        ) from error
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}:{line}: not {encoding.removesuffix('-sig').upper()}",
            got=f"byte 0x{raw[error.start]:02x} at offset {error.start}",
            wanted="UTF-8 text",
            cure=f"iconv -f WINDOWS-1252 -t UTF-8 {path} > fixed{path.suffix}",
        ) from error


def read_jsonl(path: Path) -> Rows:
    """JSON Lines: one object a line; blank lines are skipped.

    Raises:
        DataError: a line is not JSON, or not an object.
    """
    return _jsonl_rows(path, text_of(path))


def _jsonl_rows(path: Path, text: str) -> Rows:
    for line, piece in enumerate(text.split("\n"), start=1):
        piece = piece.strip(_SPACE)
        if not piece:
            continue
        try:
            value = json.loads(piece, parse_constant=_missing)
        except json.JSONDecodeError as error:
            whole = line == 1 and piece in ("{", "[")
            raise DataError(
                f"{path}:{line}: not a line of JSON",
                got=f"{piece[:80]!r} ({error.msg} at column {error.colno})",
                wanted="one whole JSON object a line",
                cure=f"the file looks like one JSON document: name it {path.with_suffix('.json').name}"
                if whole
                else "correct or remove that line",
            ) from error
        yield line, _object(path, line, value)


def _object(path: Path, line: int, value: Any) -> dict[str, Any]:
    """The columns of a row; a string alone is a text, as a line of a .txt file is."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise DataError(
            f"{path}:{line}: a row must be an object of columns",
            got=f"{type(value).__name__} {str(value)[:60]!r}",
            wanted='{"prompt": …, "completion": …} or another known format',
        )
    return value


def read_json(path: Path) -> Rows:
    """A JSON document: a list of objects, an object holding one such list, or (mislabelled) JSON Lines.

    Raises:
        DataError: the document is broken, or holds no list of objects.
    """
    text = text_of(path)
    start = _skip(text, 0)
    try:
        if text[start : start + 1] == "[":
            yield from _items(path, text, start, alone=True)
            return
        value, end = _DECODER.raw_decode(text, start)
        if _skip(text, end) < len(text):  # a second document follows: JSON Lines under a .json name
            yield from _jsonl_rows(path, text)
            return
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if len(lists) != 1:
            raise DataError(
                f"{path}: no single list of rows in the JSON object",
                got=f"keys {list(value)[:10]}, of which lists: {lists}",
                wanted="a list of objects, or an object with exactly one list",
                cure="write one JSON object a line to a .jsonl file",
            )
        yield from _items(path, text, _value_of(text, start, lists[0]))
    except (json.JSONDecodeError, AttributeError) as error:
        line = text.count("\n", 0, getattr(error, "pos", 0)) + 1
        raise DataError(f"{path}:{line}: not valid JSON", got=error) from error


def _skip(text: str, at: int, also: str = "") -> int:
    while at < len(text) and text[at] in _SPACE + also:
        at += 1
    return at


def _value_of(text: str, start: int, wanted: str) -> int:
    """Where the value of key `wanted` begins, in the object that begins at `start`."""
    at = _skip(text, start + 1)
    while True:
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at, ":")
        if key == wanted:
            return at
        _, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at, ",")


def _items(path: Path, text: str, start: int, alone: bool = False) -> Rows:
    """The objects of the list that begins at `start`, each with the line it begins on.

    With `alone`, anything after the list is an error, so that no row is lost in silence.
    """
    at = _skip(text, start + 1)
    line, seen = 1, 0
    while text[at : at + 1] != "]":
        line, seen = line + text.count("\n", seen, at), at
        value, at = _DECODER.raw_decode(text, at)
        yield line, _object(path, line, value)
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("expected ',' or ']'", text, at)
    if alone and (rest := _skip(text, at + 1)) < len(text):
        raise json.JSONDecodeError("something follows the list of rows", text, rest)


def read_csv(path: Path) -> Rows:
    """Comma-, semicolon- or tab-separated rows under a header; quoted fields may hold line ends.

    The separator is a tab for .tsv, else whichever of `,` `;` and tab the header has most of.

    Raises:
        DataError: no header, a name twice in it, or a row with another number of fields.
    """
    text = text_of(path)
    first = text.split("\n", 1)[0]
    tab = ".tsv" in path.suffixes
    separator = "\t" if tab else max(",;\t", key=first.count)
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    line = 1
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = next(reader, None)
        if not header:
            raise DataError(f"{path}: empty", wanted="a header line with the column names")
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: a column name occurs twice", got=header)
        line = reader.line_num + 1
        for fields in reader:
            if fields:
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}:{line}: {counted(len(fields), 'field')} under a header of {len(header)}",
                        got=[field[:30] for field in fields[:8]],
                        wanted=f"{header} separated by {separator!r}",
                        cure="quote a field that contains the separator or a line end",
                    )
                yield line, dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise _broken(path, text, line, reader.line_num, error) from error
    finally:
        csv.field_size_limit(limit)


def _broken(path: Path, text: str, begin: int, line: int, error: csv.Error) -> DataError:
    """What csv found wrong in the row that begins on line `begin`; it noticed on `line`."""
    if "unexpected end" in str(error):
        shown = text.split("\n")[begin - 1].strip()
        return DataError(
            f"{path}:{begin}: a quote opens in this row and never closes",
            got=f"{shown[:80]!r} and everything after it",
            wanted='"…" around a field; a quote inside one written twice, as ""',
            cure="close the quote, or quote the whole field and double the quotes in it",
        )
    return DataError(
        f"{path}:{line}: broken CSV",
        got=error,
        wanted='"…" around a whole field; a quote inside one written twice, as ""',
        cure="correct that line",
    )


def read_parquet(path: Path) -> Rows:
    """Apache Parquet; the "line" is the row's number."""
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file", got=error) from error
    yield from enumerate(rows, start=1)


def read_lines(path: Path) -> Rows:
    """Plain text, each line that is not blank a row with the one column `text`."""
    for line, piece in enumerate(text_of(path).split("\n"), start=1):
        if piece.strip():
            yield line, {"text": piece.rstrip("\r")}


def read_paragraphs(path: Path) -> Rows:
    """Plain text, each run of lines between blank lines a row with the one column `text`."""
    begin, kept = 0, []
    for line, piece in enumerate([*text_of(path).split("\n"), ""], start=1):
        if piece.strip():
            begin = begin or line
            kept.append(piece.rstrip("\r"))
        elif kept:
            yield begin, {"text": "\n".join(kept)}
            begin, kept = 0, []


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
