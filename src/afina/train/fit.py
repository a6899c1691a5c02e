"""Does this fit together? Asked before anything is written: model, edit, rows, settings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from afina.config import TrainSettings
from afina.errors import ConfigError, DataError, ModelError, RunError
from afina.tree import Edit
from afina.types import Row


def refuse_unfit(model: nn.Module, edit: Edit) -> None:
    """Raises when this model cannot be trained here, or nothing would train.

    Raises:
        ModelError: for anything but a decoder that predicts the next token.
        RunError: for an edit of another model, an undone or merged one, or one without trainable tensors.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if type(model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(
            "only causal language models can be trained so far",
            got=type(model).__name__,
            wanted="a model that predicts the next token, such as LlamaForCausalLM",
        )
    if edit.model is not model:
        raise RunError(
            "the edit is of another model", cure="train the model that was given to apply"
        )
    if edit.undone:
        raise RunError("the edit was undone", cure="apply again: afina.apply(model, [...])")
    if edit.merged:
        raise RunError(
            "the edit is merged: what it attached does not act, and would not learn",
            cure="edit.unmerge()",
        )
    if not edit.trainable():
        raise RunError(
            "nothing would train", cure="apply a technique first: afina.apply(model, [...])"
        )


def refuse_rows(rows: Sequence[Row], val_rows: Sequence[Row]) -> None:
    """Raises when the rows cannot train, or cannot score, a model that predicts the next token.

    Raises:
        DataError: no rows, rows with a class instead of an answer, or not one trained token among them.
    """
    for name, part in (("training", rows), ("validation", val_rows)):
        if any(row.label is not None for row in part):
            raise DataError(
                f"the {name} rows have a class, and training a classifier is not possible yet",
                wanted="rows with an answer",
                cure="read the class as the answer: --set data.format=prompt_completion "
                "--set data.columns.prompt=text --set data.columns.completion=label",
            )
        if part and not any(row.trained_tokens for row in part):
            raise DataError(f"not one token of the {name} rows would be trained")
    if not rows:
        raise DataError("there are no rows to train on", got="0 rows")


def refuse_idle_settings(settings: TrainSettings, validates: bool) -> None:
    """Raises when a setting could have no effect.

    Raises:
        ConfigError: for settings of validation without validation rows, or early stopping without evaluations.
    """
    idle = [
        f"train.{name}"
        for name, used in (
            ("early_stopping", settings.early_stopping is not None),
            ("eval_every", settings.eval_every is not None),
            ("best", settings.best != "loss"),
        )
        if used
    ]
    if idle and not validates:
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing: there are no validation rows",
            cure="give some: --val FILE, or --set data.val_fraction=0.1",
        )
    if settings.early_stopping is not None and settings.eval_every is None:
        raise ConfigError(
            "train.early_stopping would do nothing: the only evaluation is at the end",
            cure="say how often to evaluate: train.eval_every=20",
        )
