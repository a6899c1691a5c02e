"""LoRA's paths beside fused experts in PEFT's layout, `target_parameters`.

| what | ending of the key, behind the module of the experts | shape |
|---|---|---|
| its only projection, or the last | `lora_A.weight`, `lora_B.weight` | (experts r, in), (out, r experts) |
| the first of two | `base_layer.lora_A.weight`, `base_layer.lora_B.weight` | the same |

PEFT wraps a module once for each projection, in the order in which the module has them, so that the last is outermost.

Source: the files that PEFT 0.21.2 writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from afina.adapters.kinds import Config, Parts, named
from afina.errors import AdapterError
from afina.techniques.lora_on_experts import ExpertPath, ExpertsDelta, ExpertSite, expert_sites

INNER = "base_layer."
ENDS = ("lora_A.weight", "lora_B.weight")

Sites = tuple[ExpertSite, ...]
"""The projections of one module, in its order."""


def sites_of(model: nn.Module) -> dict[str, Sites]:
    """Every module of fused experts."""
    found: dict[str, Sites] = {}
    for site in expert_sites(model):
        found[site.module] = (*found.get(site.module, ()), site)
    return found


def named_modules(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str]:
    """The modules that `target_parameters` names a projection of."""
    patterns = config.get("target_parameters") or []
    return {
        site.module
        for site in expert_sites(model)
        if named(patterns, f"{seen[site.module]}.{site.projection}")
    }


def refuse_unknown(model: nn.Module, config: Config, seen: Mapping[str, str]) -> None:
    """Raises for a name in `target_parameters` that is none of a fused expert's tensor.

    Raises:
        AdapterError: naming it.
    """
    names = [f"{seen[site.module]}.{site.projection}" for site in expert_sites(model)]
    lost = [
        pattern
        for pattern in config.get("target_parameters") or []
        if not any(named([pattern], name) for name in names)
    ]
    if lost:
        raise AdapterError(
            f"target_parameters = {lost}: not what this model has as fused experts",
            wanted=", ".join(names[:4]) or "none: it has no fused experts that LoRA reaches",
            cure="load the base model that adapter_config.json names",
        )


def layers(sites: Sites, parts: Parts, wanted: Sequence[str] = ()) -> dict[str, ExpertSite]:
    """Which projection the tensors of each beginning are of: `base_layer.` or none.

    Args:
        sites: of the module.
        parts: its tensors.
        wanted: names that the configuration says, for a single one whose shapes fit several.
    """
    if any(part.startswith(INNER) for part in parts):
        return {INNER: sites[0], "": sites[-1]}
    fitting = [site for site in sites if not _misfit(site, "", parts)]
    told = [site for site in fitting if named(list(wanted), site.name)]
    return {"": (told or fitting or [sites[-1]])[0]}


def misfit(sites: Sites, parts: Parts) -> dict[str, str]:
    """What is wrong with the tensors of one module."""
    found = layers(sites, parts)
    ends = [start + end for start in found for end in ENDS]
    wrong = {part: "not what LoRA has here" for part in parts if part not in ends}
    wrong |= {part: "the file lacks it" for part in ends if part not in parts}
    if wrong:
        return wrong
    return {p: w for start, site in found.items() for p, w in _misfit(site, start, parts).items()}


def _misfit(site: ExpertSite, start: str, parts: Parts) -> dict[str, str]:
    rank = rank_of(site, start, parts)
    shapes = ((site.experts * rank, site.in_features), (site.out_features, rank * site.experts))
    return {
        start + end: f"shape {tuple(parts[start + end].shape)}, the model wants {shape}"
        for end, shape in zip(ENDS, shapes, strict=True)
        if start + end in parts and tuple(parts[start + end].shape) != shape
    }


def rank_of(site: ExpertSite, start: str, parts: Parts) -> int:
    """The rank of the tensors of one beginning."""
    a = parts.get(start + ENDS[0])
    return max(1, a.shape[0] // site.experts) if a is not None and a.dim() else 1


def tensors_of(delta: ExpertsDelta) -> dict[str, Tensor]:
    """The tensors of a module by the endings of their keys."""
    paths = list(delta.paths.values())
    starts = ("",) if len(paths) == 1 else (INNER, "")
    found: dict[str, Tensor] = {}
    for start, path in zip(starts, paths, strict=True):
        found |= {start + ENDS[0]: path.a, start + ENDS[1]: path.b}
    return found


def paths_of(deltas: Mapping[str, Any]) -> dict[str, ExpertPath]:
    """Every path by the name of the tensor that it is beside."""
    return {
        f"{module}.{projection}": path
        for module, delta in deltas.items()
        if isinstance(delta, ExpertsDelta)
        for projection, path in delta.paths.items()
    }
