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

from afina.data.readers import READERS, kind, read_paragraphs
from afina.data.settings import DataSettings, Role
from afina.errors import DataError, nearest

Source = str | Path | Iterable[str | Path] | Iterable[Mapping[str, Any]]

_BESIDE_DATA = re.compile(r"(readme|licen[cs]e|sources?|notice|citation|changelog)\b", re.I)
"""Texts about a folder's data, not of it."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev", "eval", "test"),
    "eval": ("test", "eval", "validation", "valid", "val", "dev"),
}
"""Which part of a folder or hub data set each role reads, best first."""


@dataclass(frozen=True)
class RawRow:
    """A row as it was given: its place in the source (from 0), "file:line", and its columns."""

    id: int
    source: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class Read:
    """What was read, and what the user should know of how."""

    rows: list[RawRow]
    name: str
    notes: tuple[str, ...] = ()


def read(source: Source, settings: DataSettings, role: Role = "train") -> Read:
    """All rows of a source, in its order.

    Args:
        source: a path or hub id; or an iterable of paths; or an iterable of rows (mappings).
        settings: `split`, `subset`, `txt` and `max_rows` are used here.
        role: which split a folder or hub data set gives when `settings.split` is None.

    Raises:
        DataError: nothing there, unreadable, or no rows.
    """
    notes: list[str] = []
    if isinstance(source, (str, Path)):
        name, found = str(source), _one(source, settings, role, notes)
    else:
        given = list(source)
        paths = [item for item in given if isinstance(item, (str, Path))]
        if len(paths) == len(given) and paths:
            name = ", ".join(map(str, paths))
            found = (row for path in paths for row in _one(path, settings, role, notes))
        else:
            name, found = "rows given in Python", _given(given)
    taken = enumerate(islice(found, settings.max_rows))
    rows = [RawRow(i, at, {k: _value(v) for k, v in cols.items()}) for i, (at, cols) in taken]
    if not rows:
        raise DataError(f"{name}: no rows", wanted="at least one row")
    if settings.max_rows is not None and len(rows) == settings.max_rows:
        notes.append(
            f"only the first {f'{len(rows)} rows were' if len(rows) > 1 else 'row was'} read (data.max_rows)"
        )
    return Read(rows, name, tuple(notes))


def _value(value: Any) -> Any:
    """A column's value; NaN and the infinities, which tables have for "nothing here", become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Placed = Iterator[tuple[str, dict[str, Any]]]


def _given(rows: list[Any]) -> Placed:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the given list is no mapping of columns",
                got=f"{type(row).__name__}",
                wanted="dicts such as {'prompt': …, 'completion': …}, or paths",
            )
        yield f"row:{number}", dict(row)


def _one(source: str | Path, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, settings, role, notes)
    if path.exists():
        return _file(path, settings)
    if _may_be_hub(str(source)):
        return _hub(str(source), settings, role, notes)
    raise _missing(path)


def _may_be_hub(name: str) -> bool:
    """Whether a name that is no path here is worth asking the hub for, rather than a misspelt file."""
    if kind(Path(name)) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        return False
    folder, slash, _ = name.partition("/")
    return not Path(folder).is_dir() if slash else not _near(Path(name))


def _near(path: Path) -> list[str]:
    """The entries of the path's folder with a name most like its own."""
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [str(folder / name) for name in nearest(path.name, names)]


def _file(path: Path, settings: DataSettings) -> Placed:
    suffix = kind(path)
    if suffix is None:
        raise DataError(
            f"{path}: unknown kind of file",
            got=f"suffix {path.suffix!r}",
            wanted=", ".join(READERS) + " (the text kinds also with .gz)",
            cure="rename the file after what it holds",
        )
    reader = READERS[suffix]
    if suffix == ".txt" and settings.txt == "paragraph":
        reader = read_paragraphs
    for line, columns in reader(path):
        yield f"{path}:{line}", columns


def _folder(path: Path, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path, settings, role, notes)
    every = sorted(file for file in path.rglob("*") if file.is_file() and kind(file))
    structured = [file for file in every if kind(file) != ".txt"]
    files = structured or [file for file in every if not _BESIDE_DATA.match(file.name)]
    wanted = (settings.split,) if settings.split else _SPLITS[role]
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
    notes.append(f"{path}: {len(files)} of {len(every)} data files are read: {shown}")
    return (row for file in files for row in _file(file, settings))


def _missing(path: Path) -> DataError:
    folder, near = path.parent, _near(path)
    return DataError(
        f"{path}: no such file",
        got=f"folder {folder} {'exists' if folder.is_dir() else 'does not exist either'}",
        wanted="a data file, a folder, or the id of a hub data set",
        cure=f"did you mean {' or '.join(near)}?" if near else "check the path",
    )


def _pick(splits: list[str], settings: DataSettings, role: Role, name: str) -> str:
    if settings.split in splits:
        return settings.split  # type: ignore[return-value]
    found = [split for split in _SPLITS[role] if split in splits]
    if settings.split or (not found and len(splits) != 1):
        raise DataError(
            f"{name}: no split for {role}",
            got=f"splits {splits}",
            wanted=settings.split or " or ".join(_SPLITS[role]),
            cure=f"--set data.split={splits[0]}" if splits else None,
        )
    return found[0] if found else splits[0]


def _hub(name: str, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    import datasets

    try:
        splits = datasets.get_dataset_split_names(name, settings.subset, revision=settings.revision)
        split = _pick([str(one) for one in splits], settings, role, name)
        table = datasets.load_dataset(
            name, settings.subset, split=split, revision=settings.revision
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: neither a file here nor a data set of the hub that could be loaded",
            got=f"{type(error).__name__}: {str(error).strip()[:300]}",
            wanted="a path, or the id of a public hub data set (owner/name)",
            cure="check the spelling, the network, and data.subset if the set has several",
        ) from error
    notes.append(f"{name}: split {split} of the hub data set")
    return _table(f"{name}[{split}]", table)


def _saved(path: Path, settings: DataSettings, role: Role, notes: list[str]) -> Placed:
    """A folder written by `datasets`' `save_to_disk`."""
    import datasets

    table = datasets.load_from_disk(str(path))
    if isinstance(table, datasets.DatasetDict):
        split = _pick([str(one) for one in table], settings, role, str(path))
        notes.append(f"{path}: split {split}")
        table = table[split]
    return _table(str(path), table)


def _table(name: str, table: Any) -> Placed:
    """The rows of a `datasets` table; classes by the names it knows for their numbers."""
    names = {
        column: feature.names
        for column, feature in table.features.items()
        if getattr(feature, "names", None)
    }
    for number, row in enumerate(table, start=1):
        columns = dict(row)
        for column, known in names.items():
            value = columns[column]
            unlabelled = value is None or value < 0  # hidden test labels are -1
            columns[column] = None if unlabelled else known[value]
        yield f"{name}:{number}", columns
