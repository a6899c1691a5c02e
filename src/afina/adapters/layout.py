"""The two files of an adapter in PEFT's layout: their names, what may stand in them, and reading them strictly.

Source: the files that PEFT 0.21.2 writes and reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from afina.errors import AdapterError, nearest

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
    if not isinstance(config, dict):
        raise AdapterError(
            "the adapter's configuration is not a table of settings", got=f"{path}: {config!r}"
        )
    problems = _wrong_types(config)
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


def _wrong_types(config: dict[str, Any]) -> list[str]:
    """What has another type than PEFT gives it; left out and null are not of any."""
    wanted: dict[str, tuple[type, ...]] = {
        "r": (int,),
        "lora_alpha": (int, float),
        "lora_dropout": (int, float),
        "target_modules": (list, str),
        "modules_to_save": (list,),
        "rank_pattern": (dict,),
        "alpha_pattern": (dict,),
    }
    numbers = ("r", "lora_alpha")
    return [
        f"{key} = {config[key]!r}: not {' or '.join(k.__name__ for k in kinds)}"
        for key, kinds in wanted.items()
        if key in config
        and (config[key] is not None or key in numbers)
        and (not isinstance(config[key], kinds) or isinstance(config[key], bool))
    ]


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
