"""The metrics that `afina eval --metrics` names: what they ask of the evaluation, and of the rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from afina.errors import ConfigError, DataError, nearest

ANSWERED = ("exact_match", "json_match")
FIELD = re.compile("field:.+")
METRICS = (
    "loss", "perplexity", *ANSWERED, "accuracy", "accuracy_per_token", "macro_f1", "field:NAME",
)  # fmt: skip

CHOSEN = ("accuracy", "accuracy_per_token")
NEEDS = {
    "exact_match": "a prompt and its answer",
    "json_match": "answers that are JSON",
    "accuracy": "a column `choices` or `label`",
    "accuracy_per_token": "a column `choices`",
    "macro_f1": "a class, from a model that classifies",
}
"""Metric -> what a row must have for it."""


def parse_metrics(text: str | None) -> tuple[str, ...] | None:
    """The metrics of a comma-separated list; None for no list.

    Raises:
        ConfigError: one is unknown.
    """
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [n for n in names if n not in METRICS[:-1] and not FIELD.fullmatch(n)]
    if unknown or not names:
        near = nearest(unknown[0], METRICS) if unknown else []
        raise ConfigError(
            "--metrics names something that is not measured",
            got=", ".join(unknown) or repr(text),
            wanted=", ".join(METRICS),
            cure=f"did you mean {near[0]}?" if near else None,
        )
    return names


def eval_flags(wanted: tuple[str, ...] | None) -> dict[str, Any]:
    """What the metrics ask of the evaluation: whether answers are needed, and which fields of them."""
    if wanted is None:
        return {}
    fields = [name.removeprefix("field:") for name in wanted if name.startswith("field:")]
    needed = bool(fields) or any(name in ANSWERED for name in wanted)
    return {"eval.generate": needed, "eval.fields": fields or None}


def refuse_unchosen(
    wanted: Sequence[str] | None, rows: Sequence[Any], choices: Sequence[str]
) -> None:
    """Raises, before anything is measured, for an accuracy without answers to choose among.

    Args:
        wanted: the metrics asked for; None asks for what the rows allow.
        rows: prepared rows.
        choices: the answers given for all rows, by the settings.

    Raises:
        DataError: naming the column.
    """
    named = [name for name in wanted or () if name in CHOSEN]
    if (
        named
        and not choices
        and not any(row.meta.get("choices") or row.label is not None for row in rows)
    ):
        raise DataError(
            f"--metrics {named[0]}: no row has answers to choose among",
            wanted='a column `choices`, such as ["yes", "no"], in the rows',
            cure="add the column, or give the same choices to all: --set 'eval.choices=[yes, no]'",
        )


def refuse_unmeasured(wanted: Sequence[str] | None, values: dict[str, float]) -> None:
    """Raises for metrics asked for that the rows did not allow.

    Raises:
        DataError: naming them, and what they need.
    """
    missing = [name for name in wanted or () if name not in values]
    if missing:
        needs = {n: NEEDS.get(n, f"JSON answers with {n.removeprefix('field:')}") for n in missing}
        raise DataError(
            f"not measured: {', '.join(missing)}",
            got="rows that do not have what it needs",
            wanted="; ".join(f"{name}: {what}" for name, what in needs.items()),
            cure="leave it out of --metrics, or give data that has it",
        )
