"""LoRA in PEFT's layout.

| what | ending of the key | shape |
|---|---|---|
| linear, `Conv1D` | `lora_A.weight`, `lora_B.weight` | (r, in), (out, r) |
| DoRA's magnitudes | `lora_magnitude_vector` | (out,) |
| fused experts | see `peft_experts` | |
| embedding | `lora_embedding_A`, `lora_embedding_B` | (r, vocabulary), (width, r) |

Source: the files that PEFT 0.21.2 writes, and how it reads `target_modules` and the patterns of its configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters import peft_experts
from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places, named
from afina.errors import AdapterError, counted
from afina.techniques.dora import DoRA, DoRADelta
from afina.techniques.lora import LoRA, LoRADelta
from afina.techniques.lora_on_experts import ExpertPath, ExpertsDelta, expert_sites
from afina.tree import Delta, matches

# These starts change the base, so that an adapter saved as it is belongs to a base that is nowhere on disk.
_CONVERT = (
    "this start changed the base's weights; save the adapter with PEFT's "
    "save_pretrained(folder, path_initial_model_for_weight_conversion=…)"
)
_ALLOWED = Allowed(
    needed=("r", "lora_alpha"),
    types={
        "r": (int,),
        "lora_alpha": (int, float),
        "lora_dropout": (int, float),
        "target_modules": (list, str),
        "exclude_modules": (list, str),
        "modules_to_save": (list,),
        "layers_to_transform": (list, int),
        "rank_pattern": (dict,),
        "alpha_pattern": (dict,),
        "use_rslora": (bool,),
        "target_parameters": (list,),
    },
    items={
        "target_modules": str,
        "exclude_modules": str,
        "modules_to_save": str,
        "layers_to_transform": int,
        "target_parameters": str,
    },
    neutral={
        "use_dora": (False, None),
        "use_qalora": (False, None),
        "use_bdlora": (None, False),
        "lora_bias": (False, None),
        "bias": ("none", None),
        "layer_replication": (None,),
        "alora_invocation_tokens": (None, []),
        "trainable_token_indices": (None, [], {}),
        "arrow_config": (None,),
        "kasa_config": (None,),
        "monteclora_config": (None,),
        "velora_config": (None,),
        "enable_lora": (None,),
        "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    },
    # They tell how the adapter was made, which its tensors already contain.
    free=frozenset({
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config", "lora_ga_config", "megatron_config",
        "megatron_core", "merge_weights", "peft_version", "qalora_group_size", "revision", "runtime_config",
        "task_type",
    }),
    cures={"init_lora_weights": _CONVERT},
)  # fmt: skip


_MAGNITUDE = "lora_magnitude_vector"

# --- reading ------------------------------------------------------------------------------------------------------


def _part(match: re.Match[str]) -> str:
    name = match["part"]
    return name if "embedding" in name or name == _MAGNITUDE else f"{name}.weight"


def map_sites(model: nn.Module) -> dict[str, seams.MapSite]:
    """The maps of a model by name; see `Kind.sites`."""
    return {site.name: site for site in seams.map_sites(model)}


def named_maps(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str] | None:
    """The sites that PEFT would adapt; see `Kind.named`."""
    patterns = config.get("target_modules")
    if patterns is None:
        return None
    layers = config.get("layers_to_transform")
    chosen = {layers} if isinstance(layers, int) else set(layers or ())
    head = seams.head(model).name
    found: set[str] = set()
    for site in seams.map_sites(model):
        name = seen[site.name]
        if isinstance(patterns, str) and patterns.lower() == "all-linear":
            fits = site.kind != "embedding" and site.name != head
        else:
            fits = named(patterns, name)
        if chosen and not isinstance(patterns, str):
            fits = fits and site.block in chosen
        if fits and not named(config.get("exclude_modules"), name):
            found.add(site.name)
    return found


def _sites(model: nn.Module) -> dict[str, Any]:
    """The maps of a model, and its modules of fused experts."""
    return map_sites(model) | peft_experts.sites_of(model)


def _named(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str] | None:
    """The maps and the modules of experts that PEFT would adapt."""
    maps = named_maps(model, config, seen)
    experts = peft_experts.named_modules(model, config, seen)
    return experts or None if maps is None else maps | experts


def _misfit(site: Any, parts: Parts) -> dict[str, str]:
    """What is wrong with A and B for one map, or for a module of experts."""
    if not isinstance(site, seams.MapSite):
        return peft_experts.misfit(site, parts)
    ends = ("lora_embedding_A", "lora_embedding_B")
    if site.kind != "embedding":
        ends = ("lora_A.weight", "lora_B.weight")
    return _misfits(site, parts, ends, {})


def _misfit_dora(site: seams.MapSite, parts: Parts) -> dict[str, str]:
    """What is wrong with A, B and the magnitudes for one map."""
    ends = ("lora_embedding_A", "lora_embedding_B")
    if site.kind != "embedding":
        ends = ("lora_A.weight", "lora_B.weight")
    return _misfits(site, parts, ends, {_MAGNITUDE: (site.out_features,)})


def _misfits(
    site: seams.MapSite, parts: Parts, ends: tuple[str, str], more: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    wrong = {part: "not what LoRA has here" for part in parts if part not in (*ends, *more)}
    wrong |= {part: "the file lacks it" for part in (*ends, *more) if part not in parts}
    if wrong:
        return wrong
    rank = _rank(parts)
    shapes = ((rank, site.in_features), (site.out_features, rank))
    wanted = {**dict(zip(ends, shapes, strict=True)), **more}
    return {
        part: f"shape {tuple(parts[part].shape)}, the model wants {shape}"
        for part, shape in wanted.items()
        if tuple(parts[part].shape) != shape
    }


def _technique_of(model: nn.Module, config: Config, places: Places) -> LoRA:
    """The LoRA that makes these places.

    Raises:
        AdapterError: when the ranks of the file are others than those of the configuration.
    """
    peft_experts.refuse_unknown(model, config, places.seen)
    ranks, seen = _ranks(model, config, places)
    said = {n: pattern(config.get("rank_pattern"), seen[n], config["r"]) for n in ranks}
    alphas = {n: pattern(config.get("alpha_pattern"), seen[n], config["lora_alpha"]) for n in ranks}
    lying = [
        f"{n}: file {rank}, configuration {_or(said[n])}"
        for n, rank in ranks.items()
        if rank not in said[n]
    ]
    if lying:
        raise AdapterError(
            f"ranks in the file and in the configuration differ, at {counted(len(lying), 'place')}",
            got="; ".join(lying[:4]),
        )
    unsure = [f"{n}: {_or(values)}" for n, values in alphas.items() if len(values) > 1]
    if unsure:
        raise AdapterError(
            f"several patterns of alpha_pattern name one place, at {counted(len(unsure), 'place')}",
            got="; ".join(unsure[:4]),
            cure="the first counted in training, and PEFT sorts them when it saves: keep the one that counted",
        )
    every = [*seams.map_sites(model), *expert_sites(model)]
    others = [site.name for site in every if site.name not in ranks]
    made = DoRA if config.get("use_dora") else LoRA
    return made(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        rslora=bool(config.get("use_rslora")),
        target=tuple(ranks),
        exclude=tuple(n for n in others if any(matches(n, target) for target in ranks)),
        rank_pattern=_exactly(ranks, config["r"]),
        alpha_pattern=_exactly({n: a for n, (a,) in alphas.items()}, config["lora_alpha"]),
        modules_to_save=tuple(places.whole),
    )


def _ranks(
    model: nn.Module, config: Config, places: Places
) -> tuple[dict[str, int], dict[str, str]]:
    """The rank of each place, and how the file calls it; a projection of experts is a place of its own."""
    experts, wanted = peft_experts.sites_of(model), config.get("target_parameters") or ()
    ranks: dict[str, int] = {}
    seen = dict(places.seen)
    for name, parts in places.parts.items():
        if name not in experts:
            ranks[name] = _rank(parts)
            continue
        for start, site in peft_experts.layers(experts[name], parts, wanted).items():
            ranks[site.name] = peft_experts.rank_of(site, start, parts)
            seen[site.name] = f"{seen[name]}.{site.projection}"
    return ranks, seen


def _rank(parts: Parts) -> int:
    """The first size of A, whatever else fits."""
    a = next(tensor for part, tensor in parts.items() if "_A" in part)
    return a.shape[0] if a.dim() else 0


def _or(values: list[Any]) -> str:
    return " or ".join(map(str, values))


def _exactly(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Names with other values than the default, as `LoRA` reads them.

    It takes a name for the end of longer ones too, and the last that matches counts: so longer names stand last, and a
    name stands there with the default where a shorter one would catch it.
    """
    other = {n for n, v in values.items() if v != default}
    caught = {n for n in values if any(n.endswith(f".{shorter}") for shorter in other)}
    return {n: values[n] for n in sorted(other | caught, key=lambda n: (len(n), n))}


def pattern(found: Mapping[str, Any] | None, name: str, default: Any) -> list[Any]:
    """The values of the patterns that match a name, or its end, as regular expressions; the default where none does.

    In PEFT the first that matches counts; but it sorts them when it saves, so that of several nobody knows the first.
    """
    values = [v for k, v in (found or {}).items() if re.fullmatch(rf"(.*\.)?({k})", name)]
    return [v for i, v in enumerate(values) if v not in values[:i]] or [default]


# --- writing ------------------------------------------------------------------------------------------------------


def _tensors(delta: Delta) -> dict[str, Tensor]:
    if isinstance(delta, ExpertsDelta):
        return peft_experts.tensors_of(delta)
    assert isinstance(delta, LoRADelta)
    more = {_MAGNITUDE: delta.m} if isinstance(delta, DoRADelta) else {}
    a_RI, b_OR = delta.factors()
    if delta.kind == "embedding":
        return {"lora_embedding_A": a_RI, "lora_embedding_B": b_OR, **more}
    return {"lora_A.weight": a_RI, "lora_B.weight": b_OR, **more}


def _computed(part: Part) -> bool:
    """Whether the file has a product of what trains and of where it started."""
    return any(isinstance(d, LoRADelta) and d.started for d in part.deltas.values())


def _config(part: Part) -> dict[str, Any]:
    """The configuration of one LoRA; lists and tables are sorted, so that equal edits give equal files."""
    lora = part.technique
    assert isinstance(lora, LoRA)
    deltas = {n: d for n, d in part.deltas.items() if isinstance(d, LoRADelta)}
    paths = peft_experts.paths_of(part.deltas)
    # One that started from the weights is a plain LoRA of twice the rank, at the same scale.
    ranks = {name: _rank_of(delta) for name, delta in {**deltas, **paths}.items()}
    if lora.offset:
        alpha = lora.alpha * (math.sqrt(2) if lora.rslora else 2)
        lora = lora.model_copy(update={"rank": 2 * lora.rank, "alpha": alpha})
    alphas = {name: _alpha(delta, lora) for name, delta in {**deltas, **paths}.items()}
    return {
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        # PEFT has no dropout beside experts, and refuses the whole file where it is said.
        "lora_dropout": 0.0 if paths else lora.dropout,
        "target_modules": target_modules(part.model, list(deltas)),
        "target_parameters": sorted(paths) or None,
        "exclude_modules": None,
        "use_rslora": lora.rslora,
        "use_dora": isinstance(lora, DoRA),
        "bias": "none",
        "fan_in_fan_out": any(delta.kind == "conv1d" for delta in deltas.values()),
        "rank_pattern": patterns(ranks, lora.rank),
        "alpha_pattern": {n: _plain(a) for n, a in patterns(alphas, lora.alpha).items()},
        "init_lora_weights": True,
    }


def patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Names with other values than the default, as PEFT reads them: regular expressions for the end of a name.

    A name that is the end of a longer one is tied to its beginning, so that no order matters.
    """
    return {
        f"^{n}" if any(longer.endswith(f".{n}") for longer in values) else n: value
        for n, value in sorted(values.items())
        if value != default
    }


def _rank_of(delta: LoRADelta | ExpertPath) -> int:
    """The rank that a place has in the file."""
    return delta.factors()[0].shape[0] if isinstance(delta, LoRADelta) else delta.rank


def _alpha(delta: LoRADelta | ExpertPath, lora: LoRA) -> float:
    """The alpha of one place; the technique's own where the scale says that, free of rounding."""
    alpha = delta.scaling * (_rank_of(delta) ** 0.5 if lora.rslora else _rank_of(delta))
    return lora.alpha if math.isclose(alpha, lora.alpha, rel_tol=1e-12) else round(alpha, 9)


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def target_modules(model: nn.Module, targets: list[str]) -> list[str]:
    """Last parts of the names where these say exactly the targets (as PEFT reads them), else whole names."""
    tails = sorted({name.rsplit(".", 1)[-1] for name in targets})
    reached = {s.name for s in seams.map_sites(model) if s.name.rsplit(".", 1)[-1] in tails}
    return tails if reached == set(targets) else sorted(targets)


LORA = Kind(
    technique=LoRA,
    peft_type="LORA",
    allowed=_ALLOWED,
    ending=re.compile(
        r"\.(?P<part>(base_layer\.)?lora_A|(base_layer\.)?lora_B|lora_embedding_A|lora_embedding_B)"
        r"(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.weight)?$"
    ),
    part=_part,
    tensors=_tensors,
    config=_config,
    sites=_sites,
    named=_named,
    misfit=_misfit,
    technique_of=_technique_of,
    variant=lambda config: config.get("use_dora") is not True,
    computed=_computed,
    exact=lambda part: not _computed(part),
)

DORA_NAME = "LORA with use_dora"
"""How an error calls it."""

DORA = replace(
    LORA,
    technique=DoRA,
    allowed=replace(
        LORA.allowed,
        neutral={**LORA.allowed.neutral, "use_dora": (True,), "target_parameters": (None, [])},
    ),
    sites=map_sites,
    named=named_maps,
    ending=re.compile(
        r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
        r"(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.weight)?$"
    ),
    misfit=_misfit_dora,
    variant=lambda config: config.get("use_dora") is True,
)
