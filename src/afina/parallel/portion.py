"""The part of a model that one process of a plan holds: names, shapes and types, stated before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from afina import seams
from afina.parallel.pipeline_balance import bounds_of
from afina.parallel.pipeline_cut import in_block, stack_of
from afina.parallel.plan import Place, Plan
from afina.parallel.runtime import Named
from afina.parallel.shares import span
from afina.parallel.tensor_place import Placed, Which, placed
from afina.parallel.tensor_plan import Way, ways_of


@dataclass(frozen=True)
class Portion:
    """One process's part.

    Attributes:
        plan: of the run; a pipeline shares blocks out evenly, or as the user split them.
        rank: of the process.
        model: whole, with what techniques attached; its shapes and types alone are asked for, it may lie on the meta
            device, and is not shared out.
        tensors: that train in any process, by name.
    """

    plan: Plan
    rank: int
    model: nn.Module
    tensors: Named

    @property
    def place(self) -> Place:
        """Where the process stands."""
        return self.plan.place(self.rank)

    @cached_property
    def ways(self) -> Mapping[str, Way]:
        """Of the modules that a tensor group shares out."""
        return ways_of(self.model, self.plan.tensor) if self.plan.tensor > 1 else {}

    @cached_property
    def placed(self) -> Placed:
        """Where tensors lie in a tensor group."""
        if not self.ways:
            return Placed()
        return placed(self.model, self.ways, Which(self.place.tensor, self.plan.tensor))

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The places in a pipeline that hold each parameter; see `holders_of`."""
        return holders_of(self.plan, self.model)

    @cached_property
    def held(self) -> dict[str, nn.Parameter]:
        """Every parameter that is here, on the meta device, before processes with other rows share it out."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            if self.place.pipeline not in self.holders[name]:
                continue
            shape = tuple(parameter.shape)
            piece = self.placed.pieces.get(name)
            if piece is not None:
                shape = tuple(end - first for first, end in piece.box)
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            found[name] = nn.Parameter(empty, requires_grad=False)
        return found

    @cached_property
    def trains(self) -> dict[str, nn.Parameter]:
        """Those of them that train, in the order of the run."""
        return {name: self.held[name] for name in self.tensors if name in self.held}

    @property
    def shares_state(self) -> bool:
        """Whether processes with other rows share out what trains."""
        return self.plan.zero > 0 and self.plan.shard > 1

    def pieces(self, names: Iterable[str]) -> list[Tensor]:
        """What the process moves of tensors that train, on the meta device: its pieces, or all of them."""
        found: list[Tensor] = []
        for name in names:
            tensor = self.trains[name].detach()
            if self.shares_state and tensor.dim():
                first, end = span(tensor.shape[0], self.plan.shard, self.place.shard)
                tensor = tensor[first:end]
            found.append(tensor)
        return found

    @cached_property
    def stack(self) -> tuple[str, int]:
        """Name of the stack of blocks that a pipeline shares out, and how many blocks it has."""
        name, blocks = stack_of(self.model)
        return name, len(blocks)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First block of each stage of the whole pipeline, and the one behind its last."""
        return bounds_of(self.plan, self.stack[1])

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages that are here."""
        return list(range(len(self.bounds)))[self.place.pipeline :: self.plan.pipeline]

    def runs(self, module: str) -> bool:
        """Whether a module of the model acts in this process: its block is here, or its end of the model."""
        if self.plan.pipeline == 1:
            return True
        number = in_block(f"{module}.", self.stack[0])
        if number is not None:
            return any(
                first <= number < end for first, end in (self.bounds[s] for s in self.stages)
            )
        if module == seams.input_embedding(self.model):
            return self.place.pipeline == 0
        if module == seams.head(self.model).name:
            return self.place.pipeline == self.plan.pipeline - 1
        return True


def holders_of(plan: Plan, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The places in a pipeline that hold each parameter, where blocks are alike; that place alone without one.

    What lies before the blocks is of the first stage, what lies behind them of the last, a tied embedding of both, and
    what belongs to neither of all. (A run asks the model itself, which takes weights; see `pipeline_cut`.)

    Args:
        plan: of the run.
        model: on any device.
    """
    if plan.pipeline == 1:
        return {name: (0,) for name, _ in model.named_parameters()}
    stack, modules = stack_of(model)
    bounds = bounds_of(plan, len(modules))
    of_block = {n: s % plan.pipeline for s, bound in enumerate(bounds) for n in range(*bound)}
    depths, tied = seams.Depths(model), seams.head(model).tied
    embedding = f"{seams.input_embedding(model)}.weight"
    first, last = 0, plan.pipeline - 1
    around = {"before": (first,), "behind": (last,)}
    found: dict[str, tuple[int, ...]] = {}
    for name, _ in model.named_parameters():
        number = in_block(name, stack)
        if number is not None:
            found[name] = (of_block[number],)
        elif tied and name == embedding:
            found[name] = (first, last)
        else:
            found[name] = around.get(str(depths.of(name)), tuple(range(plan.pipeline)))
    return found
