"""What a run of a classifier asks of its model, its rows and its settings; nothing of it concerns other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from afina import seams
from afina.data.settings import DataSettings
from afina.errors import DataError, ModelError, counted
from afina.models.classes import class_names
from afina.train.options import RunOptions
from afina.tree import Edit, front_of
from afina.types import IGNORE, Row

PADDED = (
    "rows are padded and not packed: a classifier is run on whole rows (data.packing has no effect)"
)


def refuse_unfit_classifier(model: nn.Module, edit: Edit) -> None:
    """Raises for a classifier that cannot be trained as one.

    Raises:
        ModelError: one class, several classes a row, or no padding that a decoder could know its last token by; or
            something in front of every row, where the class is read at a fixed place.
    """
    speaker: Any = model
    config = speaker.config
    if config.num_labels < 2:
        raise ModelError(
            "a classifier needs two classes to choose between",
            got=f"num_labels {config.num_labels}",
            wanted="2 or more",
            cure="load it with the names of the classes: afina.load(NAME, labels=[...])",
        )
    if config.problem_type not in (None, "single_label_classification"):
        raise ModelError(
            "this classifier gives a row no single class, and cannot be trained here",
            got=f"problem_type {config.problem_type!r} in its config",
            wanted="single_label_classification",
            cure="load it anew with the names of the classes: afina.load(NAME, labels=[...])",
        )
    by_last = hasattr(model, "score")
    if by_last and config.get_text_config().pad_token_id is None:
        raise ModelError(
            "a decoder reads the class at a row's last token, which it finds by the padding's id, and there is none",
            got=type(model).__name__,
            cure="load it with afina.load, which names a padding; or set model.config.pad_token_id",
        )
    if seams.classifies(model) == "tokens" and front_of(model):
        raise ModelError(
            "a technique that puts places in front of every row cannot be trained on classes of tokens: their places "
            "would be others",
            got=", ".join(technique.key for technique in edit.techniques),
            cure="take lora, ia3, bottleneck, or another that adds no places",
        )


def refuse_unlike(model: nn.Module, rows: Sequence[Row], name: str) -> None:
    """Raises where rows are not of the kind that the model classifies, or have classes that it has not.

    Args:
        model: any.
        rows: that train or score.
        name: of the rows, for the error.

    Raises:
        DataError: see above.
    """
    kind = seams.classifies(model)
    found = {_kind(row) for row in rows}
    if not found:
        return
    if kind is None:
        if found != {None}:
            raise _no_classifier(name, found - {None})
        return
    if found != {kind}:
        raise DataError(
            f"the {name} rows are not what this model classifies",
            got=" and ".join(sorted(_WORDS[each] for each in found)),
            wanted=_WORDS[kind],
            cure="give such rows, or load the model for these: in Python afina.load(NAME, task=…)",
        )
    speaker: Any = model
    most = max(_most(row) for row in rows)
    if most >= speaker.config.num_labels:
        raise DataError(
            f"the {name} rows have more classes than the model",
            got=f"class {most}",
            wanted=f"0 to {speaker.config.num_labels - 1}",
            cure="load the model with these classes: afina.load(NAME, labels=[...])",
        )
    pad = speaker.config.get_text_config().pad_token_id
    cut = [row for row in rows if hasattr(model, "score") and row.tokens[-1] == pad]
    if kind == "rows" and cut:
        raise DataError(
            f"{counted(len(cut), 'row')} of the {name} rows end with the padding's token, which a decoder reads past",
            got=cut[0].source or f"row {cut[0].id}",
            cure="take that token from their ends, or set model.config.pad_token_id to an unused one",
        )


_WORDS = {
    None: "rows with answers or plain text",
    "rows": "rows of text and label",
    "tokens": "rows of tokens and tags",
}


def _no_classifier(name: str, found: set[Any]) -> DataError:
    return DataError(
        f"the {name} rows have classes, and this model has no classification head",
        got=" and ".join(sorted(_WORDS[each] for each in found)),
        wanted="a model loaded for classification, or rows with an answer",
        cure="load it with the names of the classes: afina.load(NAME, labels=[...]) (afina train does so by itself); "
        "or read the class as the answer: --set data.format=prompt_completion "
        "--set data.columns.prompt=text --set data.columns.completion=label (in Python DataSettings("
        "format='prompt_completion', columns={'prompt': 'text', 'completion': 'label'}))",
    )


def _kind(row: Row) -> str | None:
    if row.label is not None:
        return "rows"
    return "tokens" if row.tags is not None else None


def _most(row: Row) -> int:
    """The highest class number of a row."""
    return row.label if row.label is not None else max(row.tags or (IGNORE,))


def unpacked(model: nn.Module, settings: DataSettings) -> DataSettings:
    """The settings, for a classifier without packing."""
    if seams.classifies(model) is None or not settings.packing:
        return settings
    return settings.model_copy(update={"packing": False})


def options_for(model: nn.Module, options: RunOptions) -> RunOptions:
    """The options of a run of this model."""
    return replace(options, data_settings=unpacked(model, options.data_settings))


def known(model: nn.Module) -> tuple[str, ...] | None:
    """The names that a classifier's classes have; None where nobody named them, or it is none."""
    return None if seams.classifies(model) is None else class_names(model)
