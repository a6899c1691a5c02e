"""What an adapter makes of its base: its children with their values, while the base itself has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afina.adapters.contents import fill, name_in_model, peft_tensors
from afina.errors import AdapterError, TechniqueError
from afina.table import apply
from afina.tree import Delta, Technique
from afina.tree.fold import by_module, refuse_unfoldable


@dataclass(frozen=True)
class Changes:
    """What an adapter makes of its base.

    Attributes:
        deltas: to be folded, in the order in which they act, by the name of the module.
        whole: base tensors that were trained themselves, by name.
    """

    deltas: Mapping[str, Sequence[Delta]]
    whole: Mapping[str, Tensor]


@torch.no_grad()
def changes(
    skeleton: Any, techniques: Sequence[Technique], tensors: Mapping[str, Tensor]
) -> Changes:
    """The adapter's values, in memory; the base stays without any.

    Args:
        skeleton: the base on the meta device. It is left changed by the techniques.
        techniques: make the adapter's places.
        tensors: the values, by the keys of an adapter's file.

    Raises:
        AdapterError: a part of the adapter is no change of weights.
    """
    edit = apply(skeleton, techniques)
    beside = by_module(edit.deltas)
    for target, deltas in beside.items():
        try:
            refuse_unfoldable(deltas, target)
        except TechniqueError as error:
            raise AdapterError(error.what, cure=error.cure) from None
    for delta in edit.deltas.values():
        delta.to_empty(device="cpu")
        delta.reset(0)  # what is no tensor of the file has a value too
    fill(edit, tensors)
    whole = {key: tensors[key] for key, own in peft_tensors(edit).items() if own.is_meta}
    return Changes(beside, {name_in_model(key): tensor for key, tensor in whole.items()})
