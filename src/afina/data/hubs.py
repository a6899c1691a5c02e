"""Rows of data sets that the `datasets` library keeps: on the Hugging Face hub, or saved in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afina.data.settings import DataSettings, Role
from afina.errors import DataError

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev", "eval", "test"),
    "eval": ("test", "eval", "validation", "valid", "val", "dev"),
}
"""Which part of a folder or hub data set each role reads, best first."""

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Rows with their place."""


def _pick(splits: list[str], settings: DataSettings, role: Role, name: str) -> str:
    if settings.split in splits:
        return settings.split  # type: ignore[return-value]
    found = [split for split in SPLITS[role] if split in splits]
    if settings.split or (not found and len(splits) != 1):
        raise DataError(
            f"{name}: no split for {role}",
            got=f"splits {splits}",
            wanted=settings.split or " or ".join(SPLITS[role]),
            cure=f"--set data.split={splits[0]}" if splits else None,
        )
    return found[0] if found else splits[0]


def hub_rows(name: str, settings: DataSettings, role: Role, notes: list[str]) -> Rows:
    """The rows of a data set of the hub.

    Raises:
        DataError: there is none of that name, or it cannot be loaded.
    """
    import datasets

    try:
        splits = datasets.get_dataset_split_names(name, settings.subset, revision=settings.revision)
        split = _pick([str(one) for one in splits], settings, role, name)
        table = datasets.load_dataset(
            name, settings.subset, split=split, revision=settings.revision
        )
    except DataError:
        raise
    except Exception as error:  # the library has dozens of kinds, and all of them mean this
        raise DataError(
            f"{name}: neither a file here nor a data set of the hub that could be loaded",
            got=f"{type(error).__name__}: {str(error).strip()[:300]}",
            wanted="a path, or the id of a public hub data set (owner/name)",
            cure="check the spelling, the network, and data.subset if the set has several",
        ) from error
    notes.append(f"{name}: split {split} of the hub data set")
    return _table(f"{name}[{split}]", table)


def saved_rows(path: Path, settings: DataSettings, role: Role, notes: list[str]) -> Rows:
    """The rows of a folder written by `datasets`' `save_to_disk`.

    Raises:
        DataError: it is damaged, or has no split for the role.
    """
    import datasets

    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # of the library, of Arrow, or of JSON
        raise DataError(
            f"{path}: looks like a saved data set, and cannot be loaded",
            got=f"{type(error).__name__}: {str(error).strip()[:300]}",
            wanted="a folder as datasets' save_to_disk writes it, whole",
            cure="save it again, or export it as Parquet",
        ) from error
    if isinstance(table, datasets.DatasetDict):
        split = _pick([str(one) for one in table], settings, role, str(path))
        notes.append(f"{path}: split {split}")
        table = table[split]
    return _table(str(path), table)


def _table(name: str, table: Any) -> Rows:
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
