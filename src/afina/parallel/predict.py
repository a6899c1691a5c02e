"""What each process would hold: bytes of weights, gradients and the optimiser's state, stated from shapes alone.

With F frozen and T trained parameters of f and t bytes each, gradients of g bytes, K bytes of the optimiser for each
trained one, and N processes that share one copy out:

    zero 0    F f + T (t + g + K)
    zero 1    F f + T (t + g + K / N)
    zero 2    F f + T (t + (g + K) / N)
    zero 3    (F f + T (t + g + K)) / N, and for a moment the tensors of what runs just then

`formula` is these lines; `predicted` goes through the very tensors of a model, whose pieces are not all of one size,
and is what a process of a real run holds, to the byte. Activations come to it; so does what libraries take.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3 and figure 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from afina import seams
from afina.parallel.bubbles import CHUNKS
from afina.parallel.pipeline_balance import stretches
from afina.parallel.pipeline_cut import in_block, stack_of
from afina.parallel.plan import Plan
from afina.parallel.runtime import Named
from afina.parallel.shares import span
from afina.parallel.tensor_place import Which, placed
from afina.parallel.tensor_plan import ways_of
from afina.parallel.traffic import unit_tensors

FULL = 4
"""Bytes of a number of fp32, in which optimisers keep what they keep of half-precision tensors."""

AT_ONCE = 2
"""Blocks that stage 3 has whole at one time: the one that runs, and the next, in advance."""


class Amount(NamedTuple):
    """Bytes of one process.

    Attributes:
        weights, gradients, state: of the optimiser.
        gathered: weights that are whole for a moment, with zero 3.
    """

    weights: float
    gradients: float
    state: float
    gathered: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.state + self.gathered


@dataclass(frozen=True)
class Size:
    """Of one parameter.

    Attributes:
        weight: bytes.
        gradient: bytes; by default those of a weight.
        state: bytes of the optimiser.
    """

    weight: float
    gradient: float
    state: float


def formula(
    zero: int, frozen: float, trained: float, base: float, each: Size, parts: int
) -> Amount:
    """The lines above.

    Args:
        zero: stage.
        frozen: parameters.
        trained: parameters.
        base: bytes of a frozen one.
        each: of a trained one.
        parts: processes that share one copy out.
    """
    by = [parts if zero >= stage else 1 for stage in (3, 2, 1)]
    weights = (frozen * base + trained * each.weight) / by[0]
    return Amount(weights, trained * each.gradient / by[1], trained * each.state / by[2])


def state_bytes(element_size: int, values: int) -> int:
    """What an optimiser keeps for one number of a tensor.

    Args:
        element_size: bytes of the number.
        values: how many the optimiser keeps, as Adam 2.
    """
    return values * max(FULL, element_size) + (FULL if element_size < FULL else 0)


def predicted(plan: Plan, model: nn.Module, tensors: Named, values: int, rank: int = 0) -> Amount:
    """What process `rank` holds of a run.

    Args:
        plan: of the run; a pipeline shares blocks out evenly.
        model: whole, with what techniques attached; it may lie on the meta device.
        tensors: that train, by name.
        values: numbers that the optimiser keeps for each one that trains.
        rank: of the process.

    Raises:
        ConfigError: the model cannot be shared out so.
    """
    place = plan.place(rank)
    shapes = shapes_of(plan, model, rank)
    weights = gradients = state = 0
    for name, parameter in model.named_parameters():
        shape = shapes.get(name)
        if shape is None:
            continue
        size = parameter.element_size()
        whole = math.prod(shape)
        part = whole
        if shape and plan.shard > 1:
            first, end = span(shape[0], plan.shard, place.shard)
            part = (end - first) * math.prod(shape[1:])
        weights += size * (part if plan.zero == 3 else whole)
        if name in tensors:
            gradients += size * (part if plan.zero >= 2 else whole)
            state += state_bytes(size, values) * (part if plan.zero >= 1 else whole)
    return Amount(weights, gradients, state, _gathered(plan, model, tensors, shapes))


def shapes_of(plan: Plan, model: nn.Module, rank: int) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor of a process has, before processes with other rows share it out."""
    place = plan.place(rank)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if plan.tensor > 1:
        which = Which(place.tensor, plan.tensor)
        pieces = placed(model, ways_of(model, plan.tensor), which).pieces
        cut = {n: tuple(end - first for first, end in piece.box) for n, piece in pieces.items()}
        found |= {n: shape for n, shape in cut.items() if n in found}
    if plan.pipeline > 1:
        here = names_of(plan, model, place.pipeline)
        found = {name: shape for name, shape in found.items() if name in here}
    return found


def names_of(plan: Plan, model: nn.Module, place: int) -> set[str]:
    """The parameters that one process of a pipeline holds, where blocks are alike.

    What lies before the blocks is of the first stage, what lies behind them of the last, a tied embedding of both, and
    what belongs to neither of all. (A run asks the model itself, which takes weights; see `pipeline_cut`.)

    Args:
        plan: of the run.
        model: on any device.
        place: of the process in its pipeline.
    """
    stack, modules = stack_of(model)
    stages = plan.pipeline * CHUNKS[plan.schedule]
    bounds = stretches([1.0] * len(modules), stages)[place :: plan.pipeline]
    first, last = place == 0, place == plan.pipeline - 1
    depths, tied = seams.Depths(model), seams.head(model).tied
    embedding = f"{seams.input_embedding(model)}.weight"
    found: set[str] = set()
    for name, _ in model.named_parameters():
        number = in_block(name, stack)
        if number is not None:
            held = any(begin <= number < end for begin, end in bounds)
        elif tied and name == embedding:
            held = first or last
        else:
            held = {"before": first, "behind": last}.get(str(depths.of(name)), True)
        if held:
            found.add(name)
    return found


def _gathered(
    plan: Plan, model: nn.Module, tensors: Named, shapes: Mapping[str, tuple[int, ...]]
) -> int:
    if plan.zero < 3 or plan.shard == 1:
        return 0
    units = {
        name: sum(math.prod(shapes[n]) * p.element_size() for n, p in own.items() if n in shapes)
        for name, own in unit_tensors(model, tensors).items()
    }
    outside = units.pop("", 0)
    return outside + sum(sorted(units.values())[-AT_ONCE:])
