"""Where rows come from: files, folders, hub data sets, or a Python list. No registry.

Every row keeps its place ("calls.jsonl:17"), so that any later complaint can name it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from afina.data.badrows import BadRows, gathering
from afina.data.hubs import SPLITS, hub_rows, saved_rows
from afina.data.readers import READERS, kind, read_file
from afina.data.settings import DataSettings, Role
from afina.errors import DataError, counted, nearest
from afina.places import exists, local

Source = str | Path | Iterable[str | Path] | Iterable[Mapping[str, Any]]

_BESIDE_DATA = re.compile(r"(readme|licen[cs]e|sources?|notice|citation|changelog)\b", re.I)
"""Texts about a folder's data, not of it."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

DEEPEST = 64
"""Most levels of lists and objects in a column: far more than conversations have, far fewer than end Python's stack."""

_NESTS = (dict, list, tuple)  # tuples of classes of C are looked up faster than Mapping

Placed = Iterator[tuple[str, dict[str, Any] | DataError]]
"""Rows with their place, or what is wrong with them."""


@dataclass(frozen=True)
class RawRow:
    """A row as it was given: its place in the source (from 0), "file:line", and its columns."""

    id: int
    source: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class Read:
    """What was read, and what the user should know of how.

    Attributes:
        rows: those that could be read.
        name: of the source.
        total: rows, bad ones too.
        notes: for the report.
    """

    rows: list[RawRow]
    name: str
    total: int
    notes: tuple[str, ...] = ()


def read(
    source: Source, settings: DataSettings, role: Role = "train", bad: BadRows | None = None
) -> Read:
    """All rows of a source, in its order.

    Args:
        source: a path or hub id; or an iterable of paths; or an iterable of rows (mappings).
        settings: `split`, `subset`, `txt` and `max_rows` are used here.
        role: which split a folder or hub data set gives when `settings.split` is None.
        bad: gathers the rows that cannot be read; None raises them.

    Raises:
        DataError: nothing there, unreadable, or no rows.
    """
    notes: list[str] = []
    name, found = _found(source, settings, role, notes)
    rows: list[RawRow] = []
    total = 0
    with gathering(bad, name) as refused:
        for total, (at, columns) in enumerate(islice(found, settings.max_rows), start=1):
            if isinstance(columns, DataError):
                refused.add(at, columns)
            elif (fault := _unusable(at, columns)) is not None:
                refused.add(at, fault)
            else:
                plain = {key: _value(value) for key, value in columns.items()}
                rows.append(RawRow(total - 1, at, plain))
    if not total:
        raise DataError(
            f"{name}: no rows",
            got="nothing but blank lines, a header or an empty list",
            wanted="at least one row",
        )
    if settings.max_rows is not None and total == settings.max_rows:
        notes.append(
            f"only the first {f'{total} rows were' if total > 1 else 'row was'} read (data.max_rows)"
        )
    return Read(rows, name, total, tuple(notes))


def _found(
    source: Source, settings: DataSettings, role: Role, notes: list[str]
) -> tuple[str, Placed]:
    """The name of a source, and its rows to come."""
    if isinstance(source, (str, Path)):
        return str(source), _one(source, settings, role, notes)
    if isinstance(source, (Mapping, bytes)) or not isinstance(source, Iterable):
        raise DataError(
            "this is no source of rows",
            got=f"{type(source).__name__} {str(source)[:60]}",
            wanted="a path, a hub id, a list of paths, or a list of rows such as {'prompt': …, 'completion': …}",
            cure="put the one row in a list" if isinstance(source, Mapping) else None,
        )
    given = list(source)
    paths = [item for item in given if isinstance(item, (str, Path))]
    if len(paths) == len(given) and paths:
        name = ", ".join(map(str, paths))
        return name, (row for path in paths for row in _one(path, settings, role, notes))
    return "rows given in Python", _given(given)


def _unusable(place: str, columns: Mapping[Any, Any]) -> DataError | None:
    """What is wrong with a row that was read, whatever its format."""
    for name, value in columns.items():
        if not isinstance(name, str):
            return DataError(
                f"{place}: a column's name is no text", got=repr(name), wanted="a text"
            )
        fault = _structure(value) if isinstance(value, _NESTS) else None
        if fault:
            return DataError(
                f"{place}: column {name!r} is {fault}",
                wanted=f"lists and objects with keys of text, at most {DEEPEST} levels of them",
            )
    return None


def _structure(value: Any) -> str | None:
    """What is wrong with how a value is nested, if anything."""
    level = [(value, 1)]
    while level:
        inside, depth = level.pop()
        if depth > DEEPEST:
            return f"nested more than {DEEPEST} levels deep"
        if isinstance(inside, dict):
            for key in inside:
                if not isinstance(key, str):
                    return "an object with a key that is no text"
            inside = inside.values()
        for each in inside:
            if isinstance(each, _NESTS):
                level.append((each, depth + 1))
    return None


def _value(value: Any) -> Any:
    """A column's value; NaN and the infinities, which tables have for "nothing here", become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _given(rows: list[Any]) -> Placed:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Mapping):
            yield f"row:{number}", dict(row)
            continue
        error = DataError(
            f"row:{number}: row {number} of the given list is no mapping of columns",
            got=f"{type(row).__name__}",
            wanted="dicts such as {'prompt': …, 'completion': …}, or paths",
        )
        yield f"row:{number}", error


def _one(source: str | Path, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    path = local(source)
    if exists(path):
        return _folder(path, settings, role, notes) if path.is_dir() else _file(path, settings)
    if may_be_hub(str(source)):
        return hub_rows(str(source), settings, role, notes)
    raise _missing(path)


def may_be_hub(name: str) -> bool:
    """Whether a name that is no path here is worth asking the hub for, rather than a misspelt file."""
    if kind(Path(name)) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        return False
    folder, slash, _ = name.partition("/")
    return not exists(Path(folder)) if slash else not _near(Path(name))


def _near(path: Path) -> list[str]:
    """The entries of the path's folder with a name most like its own."""
    folder = path.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []
    return [str(folder / name) for name in nearest(path.name, names)]


def _file(path: Path, settings: DataSettings) -> Placed:
    for line, columns in read_file(path, paragraphs=settings.txt == "paragraph"):
        yield f"{path}:{line}", columns


def _folder(path: Path, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return saved_rows(path, settings, role, notes)
    _refuse_model(path)
    every = sorted(file for file in path.rglob("*") if file.is_file() and kind(file))
    structured = [file for file in every if kind(file) != ".txt"]
    files = structured or [file for file in every if not _BESIDE_DATA.match(file.name)]
    wanted = (settings.split,) if settings.split else SPLITS[role]
    for split in wanted:
        part = [file for file in files if re.match(rf"{split}(?![a-z])", file.name.lower())]
        if part:
            files = part
            break
    else:
        if settings.split and files:
            raise DataError(
                f"{path}: no file of split {settings.split!r}",
                got=[file.name for file in files[:10]],
                wanted=f"a file whose name begins with {settings.split!r}",
            )
    if not files:
        raise DataError(
            f"{path}: no data files in the folder",
            got=[file.name for file in sorted(path.iterdir())[:10]],
            wanted=", ".join(READERS),
        )
    shown = ", ".join(str(file.relative_to(path)) for file in files[:5])
    notes.append(f"{path}: read {len(files)} of {counted(len(every), 'data file')}: {shown}")
    return (row for file in files for row in _file(file, settings))


def _refuse_model(path: Path) -> None:
    """Raises for the folder of a model, an adapter or a run, whose JSON files are no rows."""
    marks = {
        "a model": ("config.json", "*.safetensors"),
        "an adapter": ("adapter_config.json",),
        "a run": ("config.yaml", "adapter"),
    }
    for what, names in marks.items():
        if all(any(path.glob(name)) for name in names):
            raise DataError(
                f"{path}: this folder holds {what}, not data",
                got=", ".join(names),
                wanted=", ".join(READERS),
                cure="the model comes first, then the data: afina train MODEL DATA",
            )


def _missing(path: Path) -> DataError:
    folder, near = path.parent, _near(path)
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        got, cure = "an address", "download it first, and name the file"
    else:
        got = f"folder {folder} {'exists' if exists(folder) else 'does not exist either'}"
        cure = f"did you mean {' or '.join(near)}?" if near else "check the path"
    return DataError(
        f"{path}: no such file",
        got=got,
        wanted="a data file, a folder, or the id of a hub data set",
        cure=cure,
    )
