"""Rows to evaluate, from whatever the caller has: prepared rows, dictionaries, or the name of data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afina.data.dataset import Prepared, prepare
from afina.data.settings import DataSettings
from afina.data.sources import Source
from afina.errors import DataError
from afina.models.forward import context_of
from afina.models.stops import stop_ids
from afina.models.tokenizer import refuse_outside
from afina.types import Row

Rows = Sequence[Row] | Sequence[Mapping[str, Any]] | str | Path
"""Prepared rows, dictionaries as a file's rows would be, or a file, folder or hub data set."""


def rows_of(model: Any, tokenizer: Any, rows: Rows, data: DataSettings | None) -> Sequence[Row]:
    """The rows, prepared if they are not yet.

    Raises:
        DataError: they are nothing of what `Rows` lists, or cannot be prepared.
    """
    if isinstance(rows, str | Path):
        return prepared(model, tokenizer, rows, data).rows
    if isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        raise DataError(
            "there are no rows in this",
            got=f"{type(rows).__name__} {str(rows)[:60]}",
            wanted="a list of dicts such as {'prompt': …, 'completion': …}, prepared rows, or a file",
            cure="put it in a list: [row]" if isinstance(rows, Mapping) else None,
        )
    given = list(rows)
    if all(isinstance(row, Row) for row in given):
        return given  # type: ignore[return-value]
    return prepared(model, tokenizer, given, data).rows  # type: ignore[arg-type]


def prepared(model: Any, tokenizer: Any, source: Source, data: DataSettings | None) -> Prepared:
    """Rows and their account, with the model's context, stop tokens and names of classes.

    Raises:
        DataError: as `afina.data.dataset.prepare`.
    """
    names = getattr(model.config, "id2label", None) or {}
    told = [str(names[n]) for n in sorted(names)]
    # LABEL_0, LABEL_1 … are Transformers' way of saying that nobody named the classes.
    named = told if told and not told[0].startswith("LABEL_") else None
    found = prepare(
        source,
        tokenizer,
        data or DataSettings(),
        role="eval",
        max_tokens=context_of(model),
        labels=named,
        stop_ids=stop_ids(model, tokenizer),
    )
    refuse_outside(model, tokenizer, found.rows)
    return found
