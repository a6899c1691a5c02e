"""Which LoRA a file in PEFT's layout describes, and whether it is all there and made for this model.

Source: how PEFT 0.21.2 reads `target_modules`, `rank_pattern` and the other patterns of its configuration.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.adapters.layout import PREFIX
from afina.errors import AdapterError
from afina.techniques.lora import LoRA


def drop_base_copies(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Takes out the copies of base tensors that PEFT writes beside an adapted embedding.

    Raises:
        AdapterError: when such a copy differs from this model's own tensor.
    """
    for key in [k for k in tensors if ".base_layer." in k]:
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        copy = tensors.pop(key)
        own = dict(model.named_parameters(remove_duplicate=False)).get(name)
        if own is None or own.shape != copy.shape or not torch.equal(own, copy.to(own)):
            raise AdapterError(
                "the adapter was made beside other base weights than this model's",
                got=f"{key} differs from {name}",
                cure="load the base model that adapter_config.json names",
            )


def technique_of(model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]) -> LoRA:
    """The LoRA value that makes exactly the places the file has tensors for.

    Raises:
        AdapterError: when the file names modules that the model has not, lacks some that its configuration names,
            or its ranks are others than the configuration says.
    """
    ranks: dict[str, int] = {}
    whole: set[str] = set()
    ending = re.compile(r"\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)$")
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        found = ending.search(name)
        if found is None:
            whole.add(name.rsplit(".", 1)[0])
        elif "_A" in found[1]:
            ranks[name[: found.start()]] = tensor.shape[0]
    modules = {name for name, _ in model.named_modules()}
    strangers = sorted((set(ranks) | whole) - modules)
    if strangers or not ranks:
        raise AdapterError(
            f"the adapter changes {len(strangers)} modules that this model does not have"
            if strangers
            else "the adapter's file holds no LoRA tensors",
            got=", ".join(strangers[:4]) or None,
            wanted=", ".join(sorted(m for m in modules if "." in m)[:2]) + ", …",
            cure=f"load the base model {config.get('base_model_name_or_path')!r}",
        )
    absent = _absent(model, config, set(ranks), whole)
    if absent:
        raise AdapterError(
            "the adapter's file lacks modules that its configuration names",
            got=", ".join(absent[:4]),
            cure="get the whole adapter again, or load the base model that it was made for",
        )
    alphas = {n: _pattern(config.get("alpha_pattern"), n, config["lora_alpha"]) for n in ranks}
    expected = {n: _pattern(config.get("rank_pattern"), n, config["r"]) for n in ranks}
    lying = [
        f"{n}: file {ranks[n]}, configuration {expected[n]}"
        for n in ranks
        if ranks[n] != expected[n]
    ]
    if lying:
        raise AdapterError(
            "ranks in the file and in the configuration differ", got="; ".join(lying[:4])
        )
    return LoRA(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        rslora=bool(config.get("use_rslora")),
        target=tuple(ranks),
        rank_pattern={n: r for n, r in ranks.items() if r != config["r"]},
        alpha_pattern={n: a for n, a in alphas.items() if a != config["lora_alpha"]},
        modules_to_save=tuple(sorted(whole)),
    )


def _absent(
    model: nn.Module, config: dict[str, Any], adapted: set[str], whole: set[str]
) -> list[str]:
    """Modules of this model that PEFT would look for in the file and that are not there."""
    layers = config.get("layers_to_transform")
    chosen = {layers} if isinstance(layers, int) else set(layers or ())
    sites = [s.name for s in seams.map_sites(model) if not chosen or s.block in chosen]
    absent = [
        name
        for name in sites
        if _named(config.get("target_modules"), name)
        and not _named(config.get("exclude_modules"), name)
        and name not in adapted
        and not any(f"{name}.".startswith(f"{w}.") for w in whole)
    ]
    # PEFT lists heads by every name it knows; those that this model has not are nobody's loss.
    for saved in config.get("modules_to_save") or ():
        there = [n for n in seams.holders(model) if _named([saved], n)]
        if there and not any(f".{saved}." in f".{w}." for w in whole):
            absent.append(there[0])
    return absent


def _named(patterns: list[str] | str | None, name: str) -> bool:
    """PEFT's rule: text is a regular expression of the whole name, a list holds names or their ends."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") for p in patterns or ())


def _pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that is the name or matches its end as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if pattern == name or re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default
