"""Where what changes with time meets the training loop: tuples of plain functions, and no event bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor, nn

from afina.types import Batch


@dataclass(frozen=True)
class Seams:
    """Functions that the loop calls; all empty for a plain run. Steps count from 0.

    Attributes:
        on_batch: (batch, step) -> batch, before it is used.
        loss: (losses (N,), batch, step) -> losses, to weigh token losses.
        penalty: (step) -> scalar, added to the loss of the step; the loss that is reported does not have it.
        param_groups: (name -> scale of its learning rate) -> the same, changed.
        before_step: (step, named tensors), gradients reduced and clipped.
        moved: (step, named tensors), once the tensors have moved; their gradients are still there.
        after_step: (step,), whether or not the tensors moved; gradients are cleared.
    """

    on_batch: tuple[Callable[[Batch, int], Batch], ...] = ()
    loss: tuple[Callable[[Tensor, Batch, int], Tensor], ...] = ()
    penalty: tuple[Callable[[int], Tensor], ...] = ()
    param_groups: tuple[Callable[[dict[str, float]], dict[str, float]], ...] = ()
    before_step: tuple[Callable[[int, dict[str, nn.Parameter]], None], ...] = ()
    moved: tuple[Callable[[int, dict[str, nn.Parameter]], None], ...] = ()
    after_step: tuple[Callable[[int], None], ...] = ()

    def and_then(self, other: Seams) -> Seams:
        """These functions, and after each kind of them the other's."""
        return Seams(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
