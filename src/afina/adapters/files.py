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
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from afina import seams
from afina.errors import AdapterError, nearest
from afina.table import apply
from afina.techniques.lora import LoRA, LoRADelta
from afina.tree import Edit

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

# What plain LoRA leaves at these values; anything else is a variant that would load as something it is not.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
READ = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules",
    "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "inference_mode", "fan_in_fan_out",
}  # fmt: skip
# They tell how the adapter was made, which its tensors already contain.
PAST = {
    "auto_mapping", "corda_config", "eva_config", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "ensure_weight_tying",
}  # fmt: skip


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
    _drop_base_copies(model, tensors)
    technique = _technique(model, config, tensors)
    edit = apply(model, [technique])
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


def peft_tensors(edit: Edit) -> dict[str, Tensor]:
    """The edit's tensors under PEFT's keys; writing into them writes into the model."""
    found: dict[str, Tensor] = {}
    for name, delta in edit.deltas.items():
        if not isinstance(delta, LoRADelta):
            raise AdapterError(
                "PEFT's layout cannot hold this", got=type(delta).__name__, wanted="LoRA"
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
            "PEFT's layout holds one LoRA",
            got=", ".join(t.key for t in edit.techniques) or "no technique",
            cure="save a fully trained model with model.save_pretrained",
        )
    lora = edit.techniques[0]
    assert isinstance(lora, LoRA)
    deltas = {
        n.removesuffix(".lora"): d for n, d in edit.deltas.items() if isinstance(d, LoRADelta)
    }
    ranks = {name: delta.rank for name, delta in deltas.items()}
    alphas = {name: _alpha(delta, lora.rslora) for name, delta in deltas.items()}
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


def _alpha(delta: LoRADelta, rslora: bool) -> float:
    return round(delta.scaling * (delta.rank**0.5 if rslora else delta.rank), 9)


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


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`, checked to be plain LoRA.

    Raises:
        AdapterError: when the file is missing, is not JSON, lacks rank or alpha, or describes a variant.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(
            "there is no adapter here", got=folder, wanted=f"a folder with {CONFIG}"
        ) from None
    except ValueError as error:
        raise AdapterError(
            "the adapter's configuration is not JSON", got=f"{path}: {error}"
        ) from None
    problems: list[str] = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type {config.get('peft_type')!r}: only LORA can be loaded")
    problems += [
        f"{key} is missing (it is never guessed)"
        for key in ("r", "lora_alpha")
        if key not in config
    ]
    problems += [
        f"{key} = {config[key]!r}: a variant this version does not know"
        for key, neutral in NEUTRAL.items()
        if key in config and config[key] not in neutral
    ]
    known = READ | PAST | set(NEUTRAL)
    for key, value in config.items():
        if key not in known and value not in (None, False, {}, []):
            near = nearest(key, sorted(known), 1)
            hint = f" (near: {near[0]})" if near else ""
            problems.append(f"{key} = {value!r}: an unknown setting{hint}")
    if problems:
        raise AdapterError(f"cannot load {path}", got="; ".join(problems), wanted="plain LoRA")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder.

    Raises:
        AdapterError: when there is no safetensors file, or it is damaged.
    """
    path = folder / WEIGHTS
    if not path.exists():
        pickled = (folder / "adapter_model.bin").exists()
        raise AdapterError(
            "the adapter has no safetensors file",
            got="adapter_model.bin, a pickle, which can run code when it is read"
            if pickled
            else folder,
            wanted=path,
            cure="convert it with PEFT: model.save_pretrained(folder)" if pickled else None,
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise AdapterError("the adapter's file is damaged", got=f"{path}: {error}") from None


def _drop_base_copies(model: nn.Module, tensors: dict[str, Tensor]) -> None:
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


def _technique(model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]) -> LoRA:
    """The LoRA value that makes exactly the places the file has tensors for."""
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


def _pattern(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that is the name or matches its end as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if pattern == name or re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default
