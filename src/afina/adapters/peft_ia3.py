"""IA3 in PEFT's layout.

| what | ending of the key | shape |
|---|---|---|
| a map whose outputs are rescaled | `ia3_l` | (out, 1) |
| a map whose inputs are rescaled, named in `feedforward_modules` too | `ia3_l` | (1, in) |

Source: the files that PEFT 0.21.2 writes, and how it reads `target_modules` and `feedforward_modules`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places
from afina.adapters.peft_lora import map_sites, named_maps, target_modules
from afina.errors import AdapterError, counted
from afina.techniques.ia3 import IA3, IA3In, IA3Out
from afina.tree import Delta, matches

_ALLOWED = Allowed(
    needed=("target_modules", "feedforward_modules"),
    types={
        "target_modules": (list, str),
        "feedforward_modules": (list, str),
        "exclude_modules": (list, str),
        "modules_to_save": (list,),
    },
    items={
        "target_modules": str,
        "feedforward_modules": str,
        "exclude_modules": str,
        "modules_to_save": str,
    },
    neutral={},
    free=frozenset({
        "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "init_ia3_weights",
        "peft_version", "revision", "runtime_config", "task_type",
    }),
    cures={},
)  # fmt: skip


# --- reading ------------------------------------------------------------------------------------------------------


def _misfit(site: seams.MapSite, parts: Parts) -> dict[str, str]:
    """What is wrong with the factors for one map."""
    ways = ((site.out_features, 1), (1, site.in_features))
    return {
        part: f"shape {tuple(tensor.shape)}, the model wants {ways[0]}, or {ways[1]} on its inputs"
        for part, tensor in parts.items()
        if tuple(tensor.shape) not in ways
    }


def _technique_of(model: nn.Module, config: Config, places: Places) -> IA3:
    """The IA3 that makes these places.

    Raises:
        AdapterError: when a place is rescaled at its input, and its factors are for its output, or the reverse.
    """
    sites = map_sites(model)
    inward = {name for name in places.parts if _feeds_forward(config, places.seen[name])}
    wrong = [
        f"{name}: shape {tuple(parts['ia3_l'].shape)}"
        for name, parts in places.parts.items()
        if tuple(parts["ia3_l"].shape) != _shape(sites[name], inward=name in inward)
    ]
    if wrong:
        raise AdapterError(
            "the file and feedforward_modules differ in which maps are rescaled at their inputs, at "
            f"{counted(len(wrong), 'place')}",
            got="; ".join(wrong[:4]),
        )
    others = (name for name in sites if name not in places.parts)
    return IA3(
        target=tuple(name for name in places.parts if name not in inward),
        feedforward=tuple(name for name in places.parts if name in inward),
        exclude=tuple(n for n in others if any(matches(n, place) for place in places.parts)),
        modules_to_save=tuple(places.whole),
    )


def _shape(site: seams.MapSite, *, inward: bool) -> tuple[int, int]:
    return (1, site.in_features) if inward else (site.out_features, 1)


def _feeds_forward(config: Config, name: str) -> bool:
    """PEFT's rule: text is a regular expression of the whole name, a list holds ends of names."""
    patterns = config["feedforward_modules"]
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name.endswith(pattern) for pattern in patterns)


# --- writing ------------------------------------------------------------------------------------------------------


def _tensors(delta: Delta) -> dict[str, Tensor]:
    assert isinstance(delta, IA3In | IA3Out)
    return {"ia3_l": delta.l}


def _config(part: Part) -> dict[str, Any]:
    """The configuration of one IA3: short names where these say exactly the places, else whole ones."""
    inward = sorted(name for name, delta in part.deltas.items() if isinstance(delta, IA3In))
    outward = sorted(name for name in part.deltas if name not in inward)
    targets = target_modules(part.model, list(part.deltas))
    feedforward = sorted({name.rpartition(".")[2] for name in inward})
    short = set(feedforward) <= set(targets)
    if not short or any(name.endswith(tuple(feedforward)) for name in outward):
        targets, feedforward = sorted(part.deltas), inward
    kinds = map_sites(part.model)
    return {
        "target_modules": targets,
        "exclude_modules": None,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": any(kinds[name].kind == "conv1d" for name in part.deltas),
        "init_ia3_weights": True,
    }


IA3_KIND = Kind(
    technique=IA3,
    peft_type="IA3",
    allowed=_ALLOWED,
    ending=re.compile(r"\.ia3_l(\.(?P<adapter>[^.]+))?$"),
    part=lambda match: "ia3_l",
    tensors=_tensors,
    config=_config,
    sites=map_sites,
    named=named_maps,
    misfit=_misfit,
    technique_of=_technique_of,
)
