"""Bottleneck adapters in a folder. PEFT has nothing of the kind and refuses the word `BOTTLENECK` by name.

Keys are `base_model.model.PLACE.bottleneck.PART`, with the module that an adapter acts on as PLACE, and down,
down_bias, up, up_bias and, where it is learned, scale as PART; shapes as in `techniques.bottleneck`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places
from afina.errors import AdapterError
from afina.techniques.bottleneck import Bottleneck, BottleneckDelta
from afina.techniques.sublayers import Sublayer, sublayers
from afina.tree import Delta

_START = "bottleneck."
_SETTINGS = ("kind", "non_linearity", "scaling", "dropout", "cross", "reduction_factor")


def _sites(model: nn.Module) -> dict[str, Sublayer]:
    return {place.name: place for place in sublayers(model)}


def _named(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str]:
    wanted = set(config["target_modules"])
    return {place.name for place in sublayers(model) if seen[place.name] in wanted}


def _misfit(place: Sublayer, parts: Parts) -> dict[str, str]:
    """What is wrong with an adapter's tensors for one sublayer."""
    needed = tuple(_START + part for part in ("down", "down_bias", "up", "up_bias"))
    wrong = {part: "the file lacks it" for part in needed if part not in parts}
    if wrong:
        return wrong
    bias = parts[f"{_START}down_bias"]
    width = bias.shape[0] if bias.dim() else 0
    shapes = {
        "down": (width, place.width),
        "down_bias": (width,),
        "up": (place.width, width),
        "up_bias": (place.width,),
        "scale": (1,),
    }
    return {
        part: f"shape {tuple(tensor.shape)}, the model wants {shapes[part.removeprefix(_START)]}"
        for part, tensor in parts.items()
        if tuple(tensor.shape) != shapes[part.removeprefix(_START)]
    }


def _technique_of(model: nn.Module, config: Config, places: Places) -> Bottleneck:
    """The adapters that a file holds.

    Raises:
        AdapterError: they are not all those of some blocks, or of several widths or scales.
    """
    widths = {parts[f"{_START}down"].shape[0] for parts in places.parts.values()}
    learned = {f"{_START}scale" in parts for parts in places.parts.values()}
    if len(widths) > 1 or learned != {config["scaling"] == "learned"}:
        raise AdapterError(
            "the tensors of the file are not what its configuration says",
            got=f"widths {sorted(widths)}, {'some' if True in learned else 'no'} learned scale",
            wanted=f"one width, scaling {config['scaling']!r}",
        )
    told = {key: config[key] for key in _SETTINGS}
    where = _sites(model)
    blocks = sorted({where[name].block for name in places.parts})
    depth = len({place.block for place in where.values()})
    made = Bottleneck(
        **told,
        width=widths.pop(),
        layers=None if len(blocks) == depth else tuple(blocks),
        modules_to_save=tuple(places.whole),
    )
    missing = {place.name for place in made.places(model)} ^ set(places.parts)
    if missing:
        raise AdapterError(
            "bottleneck adapters are put on whole blocks only, and some of the file have no place here",
            got=", ".join(sorted(missing)[:4]),
            cure=f"load the base model {config.get('base_model_name_or_path')!r}",
        )
    return made


def _tensors(delta: Delta) -> dict[str, Tensor]:
    assert isinstance(delta, BottleneckDelta)
    return {_START + name: p for name, p in delta.named_parameters()}


def _config(part: Part) -> dict[str, Any]:
    """The settings that make the same adapters again, and the places."""
    technique = part.technique
    assert isinstance(technique, Bottleneck)
    told = technique.model_dump(mode="json")
    return {key: told[key] for key in _SETTINGS} | {"target_modules": sorted(part.deltas)}


BOTTLENECK = Kind(
    technique=Bottleneck,
    peft_type="BOTTLENECK",
    allowed=Allowed(
        needed=(*_SETTINGS, "target_modules"),
        types={
            "kind": (str,),
            "dropout": (float, int),
            "cross": (bool,),
            "reduction_factor": (float, int),
            "target_modules": (list,),
            "modules_to_save": (list,),
        },
        items={"target_modules": str, "modules_to_save": str},
        neutral={},
        free=frozenset({"base_model_name_or_path", "inference_mode", "revision", "task_type"}),
        cures={},
    ),
    ending=re.compile(
        r"\.bottleneck\.(?P<part>down|down_bias|up|up_bias|scale)(?P<adapter>(?!))?$"
    ),
    part=lambda match: _START + match["part"],
    tensors=_tensors,
    config=_config,
    sites=_sites,
    named=_named,
    misfit=_misfit,
    technique_of=_technique_of,
)
