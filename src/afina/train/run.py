"""`afina.train`: data in; a folder with the adapter, its checkpoints and its figures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from afina.config import TrainSettings, build, of_kind
from afina.problems import name_of
from afina.train import folder
from afina.train.fit import refuse_kinds, refuse_other_place, refuse_unfit
from afina.train.job import Job, Run
from afina.train.options import RunOptions, options_of
from afina.tree import Edit
from afina.types import Row


def train(
    model: nn.Module,
    tokenizer: Any,
    data: str | Path | Sequence[Row] | Sequence[Mapping[str, Any]],
    edit: Edit,
    out: str | Path,
    *,
    val: str | Path | Sequence[Row] | Sequence[Mapping[str, Any]] | None = None,
    settings: TrainSettings | None = None,
    options: RunOptions | None = None,
    **overrides: Any,
) -> Run:
    """Trains what `edit` made trainable, and leaves a run's folder.

    Args:
        model: a causal language model, changed by `afina.apply`.
        tokenizer: the model's.
        data: a file, folder or hub data set, dictionaries as a file's rows would be, or prepared rows.
        edit: from `afina.apply`.
        out: the run's folder; must be new or empty, unless the options say otherwise.
        val: validation data; None holds out a share of `data` if the data settings say so.
        settings: of the training; None takes the defaults.
        options: how the run is embedded.
        **overrides: settings by name, as `steps=200`.

    Raises:
        AfinaError: before anything is written when something does not fit; RunError when training fails.
    """
    options, settings = options_of(options), overruled(settings, overrides)
    refuse_kinds(model, tokenizer, edit)
    refuse_unfit(model, edit)
    refuse_other_place(edit, settings)
    place = Path(name_of(out, "the run's folder", "a folder, such as 'runs/first'"))
    if options.mesh.writes:
        folder.refuse_used(place, resume=options.goes_on, overwrite=options.overwrite)
    if not options.goes_on:
        folder.refuse_inside(place, sources_of(model, tokenizer, options, data, val))
    with options.mesh.watched():
        return Job(model, tokenizer, edit, place, settings, options).run(data, val)


def sources_of(
    model: nn.Module, tokenizer: Any, options: RunOptions, data: Any, val: Any
) -> dict[str, object]:
    """What a run is made from, as `folder.refuse_inside` takes it."""
    return {
        "the model": options.base,
        "the tokenizer": getattr(tokenizer, "name_or_path", None),
        "the training data": data,
        "the validation data": val,
        "the loaded model": getattr(getattr(model, "config", None), "_name_or_path", None),
    }


def overruled(settings: TrainSettings | None, overrides: Mapping[str, Any]) -> TrainSettings:
    """The settings, or the defaults, with some values changed; `steps` takes the place of `epochs`, and so on.

    Raises:
        ConfigError: for a name that is no setting, or a value out of range, or settings of another kind.
    """
    values = of_kind(TrainSettings, settings).model_dump()
    for names in TrainSettings.ONE_OF:
        if any(name in overrides for name in names):
            values.update(dict.fromkeys(names))
    return build(TrainSettings, {**values, **overrides})
