"""Blocks of one model on several devices of one process: model parallelism without messages.

    device 0: embedding, blocks 0 … k   ->   device 1: blocks k+1 …   ->   device 0: final norm, head, loss

States move from device to device where two neighbouring blocks lie on different ones, and so does, once a pass and
device, whatever else a block is given (masks, rotary embeddings, a prefix); gradients come back the same way. All that
stands around the stack stays on the first device, so tied tensors, labels and the loss know nothing of it. Adapters
are children of the modules they change, and lie where those lie.

One device works at a time: this buys memory, not time. Several processes, each with its own device, do both
(`parallel.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina import seams
from afina.errors import ConfigError
from afina.parallel.pipeline_balance import stretches
from afina.parallel.pipeline_stage import hidden_of, replaced

Move = Callable[[Tensor, torch.device], Tensor]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for it."""
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Placement:
    """Where the blocks of a model lie.

    Attributes:
        model: whose they are.
        devices: the first holds what stands around the blocks too.
        places: of each block by name, which of the devices.
        handles: of what moves the states.
    """

    model: nn.Module
    devices: tuple[torch.device, ...]
    places: Mapping[str, int]
    handles: tuple[RemovableHandle, ...]

    def lift(self) -> None:
        """All of the model on the first device again, and nothing moves any more."""
        for handle in self.handles:
            handle.remove()
        for name in self.places:
            self.model.get_submodule(name).to(self.devices[0])


class Carrier:
    """Moves what blocks are given, each tensor once a pass and place.

    Args:
        devices: of the places.
        move: one tensor.
    """

    def __init__(self, devices: Sequence[torch.device], move: Move) -> None:
        self.devices, self.move = devices, move
        # By number and place, with the value itself: once it is gone its number would be another's.
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._at = 0

    def enter(self, place: int, *, first: bool) -> Callable[..., tuple[Any, Any]]:
        """A hook before a block at a place; `first` is that of the model's first block."""

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            if first:
                self._known.clear()
                self._at = 0
            hidden_BTD = hidden_of(args, kwargs)
            if place != self._at:
                hidden_BTD, self._at = self.move(hidden_BTD, self.devices[place]), place
            if place:
                beside = tuple(self._here(part, place) for part in args[1:])
                args = (hidden_BTD, *beside) if args else ()
                kwargs = {
                    name: part if name == "hidden_states" else self._here(part, place)
                    for name, part in kwargs.items()
                }
            return replaced(hidden_BTD, args, kwargs)

        return hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A hook behind the last block: its states go home."""
        self._known.clear()
        if not self._at:
            return output
        self._at = 0
        if isinstance(output, tuple):
            return self.move(output[0], self.devices[0]), *output[1:]
        return self.move(output, self.devices[0])

    def _here(self, value: Any, place: int) -> Any:
        """What a block is given beside the states, at a place."""
        if not isinstance(value, Tensor | tuple | list | dict) and not is_dataclass(value):
            return value  # a cache, which has each block's part where that is
        known = self._known.get((id(value), place))
        if known is None:
            known = self._known[id(value), place] = value, self._moved(value, place)
        return known[1]

    def _moved(self, value: Any, place: int) -> Any:
        if isinstance(value, Tensor):
            return self.move(value, self.devices[place])
        if isinstance(value, dict):
            return {key: self._here(part, place) for key, part in value.items()}
        if isinstance(value, tuple | list):
            parts = [self._here(part, place) for part in value]
            named = hasattr(value, "_fields")
            return type(value)(*parts) if named else type(value)(parts)
        parts = {f.name: self._here(getattr(value, f.name), place) for f in fields(value)}
        return replace(value, **parts)


def place(
    model: nn.Module,
    devices: Sequence[torch.device | str],
    split: Sequence[int] | None = None,
    move: Move = moved,
) -> Placement:
    """Spreads a model's blocks over devices.

    Args:
        model: any with a stack of blocks.
        devices: in the order of the blocks; the first gets all that is no block too.
        split: how many blocks each gets; None shares their bytes out evenly, the first device's others counted.
        move: one tensor to a device.

    Raises:
        ConfigError: there are more devices than blocks, or the split is not one of them.
        TechniqueError: the model has no stack of blocks.
    """
    seams.require_stack(model, "devices")
    where = [torch.device(device) for device in devices]
    stacks = seams.stacks(model)
    named = [
        (f"{name}.{n}", block) for name, all_ in stacks.items() for n, block in enumerate(all_)
    ]
    sizes = split if split is not None else _even(model, [b for _, b in named], len(where))
    if sum(sizes) != len(named) or len(sizes) != len(where):
        raise ConfigError(
            "these devices do not share out the model's blocks",
            got=f"{', '.join(map(str, sizes))} blocks for {len(where)} devices",
            wanted=f"{len(named)} blocks, a number for each device",
        )
    order = [number for number, size in enumerate(sizes) for _ in range(size)]
    model.to(where[0])
    carrier = Carrier(where, move)
    handles: list[RemovableHandle] = []
    firsts = {id(blocks[0]) for blocks in stacks.values()}
    lasts = {id(blocks[len(blocks) - 1]) for blocks in stacks.values()}
    for (_, block), number in zip(named, order, strict=True):
        block.to(where[number])
        enter = carrier.enter(number, first=id(block) in firsts)
        # Before hooks of adapters, which are where the block is.
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        if id(block) in lasts:
            handles.append(block.register_forward_hook(carrier.leave))
    places = {name: number for (name, _), number in zip(named, order, strict=True)}
    return Placement(model, tuple(where), places, tuple(handles))


def _even(model: nn.Module, blocks: Sequence[nn.Module], devices: int) -> list[int]:
    """How many blocks each device gets."""
    if devices > len(blocks):
        raise ConfigError(
            "there are more devices than blocks",
            got=f"{devices} devices, {len(blocks)} blocks",
            wanted=f"at most {len(blocks)} devices",
        )
    costs = [float(bytes_of(block)) for block in blocks]
    around = bytes_of(model) - sum(costs)
    # What stands around the stack counts as a block of the first device, so that it gets fewer of the others.
    bounds = stretches([around, *costs], devices) if around else stretches(costs, devices)
    sizes = [end - first for first, end in bounds]
    return [sizes[0] - bool(around), *sizes[1:]]


def bytes_of(module: nn.Module) -> int:
    """Of a module's parameters, each once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
