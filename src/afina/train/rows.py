"""From what a caller gives as data to the rows that train and the rows that score."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from afina import seams
from afina.data.dataset import prepare
from afina.data.report import DataReport
from afina.data.settings import DataSettings, Role
from afina.data.split import split
from afina.errors import ConfigError, DataError, ModelError
from afina.models.classes import name_classes
from afina.models.forward import context_of
from afina.models.stops import stop_ids
from afina.models.tokenizer import refuse_outside
from afina.train.classes import known
from afina.types import Row


def _name(model: Any, report: DataReport) -> None:
    """Gives the classes of a classifier that has a head for so many, and no names, those of the rows."""
    fresh = seams.classifies(model) is not None and known(model) is None
    if fresh and report.labels and len(report.labels) <= model.config.num_labels:
        spare = range(len(report.labels), model.config.num_labels)
        name_classes(model.config, [*report.labels, *(f"unused {n}" for n in spare)])


def are_rows(source: Any) -> bool:
    """Whether `source` is prepared rows already, and not something to read."""
    return (
        isinstance(source, Sequence)
        and not isinstance(source, str)
        and len(source) > 0
        and all(isinstance(item, Row) for item in source)
    )


def read_rows(
    model: nn.Module,
    tokenizer: Any,
    data: Any,
    val: Any,
    settings: DataSettings,
    keep: Collection[str] = (),
) -> tuple[list[Row], list[Row], list[DataReport]]:
    """Training rows, validation rows, and the reports of how they came about (none for prepared rows).

    Args:
        model: that the rows are for.
        tokenizer: its; None for prepared rows.
        data: that trains.
        val: that scores, or None.
        settings: of the data.
        keep: columns of the source that the rows are to have in their `meta`.

    Raises:
        DataError: the data cannot be read.
        ConfigError: validation rows are given twice.
        ModelError: data is to be read, and there is no tokenizer.
    """
    reports: list[DataReport] = []

    def read(source: Any, role: Role) -> list[Row]:
        if are_rows(source):
            refuse_outside(model, tokenizer, source)
            return list(source)
        if tokenizer is None:
            raise ModelError(
                "a tokenizer is needed to read data", cure="give it, or give prepared rows"
            )
        if not isinstance(source, str | Path | Sequence) or not source:
            raise DataError(
                "this is not data",
                got=repr(source)[:80],
                wanted="a file, a folder, a hub data set, or a list of dictionaries",
            )
        found = prepare(
            source,
            tokenizer,
            settings,
            role=role,
            max_tokens=context_of(model),
            labels=known(model),
            stop_ids=stop_ids(model, tokenizer),
            keep=keep,
        )
        _name(model, found.report)
        reports.append(found.report)
        refuse_outside(model, tokenizer, found.rows)
        return found.rows

    rows = read(data, "train")
    if val is not None:
        if settings.val_fraction:
            raise ConfigError(
                "validation rows are given twice",
                got=f"a file of them, and data.val_fraction={settings.val_fraction}",
                cure="give one of the two",
            )
        return rows, read(val, "val"), reports
    rows, held_out = split(rows, settings.val_fraction, settings.seed)
    return rows, held_out, reports
