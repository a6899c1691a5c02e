"""AdaLoRA in PEFT's layout.

| what | ending of the key | shape |
|---|---|---|
| linear, `Conv1D` | `lora_A`, `lora_B`, `lora_E`, without `.weight` | (r, in), (out, r), (r, 1) |

Only the directions that were not cut are in the file; `rank_pattern` says which of the first r they were. A module that
has none left has no tensors. PEFT's own files have empty ones there, which `layout` passes over.

Source: the files that PEFT 0.21.2 writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places
from afina.adapters.peft_lora import LORA, named_maps, target_modules
from afina.errors import AdapterError, counted
from afina.techniques.adalora import AdaLoRA, AdaLoRADelta
from afina.tree import Delta, matches

ENDS = ("lora_A", "lora_B", "lora_E")

_AS_LORA = (
    "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform",
    "rank_pattern",
)  # fmt: skip
"""Settings that say what they say of a LoRA."""

_ALLOWED = Allowed(
    needed=("init_r", "lora_alpha"),
    types={
        "init_r": (int,),
        "target_r": (int,),
        "tinit": (int,),
        "tfinal": (int,),
        "deltaT": (int,),
        "beta1": (float,),
        "beta2": (float,),
        "orth_reg_weight": (int, float),
        "total_step": (int,),
        **{key: LORA.allowed.types[key] for key in _AS_LORA},
    },
    items={key: item for key, item in LORA.allowed.items.items() if key in _AS_LORA},
    neutral={
        **{key: says for key, says in LORA.allowed.neutral.items() if key != "enable_lora"},
        "use_rslora": (False, None),
        "alpha_pattern": (None, {}),
        "target_parameters": (None, []),
        "init_lora_weights": (True, False, None),
    },
    # `r` is LoRA's, and says nothing here.
    free=LORA.allowed.free | {"r"},
    cures={},
)


# --- reading ------------------------------------------------------------------------------------------------------


def _sites(model: nn.Module) -> dict[str, seams.MapSite]:
    return {site.name: site for site in seams.map_sites(model) if site.kind != "embedding"}


def _named(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str] | None:
    """The sites that PEFT would adapt, without those that have no direction left."""
    found = named_maps(model, config, seen)
    if found is None:
        return None
    gone = {name for name, flags in _flags(config).items() if not any(flags)}
    return {name for name in found if seen[name] not in gone}


def _flags(config: Config) -> dict[str, list[bool]]:
    """Of each module, as the configuration calls it, which directions it has.

    Raises:
        AdapterError: what stands there is no such list.
    """
    found: dict[str, list[bool]] = {}
    for key, flags in (config.get("rank_pattern") or {}).items():
        if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
            raise AdapterError(
                "rank_pattern of an AdaLoRA says which directions of each module are left",
                got=f"{key}: {str(flags)[:60]}",
                wanted="a list of true and false",
            )
        found[re.sub(r"\.lora_E(\.[^.]+)?$", "", key)] = flags
    return found


def _misfit(site: seams.MapSite, parts: Parts) -> dict[str, str]:
    """What is wrong with A, B and E for one map."""
    wrong = {part: "not what AdaLoRA has here" for part in parts if part not in ENDS}
    wrong |= {part: "the file lacks it" for part in ENDS if part not in parts}
    if wrong:
        return wrong
    rank = _rank(parts)
    shapes = ((rank, site.in_features), (site.out_features, rank), (rank, 1))
    return {
        part: f"shape {tuple(parts[part].shape)}, the model wants {shape}"
        for part, shape in zip(ENDS, shapes, strict=True)
        if tuple(parts[part].shape) != shape
    }


def _rank(parts: Parts) -> int:
    return parts["lora_A"].shape[0] if parts["lora_A"].dim() else 0


def _technique_of(model: nn.Module, config: Config, places: Places) -> AdaLoRA:
    """The AdaLoRA that makes these places, with the ranks that they have.

    Raises:
        AdapterError: the ranks of the file are others than those of the configuration.
    """
    first = int(config["init_r"])
    ranks = {name: _rank(parts) for name, parts in places.parts.items()}
    flags = _flags(config)
    said = {n: sum(flags[s]) if (s := places.seen[n]) in flags else first for n in ranks}
    lying = [f"{n}: file {r}, configuration {said[n]}" for n, r in ranks.items() if r != said[n]]
    if lying:
        raise AdapterError(
            f"ranks in the file and in the configuration differ, at {counted(len(lying), 'place')}",
            got="; ".join(lying[:4]),
        )
    given = {
        ours: config[theirs]
        for ours, theirs in _SETTINGS.items()
        if config.get(theirs) is not None and ours not in _OF_ITS_RUN
    }
    others = (s.name for s in seams.map_sites(model) if s.name not in ranks)
    return AdaLoRA(
        **given,
        init_rank=first,
        target_rank=min(config.get("target_r") or 8, first),
        target=tuple(ranks),
        exclude=tuple(n for n in others if any(matches(n, target) for target in ranks)),
        rank_pattern=_exactly(ranks, first),
        modules_to_save=tuple(places.whole),
    )


def _exactly(ranks: Mapping[str, int], first: int) -> dict[str, int]:
    """Names with other ranks than the first, a name that is the end of longer ones before these."""
    if all(rank == first for rank in ranks.values()):
        return {}
    return {n: ranks[n] for n in sorted(ranks, key=lambda n: (len(n), n))}


_SETTINGS = {
    "init_rank": "init_r",
    "target_rank": "target_r",
    "tinit": "tinit",
    "tfinal": "tfinal",
    "delta_t": "deltaT",
    "beta1": "beta1",
    "beta2": "beta2",
    "orthogonality": "orth_reg_weight",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
}
"""Our settings by theirs."""

_OF_ITS_RUN = ("init_rank", "target_rank", "tinit", "tfinal")
"""Those that are read otherwise: the ranks below, and steps of a run that is over, which mean nothing in another."""


# --- writing ------------------------------------------------------------------------------------------------------


def _tensors(delta: Delta) -> dict[str, Tensor]:
    """The directions that are used; all of them are the parameters themselves."""
    assert isinstance(delta, AdaLoRADelta)
    used = delta.used()
    if used.all():
        return {"lora_A": delta.a, "lora_B": delta.b, "lora_E": delta.e}
    if not used.any():
        return {}
    return {"lora_A": delta.a[used], "lora_B": delta.b[:, used], "lora_E": delta.e[used]}


def _put(delta: Delta, parts: Parts) -> None:
    """Writes the directions of a file into those that are used."""
    assert isinstance(delta, AdaLoRADelta)
    used = delta.used()
    if used.any() and not delta.a.is_meta:
        delta.a[used], delta.e[used] = (parts[end].to(delta.a) for end in ("lora_A", "lora_E"))
        delta.b[:, used] = parts["lora_B"].to(delta.b)


def _config(part: Part) -> dict[str, Any]:
    technique = part.technique
    assert isinstance(technique, AdaLoRA)
    deltas = {n: d for n, d in part.deltas.items() if isinstance(d, AdaLoRADelta)}
    first = technique.init_rank
    flags = {name: _kept(delta, first) for name, delta in deltas.items()}
    cut = any(not all(kept) for kept in flags.values())
    left = [name for name, kept in flags.items() if any(kept)]
    schedule = next(iter(deltas.values())).schedule
    tinit, tfinal = technique.tinit or 0, technique.tfinal or 0
    total = tinit + tfinal + 1  # PEFT wants a number that its check lets pass
    if schedule is not None:
        tinit, tfinal, total = schedule.tinit, schedule.tfinal, schedule.total_steps
    return {
        **{theirs: _plain(getattr(technique, ours)) for ours, theirs in _SETTINGS.items()},
        "tinit": tinit,
        "tfinal": tfinal,
        "total_step": total,
        "rank_pattern": {f"{n}.lora_E": flags[n] for n in sorted(left)} if cut else None,
        "target_modules": target_modules(part.model, left),
        "exclude_modules": None,
        "bias": "none",
        "fan_in_fan_out": any(delta.transposed for delta in deltas.values()),
        "init_lora_weights": True,
    }


def _kept(delta: AdaLoRADelta, first: int) -> list[bool]:
    """Which of the first directions are in the file; of one that was read from a file without some, the first ones."""
    used = [bool(flag) for flag in delta.used().tolist()]
    return used + [False] * (first - len(used))


def _plain(value: Any) -> Any:
    """A whole number without a point, for PEFT's `lora_alpha` is one."""
    return int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value


ADALORA = Kind(
    technique=AdaLoRA,
    peft_type="ADALORA",
    allowed=_ALLOWED,
    ending=re.compile(r"\.(?P<part>lora_[ABE])(\.(?P<adapter>(?!weight$)[^.]+))?$"),
    tensors=_tensors,
    put=_put,
    config=_config,
    sites=_sites,
    named=_named,
    misfit=_misfit,
    technique_of=_technique_of,
    # Of a direction that was cut the file has nothing, and it may grow again.
    exact=lambda part: False,
)
