"""Trainable tokens in PEFT's layout.

| what | ending of the key | shape |
|---|---|---|
| embedding | `trainable_tokens_delta` | (tokens, width), the rows themselves, in the order of `token_indices` |

In a LoRA's file they end in `token_adapter.trainable_tokens_delta`; see `beside_lora`.
A tied head has the same rows. PEFT writes them a second time under its name, and reads them without.

Source: the files that PEFT 0.21.2 writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places, named
from afina.errors import AdapterError
from afina.techniques.trainable_tokens import TokenRows, TrainableTokens
from afina.tree import Delta

ROWS = "trainable_tokens_delta"

INFIX = ".token_adapter."
"""In a LoRA's file the rows are in a child of the embedding."""

_ALLOWED = Allowed(
    needed=("token_indices",),
    types={
        "token_indices": (list,),
        "target_modules": (list, str),
        "exclude_modules": (list, str),
        "modules_to_save": (list,),
    },
    items={
        "token_indices": int,
        "target_modules": str,
        "exclude_modules": str,
        "modules_to_save": str,
    },
    neutral={},
    # The start is in the rows already.
    free=frozenset({
        "auto_mapping", "base_model_name_or_path", "inference_mode", "init_weights", "peft_version", "revision",
        "runtime_config", "task_type",
    }),
    cures={},
)  # fmt: skip


def _sites(model: nn.Module) -> dict[str, nn.Module]:
    name = seams.input_embedding(model)
    return {name: model.get_submodule(name)}


def _named(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str] | None:
    """The embedding, where the configuration says no other module."""
    patterns = config.get("target_modules")
    if patterns is None:
        return set(_sites(model))
    return {
        name for name, _ in model.named_modules() if name and named(patterns, seen[name])
    } & set(_sites(model))


def _misfit(site: nn.Module, parts: Parts) -> dict[str, str]:
    width = site.get_parameter("weight").shape[1]
    return {
        part: f"shape {tuple(tensor.shape)}, the model wants (tokens, {width})"
        for part, tensor in parts.items()
        if tensor.dim() != 2 or tensor.shape[1] != width
    }


def _once(model: nn.Module, parts: dict[str, dict[str, Tensor]]) -> None:
    """Takes out the rows of a tied head.

    Raises:
        AdapterError: they are others than the embedding's.
    """
    head = seams.head(model)
    if not head.tied or head.name not in parts:
        return
    again, first = parts[head.name], parts.get(seams.input_embedding(model))
    if first is None or not all(
        torch.equal(again[end], first.get(end, again[end][:0])) for end in again
    ):
        raise AdapterError(
            "head and embedding are one tensor in this model, and their rows were trained apart",
            got=f"other rows at {head.name} in the file",
            wanted="the same rows at both",
        )
    del parts[head.name]


def _technique_of(model: nn.Module, config: Config, places: Places) -> TrainableTokens:
    """The tokens of these places.

    Raises:
        AdapterError: the file has other many rows than the configuration tokens.
    """
    ids = config["token_indices"]
    for name, parts in places.parts.items():
        if len(parts[ROWS]) != len(ids):
            raise AdapterError(
                f"{name}: the file has other many rows than the configuration has tokens",
                got=f"{len(parts[ROWS])} and {len(ids)}",
            )
    return TrainableTokens(tokens=tuple(ids), modules_to_save=tuple(places.whole))


def has_tokens(config: Config) -> bool:
    """Whether this is a LoRA that has the rows of tokens too."""
    return config.get("peft_type") == "LORA" and bool(config.get("trainable_token_indices"))


def rows_apart(
    config: Config, tensors: Mapping[str, Tensor]
) -> tuple[tuple[dict[str, Any], dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]:
    """Takes a LoRA's file apart that has the rows of tokens too (`trainable_token_indices`).

    Returns:
        Configuration and tensors of the tokens, and those of the LoRA.

    Raises:
        AdapterError: rows of other modules than one embedding.
    """
    indices = config["trainable_token_indices"]
    table: dict[str, Any] = indices if isinstance(indices, dict) else {"": indices}
    if len(table) > 1 or not all(isinstance(ids, list) for ids in table.values()):
        raise AdapterError(
            "trainable_token_indices of a LoRA",
            got=str(table)[:120],
            wanted="ids, for one embedding",
        )
    ((module, ids),) = table.items()
    common = {k: config[k] for k in ("base_model_name_or_path", "revision") if k in config}
    kind = {"peft_type": "TRAINABLE_TOKENS", "token_indices": ids}
    target = {"target_modules": [module]} if module else {}
    rows = {k.replace(INFIX, "."): t for k, t in tensors.items() if _is_row(k)}
    rest = {k: v for k, v in config.items() if k != "trainable_token_indices"}
    return ({**common, **kind, **target}, rows), (
        rest,
        {k: t for k, t in tensors.items() if not _is_row(k)},
    )


def _is_row(key: str) -> bool:
    return INFIX in key and ROWS in key


def _tensors(delta: Delta) -> dict[str, Tensor]:
    return {ROWS: delta.rows} if isinstance(delta, TokenRows) else {}


def _config(part: Part) -> dict[str, Any]:
    found = {n: d for n, d in part.deltas.items() if isinstance(d, TokenRows)}
    ((name, delta),) = found.items()
    return {
        "token_indices": list(delta.ids),
        "target_modules": [name],
        "init_weights": True,
    }


TOKENS = Kind(
    technique=TrainableTokens,
    peft_type="TRAINABLE_TOKENS",
    allowed=_ALLOWED,
    ending=re.compile(r"\.(?P<part>trainable_tokens_delta)(\.(?P<adapter>[^.]+))?$"),
    tensors=_tensors,
    config=_config,
    sites=_sites,
    named=_named,
    misfit=_misfit,
    once=_once,
    technique_of=_technique_of,
)
