"""What PEFT keeps in one folder with a LoRA: rows of tokens, and biases of the base.

| in `adapter_config.json` | what the file has more | here |
|---|---|---|
| `trainable_token_indices` | `<embedding>.token_adapter.trainable_tokens_delta` | LoRA and trainable tokens |
| `bias` = "all" or "lora_only" | `<module>.bias`, `<adapted map>.base_layer.bias` | LoRA and BitFit, when read |

Source: the files that PEFT 0.21.2 writes; there "all" trains what has "bias" in its name, and "lora_only" the biases of
the maps that LoRA is beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.adapters.kinds import Config, Kind, Part
from afina.adapters.layout import PREFIX
from afina.adapters.names import plain_module
from afina.adapters.peft_tokens import INFIX, TOKENS, has_tokens, rows_apart
from afina.errors import AdapterError, counted
from afina.techniques.bitfit import biased_norms
from afina.techniques.trainable_tokens import TokenLogits, TokenRows, TrainableTokens
from afina.tree import Delta

Pair = tuple[dict[str, Any], dict[str, Tensor]]
"""Configuration and tensors of one technique."""

BESIDE = {"trainable_token_indices": "trainable_tokens", "bias": "bitfit"}
"""The keys of a configuration that say what more there is, and the technique that it is here."""

WITH_BIASES = ("all", "lora_only")
_BASES = (f"{INFIX}base_layer.", ".base_layer.")

# --- reading ------------------------------------------------------------------------------------------------------


def is_several(config: Config) -> bool:
    """Whether this is a LoRA that has more than a LoRA in its folder."""
    return bool(more_of(config))


def more_of(config: Config) -> set[str]:
    """The keys of a LoRA's configuration that say so."""
    if config.get("peft_type") != "LORA":
        return set()
    tokens = {"trainable_token_indices"} if has_tokens(config) else set[str]()
    return tokens | ({"bias"} if config.get("bias") in WITH_BIASES else set[str]())


def taken_apart(model: nn.Module, config: Config, tensors: Mapping[str, Tensor]) -> list[Pair]:
    """Each technique's configuration and tensors.

    Raises:
        AdapterError: rows of other modules than one embedding, or biases that are none of the model's.
    """
    rest: Pair = ({**config}, dict(tensors))
    found: list[Pair] = []
    if has_tokens(config):
        rows, rest = rows_apart(*rest)
        found.append(rows)
    if config.get("bias") in WITH_BIASES:
        biases, rest = _biases_apart(model, *rest)
        found += [biases] if biases[1] else []
    return [*found, rest]


def _biases_apart(
    model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Pair, Pair]:
    saved: Sequence[str] = config.get("modules_to_save") or ()
    named = {key: name for key in tensors if (name := _bias_of(key, saved)) is not None}
    own: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    able = {s.name for s in seams.map_sites(model)} | set(biased_norms(model))
    targets: set[str] = set()
    found: dict[str, Tensor] = {}
    lost: list[str] = []
    for key, name in sorted(named.items()):
        # A tied bias stands under all its names, and trains under that of a map or norm.
        names = [n for n, p in own.items() if p is own.get(name)]
        places = [n.removesuffix(".bias") for n in names if n.removesuffix(".bias") in able]
        if not places:
            lost.append(name)
            continue
        targets.update(places[:1])
        for one in (PREFIX + n for n in names):
            if not torch.equal(found.setdefault(one, tensors[key]), tensors[key]):
                lost.append(f"{name}, which is one tensor in this model and two in the file")
    wanted = {n for n in _expected(config["bias"], own, tensors) if not _is_saved(n, saved)}
    lacking = wanted - {k.removeprefix(PREFIX) for k in found}
    if lost or lacking:
        told = [*lost, *(f"{name}: the file lacks it" for name in sorted(lacking))]
        raise AdapterError(
            f"bias = {config['bias']!r}: not the biases of this model ({counted(len(told), 'tensor')})",
            got="; ".join(told[:4]),
            wanted="the biases of maps and norms, all of them",
            cure="load the base model that adapter_config.json names",
        )
    common = {k: config[k] for k in ("base_model_name_or_path", "revision") if k in config}
    biases = {**common, "peft_type": "BITFIT", "target_modules": sorted(targets)}
    left = {k: t for k, t in tensors.items() if k not in named and not _is_again(k, tensors)}
    return (biases, found), ({**config, "bias": "none"}, left)


def _bias_of(key: str, saved: Sequence[str]) -> str | None:
    """The base's own name of the bias that a key is of; None for other tensors, and those of modules saved whole."""
    if not key.endswith(".bias") or "lora_" in key:
        return None
    for infix in _BASES:
        key = key.replace(infix, ".")
    name = plain_module(key)
    return None if _is_saved(name, saved) else name


def _is_again(key: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether PEFT wrote this for its name alone: the biases of a module saved whole stand there up to three times."""
    again = tensors.get(key.replace(".modules_to_save.", "."))
    twice = ".modules_to_save." in key and again is not None and torch.equal(again, tensors[key])
    return key.endswith(".bias") and (twice or ".original_module." in key)


def _is_saved(name: str, saved: Sequence[str]) -> bool:
    """Whether `modules_to_save` names the module of a tensor, or one that holds it."""
    pieces = name.split(".")[:-1]
    above = (".".join(pieces[: i + 1]) for i in range(len(pieces)))
    return any(n.endswith(pattern) for n in above for pattern in saved)


def _expected(
    bias: str, own: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> set[str]:
    """Names of the biases that PEFT trained."""
    maps = {plain_module(key.partition(".lora_")[0]) for key in tensors if ".lora_" in key}
    every = {n for n in own if n.endswith(".bias")}
    return every if bias == "all" else {n for n in every if n.removesuffix(".bias") in maps}


# --- writing ------------------------------------------------------------------------------------------------------


def joined(parts: Sequence[Part]) -> list[Part]:
    """A LoRA and the rows of tokens as one part, where they are all there is: PEFT has them in one folder."""
    lora = next((part for part in parts if part.technique.key in ("lora", "dora")), None)
    rows = next((part for part in parts if isinstance(part.technique, TrainableTokens)), None)
    if lora is None or rows is None or len(parts) > 2 or set(lora.deltas) & set(rows.deltas):
        return list(parts)
    together = {**rows.deltas, **lora.deltas}
    return [replace(lora, deltas=together, in_place={**rows.in_place, **lora.in_place}, rows=True)]


def with_rows(kind: Kind) -> Kind:
    """A LoRA's kind for a part that has the rows of tokens too."""

    def tensors(delta: Delta) -> dict[str, Tensor]:
        if isinstance(delta, TokenRows | TokenLogits):
            return {f"{INFIX[1:]}{end}": t for end, t in TOKENS.tensors(delta).items()}
        return kind.tensors(delta)

    def config(part: Part) -> dict[str, Any]:
        (ids,) = [list(d.ids) for d in part.deltas.values() if isinstance(d, TokenRows)]
        return {**kind.config(part), "trainable_token_indices": ids}

    return replace(kind, tensors=tensors, config=config)


def together(found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several techniques, by their keys, under the keys of the edit that has them all.

    A LoRA's and those of the rows of tokens stand as in one file; those of others each behind their technique's key.
    """
    rows = found.get(TrainableTokens.key)
    lora = next((found[key] for key in ("lora", "dora") if key in found), None)
    if rows is not None and lora is not None and len(found) == 2:
        at = {key.rpartition(".")[0] for key in rows if key.endswith(ROWS_END)}
        if not any(key.startswith(f"{place}.lora_") for key in lora for place in at):
            moved = {
                f"{key.rpartition('.')[0]}{INFIX}{key.rpartition('.')[2]}"
                if key.endswith(ROWS_END)
                else key: t
                for key, t in rows.items()
            }
            return {**moved, **lora}
    return {f"{key}/{name}": t for key, tensors in found.items() for name, t in tensors.items()}


ROWS_END = ".trainable_tokens_delta"
