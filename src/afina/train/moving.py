"""Tensors that move inside the backward pass: each as soon as its gradient is there, which is then dropped.

A full fine-tuning otherwise holds the gradients of all its weights at once. Here only those are held whose tensors have
not moved yet, which for a window of one micro-batch is one tensor's at a time. Where a window has several, gradients
are summed over the first ones as ever, and the last one's backward pass moves and frees them.

Whatever needs the whole gradient before anything moves has no place in this: its norm is known only afterwards, so
nothing is clipped, and a step whose gradient turns out not to be finite cannot be taken back.

Source: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv 2306.09782
(for SGD); the hook is torch's `register_post_accumulate_grad_hook`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import Mesh


class Mover:
    """What one optimiser step did inside its backward pass.

    Attributes:
        norms: of the gradients that came, by name.
        moved: the tensors that moved, in their order.
        zero: those whose gradient was all zero.
        torn: some tensors moved, and others never will: the weights are of no step.
    """

    def __init__(
        self, optimiser: Optimiser, tensors: Mapping[str, nn.Parameter], mesh: Mesh
    ) -> None:
        self._optimiser, self._tensors, self._mesh = optimiser, tensors, mesh
        self._sound, self._ended = True, False
        self.norms: dict[str, Tensor] = {}
        self.moved: list[str] = []
        self.zero: list[str] = []

    @property
    def acted(self) -> bool:
        """Whether it looked at a gradient; if not, the window's gradient is there, whole and not reduced."""
        return bool(self.norms)

    @property
    def torn(self) -> bool:
        """See above."""
        return bool(self.moved) and not (self._sound and self._ended)

    def backward(self, loss: Tensor, before: float) -> None:
        """The backward pass of a window's last micro-batch, in which its tensors move; only if its loss is finite.

        Args:
            loss: of the micro-batch, as a share of the window's.
            before: the sum of those of the micro-batches before it.
        """
        if not math.isfinite(self._mesh.sum(before + float(loss.detach()))):
            loss.backward()
            return
        with hooked(self._tensors, self._take):
            loss.backward()
        # What only earlier micro-batches reached has its gradient already.
        for name, parameter in self._tensors.items():
            if parameter.grad is not None and name not in self.norms:
                self._take(name, parameter)
        self._ended = True

    def norm(self) -> Tensor:
        """Norm of the whole gradient, as of one that is there whole."""
        found = [self.norms[name] for name in self._tensors if name in self.norms]
        return torch.linalg.vector_norm(torch.stack(found))

    def missing(self) -> list[str]:
        """The tensors that got no gradient."""
        return [name for name in self._tensors if name not in self.norms]

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        """Moves a tensor and drops its gradient, unless one so far is not finite: then it stays, to be looked at."""
        gradient = parameter.grad
        assert gradient is not None
        norm = self.norms[name] = torch.linalg.vector_norm(gradient)
        self._sound = self._sound and bool(torch.isfinite(norm))
        if not self._sound:
            return
        # The norm of the tiniest numbers can be zero, too.
        if not bool(norm) and not bool(torch.any(gradient != 0)):
            self.zero.append(name)
        self.moved.append(name)
        self._optimiser.step_of(name)
        parameter.grad = None


@contextmanager
def hooked(
    tensors: Mapping[str, nn.Parameter], take: Callable[[str, nn.Parameter], None]
) -> Generator[None, None, None]:
    """Inside the block `take` is called with each tensor (and its name) whose gradient is there, whole."""

    def hook_of(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: take(name, tensors[name])

    handles = [p.register_post_accumulate_grad_hook(hook_of(n)) for n, p in tensors.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def drop(name: str, parameter: nn.Parameter) -> None:
    """For `hooked`: no gradient is kept."""
    parameter.grad = None
