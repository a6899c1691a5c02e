"""What an edit is in an adapter's folder: the tensors under their keys, and the configuration beside them.

An edit of one technique is one folder, and so is a LoRA with the rows of tokens (`beside_lora`). Any other of several
is a folder with a folder for each, named by its key, so that PEFT loads from there the parts that it knows; in the
edit's own table the keys of a part begin with `KEY/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.adapters.beside_lora import joined, with_rows
from afina.adapters.fitting import KINDS
from afina.adapters.kinds import Kind, Part
from afina.adapters.layout import PREFIX, STACK
from afina.errors import AdapterError
from afina.tree import Edit


def parts_of(edit: Edit) -> list[Part]:
    """What each technique has in the model, those left out that train nothing or only help others to."""
    found = [
        Part(
            edit.model,
            technique,
            {n: d for n, d in edit.deltas_of(technique).items() if not d.only_in_training},
            edit.in_place_of(technique),
        )
        for technique in edit.techniques
    ]
    return joined([p for p in found if p.in_place or any(map(_trains, p.deltas.values()))])


def _trains(delta: nn.Module) -> bool:
    return next(delta.parameters(), None) is not None


def is_adapter(edit: Edit) -> bool:
    """Whether an adapter's folder can hold all that the edit trains."""
    keys = {kind.technique.key for kind in KINDS.values()}
    parts = parts_of(edit)
    return bool(parts) and all(part.technique.key in keys for part in parts)


def is_exact(edit: Edit) -> bool:
    """Whether the adapter's tensors are those that train, so that a run can go on from them."""
    return all(kind_of(part).exact(part) for part in parts_of(edit))


def kind_of(part: Part) -> Kind:
    """How a part lies in a folder.

    Raises:
        AdapterError: it cannot.
    """
    kinds = {kind.technique.key: kind for kind in KINDS.values()}
    kind = kinds.get(part.technique.key)
    if kind is None:
        raise AdapterError(
            "an adapter's folder does not hold this",
            got=part.technique.key,
            wanted="one of " + ", ".join(kinds),
            cure="save a fully trained model with model.save_pretrained",
        )
    return with_rows(kind) if part.rows else kind


def peft_tensors(edit: Edit) -> dict[str, Tensor]:
    """The edit's tensors under the keys that they have in its files.

    Raises:
        AdapterError: when the edit holds something that an adapter's folder cannot.
    """
    parts = _some(edit)
    found = {part.technique.key: part_tensors(part) for part in parts}
    if len(parts) == 1:
        return found[parts[0].technique.key]
    return {f"{key}/{name}": t for key, tensors in found.items() for name, t in tensors.items()}


def part_tensors(part: Part) -> dict[str, Tensor]:
    """One technique's tensors under the keys that they have in its file."""
    kind = kind_of(part)
    if kind.stored is not None:
        return kind.stored(part)
    found: dict[str, Tensor] = {}
    for name, delta in part.deltas.items():
        found |= {f"{PREFIX}{name}.{end}": tensor for end, tensor in kind.tensors(delta).items()}
    return found | _in_place(part)


def _in_place(part: Part) -> dict[str, Tensor]:
    """The base's own tensors that train, a tied one under each of its names: PEFT, which copies modules, wants both."""
    trained = {id(p) for p in part.in_place.values()}
    every = part.model.named_parameters(remove_duplicate=False)
    return {PREFIX + name: parameter for name, parameter in every if id(parameter) in trained}


@torch.no_grad()
def fill(edit: Edit, tensors: Mapping[str, Tensor]) -> None:
    """Gives the edit's tensors these values, those on the meta device left alone.

    Args:
        edit: of the very techniques that the tensors are of.
        tensors: by the keys of `peft_tensors`, all of them.
    """
    parts = _some(edit)
    for part in parts:
        start = f"{part.technique.key}/" if len(parts) > 1 else ""
        mine = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
        kind = kind_of(part)
        if kind.fill is not None:
            kind.fill(part, mine)
            continue
        if kind.computed(part):
            raise AdapterError(
                "an adapter's file does not hold what trains here, and where it started",
                got=part.technique.key,
                wanted="a technique whose tensors are those of the file",
                cure="start by default, with the file's rank",
            )
        targets = part_tensors(part)
        if kind.put is not None:
            targets = _in_place(part)
            for name, delta in part.deltas.items():
                begin = f"{PREFIX}{name}."
                kind.put(
                    delta, {k[len(begin) :]: t for k, t in mine.items() if k.startswith(begin)}
                )
        for key, target in targets.items():
            if not target.is_meta:
                target.copy_(mine[key])


def name_in_model(key: str) -> str:
    """The base tensor that a key of `peft_tensors` is of, where it is one."""
    return key.rpartition("/")[2].removeprefix(PREFIX)


def peft_config(edit: Edit, base: str, revision: str | None = None) -> dict[str, Any]:
    """The contents of `adapter_config.json` of the edit's folder.

    Args:
        edit: of one technique, or of several.
        base: name or folder of the base model.
        revision: of a base on the hub.

    Raises:
        AdapterError: when the edit holds something that an adapter's folder cannot.
    """
    parts = _some(edit)
    if len(parts) == 1:
        return part_config(parts[0], base, revision)
    return {
        "peft_type": STACK,
        "parts": [part.technique.key for part in parts],
        "base_model_name_or_path": base,
        "revision": revision,
    }


def part_config(part: Part, base: str, revision: str | None = None) -> dict[str, Any]:
    """The contents of `adapter_config.json` of one technique."""
    kind = kind_of(part)
    trained = {id(p) for p in part.in_place.values()}
    every = part.model.named_parameters(remove_duplicate=False)
    whole = sorted({name.rsplit(".", 1)[0] for name, p in every if id(p) in trained})
    return {
        "peft_type": kind.peft_type,
        "task_type": task_of(part.model, whole),
        "base_model_name_or_path": base,
        "revision": revision,
        "modules_to_save": whole or None,
        "inference_mode": True,
        **kind.config(part),
    }


def _some(edit: Edit) -> list[Part]:
    parts = parts_of(edit)
    if not parts:
        raise AdapterError(
            "there is nothing to save",
            got=", ".join(technique.key for technique in edit.techniques) or "no technique",
            wanted="a technique that trains something",
        )
    return parts


def task_of(model: nn.Module, whole: Sequence[str]) -> str | None:
    """PEFT's name of the task, given the modules that the file has whole.

    For classifiers PEFT expects the head in the file, so they have none without it.
    """
    name = type(model).__name__
    if "CausalLM" in name or "LMHeadModel" in name:
        return "CAUSAL_LM"
    if "Classification" in name and seams.head(model).name in whole:
        return "SEQ_CLS" if "Sequence" in name else "TOKEN_CLS"
    return None
