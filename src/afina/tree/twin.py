"""A copy of a changed model without values: the same names, shapes and children, and every tensor on the meta device.

Where processes share a model out none has it whole. What is done with whole tensors of what trains (an adapter's files,
starting values) is done with those of the twin, which get values when they are needed; the base in it has none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from afina.tree.edit import Edit


def twin_of(edit: Edit, *, frozen: bool = False) -> Edit:
    """A copy of an edit and its model on the meta device. It costs no memory to speak of, and cannot be undone.

    Args:
        edit: whose tensors are whole; they may be on the meta device too.
        frozen: what does not change in training is the very same in both, and not on the meta device.
    """
    changing = {id(tensor) for tensor in (*edit.trainable().values(), *edit.state().values())}
    # What is found in the table is not copied: each tensor has its own twin there, tied ones the same.
    twins: dict[int, Any] = {}
    for module in edit.model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            same = frozen and id(tensor) not in changing
            twins[id(tensor)] = tensor if same else _empty(tensor)
    twins |= {id(kept): _empty(kept) for kept in edit.snapshots.values()}
    return copy.deepcopy(edit, twins)


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


@contextmanager
def lent(model: nn.Module, values: Mapping[str, Tensor]) -> Generator[None, None, None]:
    """Inside the block parameters and buffers of a twin's model are these, by name; behind it those that were there."""
    places: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for name, value in values.items():
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            before = getattr(module, own)
            places.append((module, own, before))
            trains = isinstance(before, nn.Parameter)
            setattr(module, own, nn.Parameter(value, requires_grad=False) if trains else value)
        yield
    finally:
        for module, own, before in reversed(places):
            setattr(module, own, before)


@torch.no_grad()
def give(edit: Edit, values: Mapping[str, Tensor]) -> None:
    """Gives tensors of a twin these values, in memory of its own.

    Args:
        edit: a twin.
        values: by the names of `Edit.trainable` and `Edit.state`, those that are to have some.
    """
    trainable, state = edit.trainable(), edit.state()
    for name, value in values.items():
        if name in trainable:
            target = trainable[name]
            if target.is_meta:
                empty = torch.empty(target.shape, dtype=target.dtype, device=value.device)
                target = embody(edit.model, name, empty)
            target.copy_(value)
        elif state[name].is_meta:
            module, _, own = name.rpartition(".")
            setattr(edit.model.get_submodule(module), own, value.to(state[name].dtype, copy=True))
        else:
            state[name].copy_(value)


def embody(model: nn.Module, name: str, memory: Tensor) -> nn.Parameter:
    """Gives a parameter on the meta device memory of its shape and dtype.

    Whoever knows the parameter knows it still, and what is noted on it stays; only of one that something looks after
    (an LSTM does so with its own), and that torch does not exchange then, another object takes the place.

    Args:
        model: that has it.
        name: in the model.
        memory: for the values.

    Returns:
        The parameter in its place.
    """
    before = model.get_parameter(name)
    noted = dict(vars(before))
    made = nn.Parameter(memory, requires_grad=before.requires_grad)
    if weakref.getweakrefcount(before):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, made)
        before = made
    else:
        utils: Any = torch.utils
        utils.swap_tensors(before, made)
    vars(before).update(noted)
    return before
