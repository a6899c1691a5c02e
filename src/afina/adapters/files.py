"""Adapters on disk, in Hugging Face PEFT's layout: written by afina and read by PEFT, and the reverse.

`adapter_config.json` says what was adapted, `adapter_model.safetensors` holds the tensors:

| what | key after `base_model.model.<module>.` | shape |
|---|---|---|
| linear, `Conv1D` | `lora_A.weight`, `lora_B.weight` | (r, in), (out, r) |
| embedding | `lora_embedding_A`, `lora_embedding_B` | (r, vocabulary), (width, r) |
| whole module | the module's own names | the module's own |

Source: the files that PEFT 0.21.2 writes and reads.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from afina import seams
from afina.adapters.fitting import drop_base_copies, technique_of
from afina.adapters.layout import CONFIG, PREFIX, WEIGHTS, read_config, read_tensors
from afina.errors import AdapterError, ConfigError, TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA, LoRADelta
from afina.tree import Edit


def save(edit: Edit, folder: str | Path, *, base: str, tokenizer: Any = None) -> Path:
    """Writes the adapter of `edit` to `folder`, whole or not at all.

    Args:
        edit: of a model that LoRA changed.
        folder: is replaced if it is an adapter already.
        base: name or folder of the base model, for whoever loads the adapter.
        tokenizer: saved beside it, with its chat template.

    Returns:
        The folder.

    Raises:
        AdapterError: when the edit has something that PEFT's layout cannot hold, or the folder holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / CONFIG).exists() and any(folder.iterdir()):
        raise AdapterError(
            "the folder holds something else than an adapter",
            got=folder,
            cure="name another folder",
        )
    config = peft_config(edit, base)
    # Clones, for a tied tensor stands under two keys and the file must hold it twice.
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in peft_tensors(edit).items()}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        save_file(dict(sorted(tensors.items())), temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True)
        (temporary / CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def replace_folder(temporary: Path, folder: Path) -> None:
    """Puts a finished folder in its place; an older one there is gone only after that."""
    if not folder.exists():
        temporary.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old)


def load(model: nn.Module, folder: str | Path) -> Edit:
    """Puts the adapter in `folder` onto `model`; every tensor of the file is applied, or none.

    Args:
        model: the base model, unchanged.
        folder: in PEFT's layout, holding LoRA.

    Returns:
        The edit; its `undo()` takes the adapter off.

    Raises:
        AdapterError: listing what does not fit.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    drop_base_copies(model, tensors)
    try:
        edit = apply(model, [technique_of(model, config, tensors)])
    except (TechniqueError, ConfigError, ValidationError, re.error) as error:
        raise AdapterError(
            f"the adapter in {folder} cannot be put onto this model", got=error
        ) from None
    try:
        restore(edit, tensors)
    except BaseException:
        edit.undo()
        raise
    return edit


def restore(edit: Edit, tensors: dict[str, Tensor]) -> None:
    """Gives `edit`'s tensors the values read from an adapter file.

    Raises:
        AdapterError: when a tensor of either side has no partner, or a shape differs; nothing is changed then.
    """
    mine = peft_tensors(edit)
    problems = [f"{key}: the model has no such place" for key in sorted(set(tensors) - set(mine))]
    problems += [f"{key}: the file lacks it" for key in sorted(set(mine) - set(tensors))]
    problems += [
        f"{key}: shape {tuple(tensors[key].shape)}, the model wants {tuple(mine[key].shape)}"
        for key in sorted(set(mine) & set(tensors))
        if mine[key].shape != tensors[key].shape
    ]
    problems += [] if problems else _torn(mine, tensors)
    if problems:
        more = f"\n          … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise AdapterError(
            f"the adapter does not fit this model: {len(problems)} of its tensors",
            got="\n          ".join(problems[:8]) + more,
            cure="load the base model that adapter_config.json names",
        )
    with torch.no_grad():
        for key, target in mine.items():
            target.copy_(tensors[key])


def _torn(mine: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[str]:
    """Keys of one tensor here (a tie) that hold two different ones in the file."""
    first: dict[int, str] = {}
    return [
        f"{key} and {first[id(target)]}: one tensor in this model, two that differ in the file"
        for key, target in mine.items()
        if not torch.equal(tensors[first.setdefault(id(target), key)], tensors[key])
    ]


def peft_tensors(edit: Edit) -> dict[str, Tensor]:
    """The edit's tensors under PEFT's keys; writing into them writes into the model."""
    found: dict[str, Tensor] = {}
    for name, delta in edit.deltas.items():
        if not isinstance(delta, LoRADelta):
            raise AdapterError(
                "the layout of PEFT cannot hold this", got=type(delta).__name__, wanted="LoRA"
            )
        module = PREFIX + name.removesuffix(".lora")
        if delta.kind == "embedding":
            found[f"{module}.lora_embedding_A"] = delta.a
            found[f"{module}.lora_embedding_B"] = delta.b
        else:
            found[f"{module}.lora_A.weight"] = delta.a
            found[f"{module}.lora_B.weight"] = delta.b
    trained = {id(p): p for p in edit.in_place.values()}
    # A tied tensor has two names, and PEFT, which copies whole modules, must find it under both.
    for name, parameter in edit.model.named_parameters(remove_duplicate=False):
        if id(parameter) in trained:
            found[PREFIX + name] = parameter
    return found


def peft_config(edit: Edit, base: str) -> dict[str, Any]:
    """The contents of `adapter_config.json`.

    Raises:
        AdapterError: when the edit is not one LoRA.
    """
    if [t.key for t in edit.techniques] != ["lora"]:
        raise AdapterError(
            "the layout of PEFT holds one LoRA",
            got=", ".join(t.key for t in edit.techniques) or "no technique",
            cure="save a fully trained model with model.save_pretrained",
        )
    lora = edit.techniques[0]
    assert isinstance(lora, LoRA)
    deltas = {
        n.removesuffix(".lora"): d for n, d in edit.deltas.items() if isinstance(d, LoRADelta)
    }
    ranks = {name: delta.rank for name, delta in deltas.items()}
    alphas = {name: _alpha(delta, lora) for name, delta in deltas.items()}
    whole = sorted({name.rsplit(".", 1)[0] for name in _names(edit)})
    return {
        "peft_type": "LORA",
        "task_type": _task(edit.model, whole),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(edit.model, list(deltas)),
        "exclude_modules": None,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": any(delta.kind == "conv1d" for delta in deltas.values()),
        "modules_to_save": whole or None,
        "rank_pattern": {n: r for n, r in sorted(ranks.items()) if r != lora.rank},
        "alpha_pattern": {n: _plain(a) for n, a in sorted(alphas.items()) if a != lora.alpha},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _names(edit: Edit) -> list[str]:
    trained = {id(p) for p in edit.in_place.values()}
    every = edit.model.named_parameters(remove_duplicate=False)
    return [name for name, p in every if id(p) in trained]


def _alpha(delta: LoRADelta, lora: LoRA) -> float:
    """The alpha of one place; the technique's own where the scale says that, free of rounding."""
    alpha = delta.scaling * (delta.rank**0.5 if lora.rslora else delta.rank)
    return lora.alpha if math.isclose(alpha, lora.alpha, rel_tol=1e-12) else round(alpha, 9)


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _task(model: nn.Module, whole: list[str]) -> str | None:
    """PEFT's name of the task. For classifiers PEFT expects the head in the file, so they have none without it."""
    name = type(model).__name__
    if "CausalLM" in name or "LMHeadModel" in name:
        return "CAUSAL_LM"
    if "Classification" in name and seams.head(model).name in whole:
        return "SEQ_CLS" if "Sequence" in name else "TOKEN_CLS"
    return None


def _target_modules(model: nn.Module, targets: list[str]) -> list[str]:
    """Last parts of the names where these say exactly the targets (as PEFT reads them), else whole names."""
    tails = sorted({name.rsplit(".", 1)[-1] for name in targets})
    reached = {s.name for s in seams.map_sites(model) if s.name.rsplit(".", 1)[-1] in tails}
    return tails if reached == set(targets) else sorted(targets)
