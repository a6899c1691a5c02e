"""Which tensors of a model are gathered together when weights are shared out: each block's, and the rest's."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from afina import seams
from afina.errors import ConfigError
from afina.ops.packed import PackedWeight
from afina.parallel.runtime import Named
from afina.tree import Delta


class Unit(NamedTuple):
    """A module whose tensors are gathered together, less those of units inside of it.

    Attributes:
        name: in the model.
        module: it is called whenever its tensors are used.
    """

    name: str
    module: nn.Module


def units_of(model: nn.Module, tensors: Named) -> list[Unit]:
    """The units of a model beside its root, those inside of others first.

    Tensors that train have one dtype in each, so that their gradients go in one message. A module of another one (a
    norm in half precision that trains beside an adapter in fp32) is a unit of its own.

    Args:
        model: whose blocks are units.
        tensors: that train, by name.

    Raises:
        ConfigError: it has no blocks, or tensors that cannot be shared out.
    """
    refuse_unfit(model)
    found: list[Unit] = []
    for stack, blocks in seams.stacks(model).items():
        for index, block in enumerate(blocks):
            name = f"{stack}.{index}"
            mine = {n: p for n, p in tensors.items() if n.startswith(f"{name}.")}
            found += [*_apart(model, mine), Unit(name, block)]
    inside = tuple(f"{unit.name}." for unit in found)
    rest = {n: p for n, p in tensors.items() if not n.startswith(inside)}
    return [*found, *_apart(model, rest)]


def _apart(model: nn.Module, tensors: Named) -> list[Unit]:
    """Units of their own for what trains in another dtype than most of what trains beside it."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in tensors.values():
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    most = sizes.most_common(1)[0][0]
    odd = {name: p for name, p in tensors.items() if p.dtype != most}
    owners = {name.rpartition(".")[0] for name in odd}
    for owner in sorted(owners):
        _refuse_mixed(model, owner, tensors, most)
    return [Unit(owner, model.get_submodule(owner)) for owner in sorted(owners)]


def _refuse_mixed(model: nn.Module, owner: str, tensors: Named, most: torch.dtype) -> None:
    """Raises where a module cannot be a unit of its own: it is not called when its tensors are used, or is mixed."""
    module, head = model.get_submodule(owner), seams.head(model)
    kinds = {p.dtype for n, p in tensors.items() if n.startswith(f"{owner}.")}
    ends = {head.name, seams.input_embedding(model)} if head.tied else {head.name}
    if len(kinds) == 1 and owner not in ends and not isinstance(module, Delta):
        return
    other = next(n for n, p in tensors.items() if p.dtype == most)
    mine = next(n for n, p in tensors.items() if p.dtype != most and n.startswith(f"{owner}."))
    raise ConfigError(
        "parallel.zero=3 gathers what lies together in one message, and here it trains in two dtypes",
        got=f"{mine} in {tensors[mine].dtype}, {other} in {most}",
        cure="load the model in fp32 (train.dtype=fp32), leave one of the two out, or take parallel.zero=1 or 2",
    )


def refuse_unfit(model: nn.Module) -> None:
    """Raises for a model that stage 3 cannot share out.

    Raises:
        ConfigError: saying what in it, and what works.
    """
    if not seams.stacks(model):
        raise ConfigError(
            "parallel.zero=3 gathers a model block by block, and no stack of equal blocks is found in this one",
            got=type(model).__name__,
            cure="take parallel.zero=1 or 2",
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, PackedWeight):
            raise ConfigError(
                "parallel.zero=3 cannot share out packed weights",
                got=name,
                wanted="weights in fp32, bf16 or fp16",
                cure="leave quantize out, or take parallel.zero=1 or 2: packed weights are small",
            )
