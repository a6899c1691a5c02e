"""The budget of AdaLoRA: how many directions there are after each step, and which of them stay.

    b(t) = first                                                   t ≤ tinit
    b(t) = last + (first − last) (1 − (t − tinit)/(end − tinit))³   tinit < t < end
    b(t) = last                                                    t ≥ end = total − tfinal

Legend: t steps done, b directions of all maps together.

Source: Zhang et al. 2023, "AdaLoRA", arXiv 2303.10512, section 3.3 and equation 12; importances as in `adalora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from afina.tree.pieces import gathered, piece_of

if TYPE_CHECKING:
    from afina.techniques.adalora import AdaLoRADelta


@dataclass(frozen=True)
class Schedule:
    """How many directions there are after each step: all of them, then fewer by a cubic law, then the target.

    Attributes:
        first, last: directions of all maps at the beginning and at the end.
        tinit: steps before the first cut.
        tfinal: steps after the last one.
        delta_t: steps between cuts.
        total_steps: of the run.
    """

    first: int
    last: int
    tinit: int
    tfinal: int
    delta_t: int
    total_steps: int

    @property
    def end(self) -> int:
        """Steps done at the last cut."""
        return self.total_steps - self.tfinal

    def budget(self, done: int) -> int:
        """Directions after so many steps."""
        if done <= self.tinit:
            return self.first
        if done >= self.end:
            return self.last
        left = 1 - (done - self.tinit) / (self.end - self.tinit)
        return int((self.first - self.last) * left**3 + self.last)

    def cuts(self, done: int) -> bool:
        """Whether ranks are cut after so many steps."""
        return done == self.end or (self.tinit < done < self.end and done % self.delta_t == 0)


def smooth(mean: Tensor, spread: Tensor, importance: Tensor, beta1: float, beta2: float) -> None:
    """M and U of one step, in their own memory; `importance` is |w · dL/dw|."""
    mean.mul_(beta1).add_(importance, alpha=1 - beta1)
    spread.mul_(beta2).add_((importance - mean).abs_(), alpha=1 - beta2)


def least(scores: Tensor, count: int) -> Tensor:
    """Which `count` of the scores (N,) are the least, as flags (N,); of equal ones the first."""
    flags = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    flags[scores.argsort(stable=True)[:count]] = True
    return flags


class Allocation:
    """What happens to the directions of all maps after each step of a run; what it knows is in the deltas."""

    def __init__(
        self, deltas: Mapping[str, AdaLoRADelta], schedule: Schedule, betas: tuple[float, float]
    ) -> None:
        self._named, self._deltas = deltas, list(deltas.values())
        self._schedule, self._betas = schedule, betas

    @torch.no_grad()
    def look(self, step: int, tensors: dict[str, nn.Parameter]) -> None:
        """Importances, once the tensors have moved; after the last cut they are of no more use.

        What a process holds may be pieces: then all get those of the others, for a direction is scored whole.
        """
        if step + 1 >= self._schedule.end:
            return
        mine = {
            (name, inner): tensors[f"{name}.{inner}"]
            for name, delta in self._named.items()
            for inner, _ in delta.named_parameters()
        }
        found = gathered(
            {
                f"{name}.{inner}": (piece_of(tensor), (tensor * tensor.grad).abs_())
                for (name, inner), tensor in mine.items()
                if tensor.grad is not None
            }
        )
        for name, inner in mine:
            importance = found.get(f"{name}.{inner}")
            if importance is not None:
                self._named[name].look(inner, importance, self._betas)

    def cut(self, step: int) -> None:
        """Cuts where it is time, whether or not the step moved the tensors; after the last, what was cut stays so."""
        done = step + 1
        if self._schedule.cuts(done):
            self._allocate(self._schedule.budget(done))
        elif done > self._schedule.end:
            for delta in self._deltas:
                delta.keep()

    def _allocate(self, budget: int) -> None:
        scores = torch.cat([delta.scores() for delta in self._deltas])
        kept = ~least(scores, len(scores) - budget)
        start = 0
        for delta in self._deltas:
            delta.keep(kept[start : start + delta.rank])
            start += delta.rank
