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
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from afina.parallel.plan import Plan
from afina.parallel.portion import Portion
from afina.parallel.runtime import Named
from afina.parallel.shares import span
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
    portion = Portion(plan, rank, model, tensors)
    weights = gradients = state = 0
    for name, parameter in portion.held.items():
        size, whole, shape = parameter.element_size(), parameter.numel(), parameter.shape
        part = whole
        if shape and plan.shard > 1:
            first, end = span(shape[0], plan.shard, portion.place.shard)
            part = (end - first) * math.prod(shape[1:])
        weights += size * (part if plan.zero == 3 else whole)
        if name in tensors:
            gradients += size * (part if plan.zero >= 2 else whole)
            state += state_bytes(size, values) * (part if plan.zero >= 1 else whole)
    return Amount(weights, gradients, state, _gathered(portion))


def _gathered(portion: Portion) -> int:
    if portion.plan.zero < 3 or portion.plan.shard == 1:
        return 0
    units = {
        name: sum(p.numel() * p.element_size() for p in own.values())
        for name, own in unit_tensors(portion).items()
    }
    outside = units.pop("", 0)
    return outside + sum(sorted(units.values())[-AT_ONCE:])
