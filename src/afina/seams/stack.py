"""The stacks of a model and their blocks, and how a user names some of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from afina.errors import TechniqueError
from afina.seams.kinds import map_kind


@dataclass(frozen=True)
class Block:
    """One repeated layer of a stack."""

    name: str
    module: nn.Module
    index: int
    stack: str


def stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of blocks: outermost `ModuleList`s of at least one module, all of one class that holds a linear map.

    Encoder-decoder models have two; a list of experts inside a block is not one.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        same = len({type(child) for child in module}) == 1
        deep = all(any(map_kind(m) for m in child.modules() if m is not child) for child in module)
        if same and deep:
            found[name] = module
    return found


def require_stack(model: nn.Module, wanted_by: str) -> None:
    """Raises where no stack of blocks is found, and says what was found instead.

    Args:
        model: any.
        wanted_by: the setting that needs blocks.

    Raises:
        TechniqueError: there are none, or they are of several kinds.
    """
    if stacks(model):
        return
    mixed = {
        name: sorted({type(child).__name__ for child in module})
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) > 1
    }
    name, kinds = next(iter(mixed.items()), ("", []))
    raise TechniqueError(
        f"{wanted_by}: no stack of equal blocks is found in this model",
        got=f"{name} of {', '.join(kinds)}" if kinds else type(model).__name__,
        wanted="a list of blocks of one class",
        cure="name the modules themselves, in lora.target or full.target, and leave layers out",
    )


def blocks(model: nn.Module) -> list[Block]:
    """Every block of every stack, in the order of the model."""
    return [
        Block(f"{stack}.{i}", module, i, stack)
        for stack, modules in stacks(model).items()
        for i, module in enumerate(modules)
    ]


Layers = tuple[int, ...] | str | None

MOST_BLOCKS = 100_000
"""No block has a higher number: a range with a slip in it must not fill the memory."""


def parse_layers(layers: Layers) -> tuple[int, ...] | None:
    """Block numbers from a list or from text such as '0-5,28,-1'; None means all.

    Raises:
        ValueError: when the text is not of that form.
    """
    if layers is None or not isinstance(layers, str):
        return layers
    numbers: list[int] = []
    for piece in layers.split(","):
        found = re.fullmatch(r"\s*(-?\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if not found:
            raise ValueError(
                f"layers: cannot read {piece!r}; write numbers and ranges, '0-5,28,-1'"
            )
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if last < first:
            raise ValueError(f"layers: {piece!r} runs backwards")
        if last > MOST_BLOCKS:
            raise ValueError(f"layers: {piece!r} is more blocks than any model has")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def chosen_layers(model: nn.Module, layers: Layers, *, setting: str) -> set[int]:
    """The block indices that `layers` names (negative ones count from the end); all for None.

    Raises:
        TechniqueError: when the model has no such block.
    """
    depth = max((block.index + 1 for block in blocks(model)), default=0)
    wanted = parse_layers(layers)
    if wanted is None:
        return set(range(depth))
    require_stack(model, setting)
    outside = [n for n in wanted if not -depth <= n < depth]
    if outside:
        raise TechniqueError(
            f"{setting}: this model has no such block",
            got=", ".join(map(str, outside)),
            wanted=f"0 to {depth - 1}, or negative numbers from the end",
        )
    return {n % depth for n in wanted}
