"""BitFit in an adapter's folder: biases under the base's own names, whether the base has them or not.

| what | key | shape |
|---|---|---|
| bias of a map or norm | `base_model.model.<module>.bias` | (out,) |
| whole modules | `base_model.model.<module>.<tensor>` | as in the base |

PEFT has nothing of the kind, and refuses such a folder by its `peft_type`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters.kinds import Allowed, Config, Found, Kind, Part
from afina.adapters.layout import PREFIX
from afina.techniques.bitfit import BitFit, BitFitDelta, biased_norms
from afina.tree import matches

_ALLOWED = Allowed(
    needed=("target_modules",),
    types={"target_modules": (list,), "modules_to_save": (list,)},
    items={"target_modules": str, "modules_to_save": str},
    neutral={},
    free=frozenset({"base_model_name_or_path", "inference_mode", "revision", "task_type"}),
    cures={},
)

_NO_PLACE = "the model has no such place"
_LACKS = "the file lacks it"


# --- writing ------------------------------------------------------------------------------------------------------


def _stored(part: Part) -> dict[str, Tensor]:
    """The biases that were added, and the base's own tensors that train, each under all its names."""
    found: dict[str, Tensor] = {}
    for name, delta in part.deltas.items():
        assert isinstance(delta, BitFitDelta)
        found[f"{PREFIX}{name}.bias"] = delta.bias
    trained = {id(p) for p in part.in_place.values()}
    for name, parameter in part.model.named_parameters(remove_duplicate=False):
        if id(parameter) in trained:
            found[PREFIX + name] = parameter
    return found


def _config(part: Part) -> dict[str, Any]:
    bitfit = part.technique
    assert isinstance(bitfit, BitFit)
    whole = _modules(bitfit.whole_modules(part.model))
    in_place = _modules(part.in_place)
    return {
        "target_modules": sorted({*part.deltas, *in_place} - whole),
        "modules_to_save": sorted(whole) or None,
    }


def _modules(tensors: Mapping[str, Any] | list[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in tensors}


# --- reading ------------------------------------------------------------------------------------------------------


def _read(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> Found:
    """What the file holds; see `Kind.read`."""
    targets: list[str] = config["target_modules"]
    whole: list[str] = config.get("modules_to_save") or []
    wanted = _wanted(model, targets, whole)
    found = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    problems = [(name, _NO_PLACE) for name in sorted(set(found) - set(wanted))]
    problems += [(name, _LACKS) for name in sorted(set(wanted) - set(found))]
    problems += [
        (name, f"shape {tuple(found[name].shape)}, the model wants {shape}")
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    named = {name for name, _ in model.named_modules()}
    problems += [(n, _NO_PLACE) for n in (*targets, *whole) if n not in named]
    if problems:
        return Found(BitFit(), tensors, problems)
    every = {site.name for site in seams.map_sites(model)} | set(biased_norms(model))
    technique = BitFit(
        target=tuple(targets) or ("norms",),
        exclude=tuple(n for n in every - set(targets) if any(matches(n, t) for t in targets)),
        modules_to_save=tuple(whole),
    )
    return Found(technique, {PREFIX + name: tensor for name, tensor in found.items()})


def _wanted(model: nn.Module, targets: list[str], whole: list[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a file for these modules holds."""
    sites = {site.name: site for site in seams.map_sites(model) if site.kind != "embedding"}
    own = dict(model.named_parameters(remove_duplicate=False))
    wanted = {f"{n}.bias": (sites[n].out_features,) for n in targets if n in sites}
    wanted |= {f"{n}.bias": tuple(own[f"{n}.bias"].shape) for n in targets if f"{n}.bias" in own}
    # A tied tensor stands under all its names.
    inside = {id(p) for name, p in own.items() if name.startswith(tuple(f"{w}." for w in whole))}
    inside |= {id(own[name]) for name in wanted if name in own}
    return wanted | {name: tuple(p.shape) for name, p in own.items() if id(p) in inside}


BITFIT = Kind(
    technique=BitFit,
    peft_type="BITFIT",
    allowed=_ALLOWED,
    config=_config,
    # As the base's own tensors end; none has the name of an adapter in it.
    ending=re.compile(r"\.(?P<part>[^.]+)(?P<adapter>(?!))?$"),
    stored=_stored,
    read=_read,
)
