"""Which settings of a model's own configuration give biases to maps that have none, so that it can be saved with them.

A merged bias that the configuration does not say would be left out when the model is loaded again. So the settings are
tried: the one that, on a skeleton of the model, brings just the wanted biases, and others on maps where they can be
zero. Nothing else of the skeleton may change.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from afina.errors import TechniqueError

SHOWN = 3


@dataclass(frozen=True)
class Biases:
    """What gives a model its new biases.

    Attributes:
        settings: of the configuration (of its text part, where it has parts), with their new values.
        zero: names of the biases that come along and are not wanted.
    """

    settings: Mapping[str, bool]
    zero: tuple[str, ...]


def settings_for(model: Any, names: Collection[str]) -> Biases:
    """The settings with which a model has biases of these names.

    Args:
        model: of Transformers, on any device; it is not changed.
        names: of the biases that it lacks, such as `model.layers.0.self_attn.q_proj.bias`.

    Raises:
        TechniqueError: it has no such settings.
    """
    wanted = set(names)
    if not wanted:
        return Biases({}, ())
    own = _shapes(model, {})
    chosen: dict[str, bool] = {}
    brought: set[str] = set()
    for setting in _candidates(model):
        made = _shapes(model, {setting: True})
        new = made.keys() - own.keys()
        others = {name: made.get(name) for name in own} != own
        if others or not new & wanted or not all(name.endswith(".bias") for name in new):
            continue
        chosen[setting] = True
        brought |= new
    left = sorted(wanted - brought)
    if left or _shapes(model, chosen).keys() != own.keys() | brought:
        raise TechniqueError(
            "the new biases cannot be merged: no setting of this model's configuration gives its maps a bias, so they "
            "would be lost when it is loaded",
            got=", ".join(left[:SHOWN])
            + (f", and {len(left) - SHOWN} more" if left[SHOWN:] else ""),
            wanted="maps that have biases, or a setting such as attention_bias",
            cure="keep the adapter beside the model",
        )
    return Biases(chosen, tuple(sorted(brought - wanted)))


def text_config(config: Any) -> Any:
    """The part of a configuration that says how the language model is built; the whole, where there are no parts."""
    return config.get_text_config()


def _candidates(model: Any) -> list[str]:
    """Names of the settings that are off and speak of biases."""
    settings = text_config(model.config).to_dict()
    return sorted(name for name, value in settings.items() if "bias" in name and value is False)


def _shapes(model: Any, settings: Mapping[str, bool]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of such a model with these settings; none where it cannot be built."""
    config = copy.deepcopy(model.config)
    for name, value in settings.items():
        setattr(text_config(config), name, value)
    try:
        with torch.device("meta"):
            made = type(model)(config)
    except (TypeError, ValueError, RuntimeError):
        return {}
    return {name: tuple(p.shape) for name, p in made.named_parameters(remove_duplicate=False)}
