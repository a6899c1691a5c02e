"""Gradient noise: each step's gradient gets a random part, which shrinks as training goes on.

    g ← g + s_t · m · ε,    s_t² = eta / (1 + t)^gamma,    ε ~ N(0, 1), drawn for each number of g

Legend: g gradient of one tensor, reduced over processes and clipped; t optimiser step from 0; eta a *variance*, whose
root is the deviation at the first step; m the root mean square of g (mode relative) or 1 (mode absolute).

The paper adds s_t itself, to small networks whose gradients are of its size. The gradient of a Transformer with d
trainable numbers, clipped to a norm of 1, has numbers of 1 / √d: beside a million of them noise of the paper's least
deviation, 0.1, is a hundred times the gradient, and Adam, which divides by the size of what it gets, then makes steps
that have little to do with it. So noise is relative by default, each tensor's to its own gradient; `absolute` is the
paper's formula. Clipping comes first, for noise before it would be what is clipped, and the gradient would be scaled
away with it. A tensor without a gradient gets no noise, one whose gradient is all zero none in the relative mode.

ε is a function of the run's seed, the step and the tensor's name alone: neither a resume nor the number of
micro-batches or processes changes it, and a process that holds a part of a tensor cuts its part out of the whole's
noise. It is drawn and added in fp32 where the gradient lies, on the tensor's own device. What looks at gradients after
the step, as AdaLoRA's importances do, sees them with the noise.

Source: Neelakantan et al. 2015, "Adding Gradient Noise Improves Learning for Very Deep Networks", arXiv 1511.06807,
section 3: eta of 0.01, 0.3 or 1.0, gamma 0.55. The relative mode is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from afina.tree import Edit, Seams, Technique, seed_of
from afina.tree.pieces import Piece, piece_of


class GradientNoise(Technique):
    """Noise on each step's gradient, after clipping and before the optimiser, of a deviation that falls with time."""

    key: ClassVar[str] = "gradient_noise"

    eta: float = Field(
        default=0.01,
        ge=0,
        allow_inf_nan=False,
        description="variance at the first step; 0: no noise",
    )
    gamma: float = Field(
        default=0.55, ge=0, allow_inf_nan=False, description="how fast the variance falls; 0: never"
    )
    mode: Literal["relative", "absolute"] = Field(
        default="relative",
        description="deviation as a multiple of each tensor's root mean square, or as a number of its own",
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """Changes nothing in the model; see `seams`."""
        return Edit(model, [self])

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """The noise of each step; nothing at all where eta is 0."""
        return Seams(before_step=(self.add,)) if self.eta else Seams()

    @torch.no_grad()
    def add(self, step: int, tensors: dict[str, nn.Parameter]) -> None:
        """Adds the noise of a step to the gradients, in their own memory.

        Args:
            step: from 0; torch is seeded by the run's seed and it (see `Seams.before_step`).
            tensors: those that train, by name.
        """
        share = deviation(step, self.eta, self.gamma)
        for name, tensor in tensors.items():
            if tensor.grad is not None:
                seed, piece = (
                    seed_of(torch.initial_seed(), f"noise {step} {name}"),
                    piece_of(tensor),
                )
                size = share * rms(tensor.grad, piece) if self.mode == "relative" else share
                drawn = noise(piece.shape, seed, tensor.grad.device)
                add(tensor.grad, piece.of(drawn), size)


# --- mathematics -----------------------------------------------------------------------------------------------


def deviation(step: int, eta: float, gamma: float) -> float:
    """s of a step, counted from 0: the root of eta / (1 + step)^gamma."""
    return math.sqrt(eta / (1 + step) ** gamma)


def rms(gradient: Tensor, piece: Piece | None = None) -> Tensor:
    """Root mean square of a whole tensor, in fp32 or wider; a scalar.

    Args:
        gradient: of it, or this process's piece.
        piece: which one; None is all of it.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide)
    if piece is None:
        return norm / math.sqrt(gradient.numel())
    if piece.shared:
        norm = piece.total(norm.square()).sqrt()
    return norm / math.sqrt(piece.numel)


def noise(shape: Sequence[int], seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Normal numbers of deviation 1 in fp32, a function of shape, seed and kind of device alone.

    Args:
        shape: of the whole tensor; whoever holds a part of it takes that part of these.
        seed: of the tensor at a step.
        device: where they are drawn.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device)


def add(gradient: Tensor, drawn: Tensor, size: Tensor | float) -> None:
    """Adds `size` times what was drawn to a gradient where it lies, summed in fp32 or wider and rounded once.

    Args:
        gradient: any floating-point dtype.
        drawn: fp32, of its shape.
        size: the deviation.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    gradient.copy_(gradient.to(wide) + drawn.to(wide) * size)
