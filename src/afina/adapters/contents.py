"""What an edit is in PEFT's layout: the tensors under its keys, and the configuration beside them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from afina import seams
from afina.adapters.fitting import KINDS
from afina.adapters.kinds import Kind
from afina.adapters.layout import PREFIX
from afina.errors import AdapterError
from afina.tree import Edit


def peft_tensors(edit: Edit) -> dict[str, Tensor]:
    """The edit's tensors under PEFT's keys; writing into them writes into the model.

    Raises:
        AdapterError: when the edit is not one technique that PEFT's layout can hold.
    """
    kind = _kind(edit)
    found: dict[str, Tensor] = {}
    for name, delta in edit.deltas.items():
        module = PREFIX + name.removesuffix(f".{kind.technique.key}")
        found |= {f"{module}.{part}": tensor for part, tensor in kind.tensors(delta).items()}
    trained = {id(p) for p in edit.in_place.values()}
    # A tied tensor has two names, and PEFT, which copies whole modules, must find it under both.
    for name, parameter in edit.model.named_parameters(remove_duplicate=False):
        if id(parameter) in trained:
            found[PREFIX + name] = parameter
    return found


def peft_config(edit: Edit, base: str, revision: str | None = None) -> dict[str, Any]:
    """The contents of `adapter_config.json`.

    Args:
        edit: of one technique.
        base: name or folder of the base model.
        revision: of a base on the hub.

    Raises:
        AdapterError: when the edit is not one technique that PEFT's layout can hold.
    """
    kind = _kind(edit)
    trained = {id(p) for p in edit.in_place.values()}
    every = edit.model.named_parameters(remove_duplicate=False)
    whole = sorted({name.rsplit(".", 1)[0] for name, p in every if id(p) in trained})
    return {
        "peft_type": kind.peft_type,
        "task_type": _task(edit.model, whole),
        "base_model_name_or_path": base,
        "revision": revision,
        "modules_to_save": whole or None,
        "inference_mode": True,
        **kind.config(edit),
    }


def _kind(edit: Edit) -> Kind:
    kinds = {kind.technique.key: kind for kind in KINDS.values()}
    keys = [technique.key for technique in edit.techniques]
    if len(keys) != 1 or keys[0] not in kinds:
        raise AdapterError(
            "the layout of PEFT does not hold this",
            got=", ".join(keys) or "no technique",
            wanted="one of " + ", ".join(kinds),
            cure="save a fully trained model with model.save_pretrained",
        )
    return kinds[keys[0]]


def _task(model: nn.Module, whole: list[str]) -> str | None:
    """PEFT's name of the task. For classifiers PEFT expects the head in the file, so they have none without it."""
    name = type(model).__name__
    if "CausalLM" in name or "LMHeadModel" in name:
        return "CAUSAL_LM"
    if "Classification" in name and seams.head(model).name in whole:
        return "SEQ_CLS" if "Sequence" in name else "TOKEN_CLS"
    return None
