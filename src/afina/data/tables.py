"""Readers of tables: separated values and Parquet. They yield as `afina.data.readers` says."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afina.data.decoding import text_of, what_is
from afina.errors import DataError, counted

Rows = Iterator[tuple[int, dict[str, Any] | DataError]]

SEPARATORS = ",;\t|"


def read_csv(path: Path) -> Rows:
    """Rows of separated fields under a header; quoted fields may hold line ends.

    The separator is a tab for .tsv, else whichever of `,` `;` `|` and tab the header has most of.

    Raises:
        DataError: no header, a name twice in it, or a quote that never closes.
    """
    text = text_of(path)
    first, _, rest = text.partition("\n")
    said = re.fullmatch(r"sep=([^\w\s\"]|\t)\r?", first, re.IGNORECASE)
    if said:  # as Excel writes it, before the header
        text = "\n" + rest  # the line stays, so that lines keep their numbers
    header = text.lstrip("\r\n").partition("\n")[0]
    if said:
        separator = said[1]
    else:
        separator = "\t" if ".tsv" in path.suffixes else max(SEPARATORS, key=header.count)
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield from _rows(path, text, header.split(separator), separator)
    finally:
        csv.field_size_limit(limit)


def _rows(path: Path, text: str, names: list[str], separator: str) -> Rows:
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        strict=True,
        # A space after each separator of the header is how the whole file is written.
        skipinitialspace=len(names) > 1 and all(name.startswith(" ") for name in names[1:]),
    )
    header = _header(path, text, reader)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            broken = _broken(path, text, line, reader.line_num, error)
            if "unexpected end" in str(error):
                raise broken from error  # the rows after the quote cannot be told from it
            yield line, broken
            continue
        if fields is None:
            return
        if fields:
            yield line, _row(path, line, header, fields, separator)


def _header(path: Path, text: str, reader: Any) -> list[str]:
    try:
        header = next((fields for fields in reader if fields), None)
    except csv.Error as error:
        raise _broken(path, text, 1, reader.line_num, error) from error
    if not header or not any(name.strip() for name in header):
        raise DataError(f"{path}: empty", wanted="a header line with the column names")
    header = [name.strip() for name in header]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}:{reader.line_num}: a column name occurs twice",
            got=f"{', '.join(map(repr, twice))} in {header}",
            wanted="each name once; of two columns, one would be lost",
            cure="rename one of them",
        )
    return header


def _row(
    path: Path, line: int, header: list[str], fields: list[str], separator: str
) -> dict[str, Any] | DataError:
    if len(fields) != len(header):
        return DataError(
            f"{path}:{line}: {counted(len(fields), 'field')} under a header of {len(header)}",
            got=[field[:30] for field in fields[:8]],
            wanted=f"{header} separated by {separator!r}",
            cure="quote a field that contains the separator or a line end",
        )
    if any("\0" in field for field in fields):
        return DataError(
            f"{path}:{line}: NUL bytes in a field",
            got=[field[:30] for field in fields[:8]],
            cure="remove them, or that row",
        )
    return dict(zip(header, fields, strict=True))


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
    """Apache Parquet; the "line" is the row's number.

    Raises:
        DataError: the file is damaged or something else, has a column name twice, or a value Python has no form for.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # One file, and not a data set of pyarrow's, which takes more columns from folders named x=1.
        with pyarrow.parquet.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            twice = sorted({name for name in names if names.count(name) > 1})
            rows = [] if twice else file.read().to_pylist()
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _no_parquet(path, error) from error
    if twice:
        raise DataError(
            f"{path}: a column name occurs twice",
            got=", ".join(map(repr, twice)),
            wanted="each name once; of two columns, one would be lost",
        )
    yield from enumerate(rows, start=1)


def _no_parquet(path: Path, error: Exception) -> DataError:
    try:
        with path.open("rb") as file:
            raw = file.read(4096)
    except OSError:
        raw = b""
    if not raw:
        return DataError(f"{path}: the file is empty", wanted="a Parquet file")
    cut = raw.startswith(b"PAR1")
    found = None if cut else what_is(path, raw)
    return DataError(
        f"{path}: not a readable Parquet file",
        got=f"{f'this is {found[0]}; ' if found else ''}{error}",
        wanted="a whole Parquet file",
        cure="it begins as Parquet does, and is cut short or damaged: write or download it again"
        if cut
        else (found[1] if found else "rename the file after what it holds"),
    )
