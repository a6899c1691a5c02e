"""A weight rounded with a low-rank part left out of it: what the two give together is nearer to the weight.

    Q_1 = q(W),    B_t A_t = the best of rank r for W - Q_t,    Q_{t+1} = q(W - B_t A_t)

Of all rounds the one counts whose Q + B A is nearest to W: rounding in blocks is no projection, so that a later round
can be worse than an earlier one.

Legend: W a weight, q the rounding, Q rounded weights, B (out × r) and A (r × in) factors.

Source: Li et al. 2023, "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models", arXiv 2310.08659,
section 3.1 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from afina.ops import svd

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Apart(Generic[Kept]):
    """A weight as rounded weights and a low-rank part.

    Attributes:
        rounded: what `rounding` made.
        b_OR: B, in fp64; its columns are in the order of their values, so that fewer of them are the best of fewer.
        a_RI: A.
        error: ‖W - (Q + B A)‖, Frobenius.
    """

    rounded: Kept
    b_OR: Tensor
    a_RI: Tensor
    error: float


@torch.no_grad()
def alternate(
    weight_OI: Tensor,
    rounding: Callable[[Tensor], Kept],
    values: Callable[[Kept], Tensor],
    *,
    rank: int,
    rounds: int,
    seed: int = 0,
) -> Apart[Kept]:
    """The nearest of so many rounds.

    Args:
        weight_OI: W, floating point.
        rounding: makes q of a matrix of its shape, given in fp32 or wider (in the first round: W itself).
        values: Q, of what `rounding` made.
        rank: r, at most the smaller side.
        rounds: at least 1.
        seed: of the decomposition.
    """
    wanted = weight_OI.double()
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    target, nearest = weight_OI, None
    for _ in range(rounds):
        rounded = rounding(target)
        left = wanted - values(rounded).double()
        b_OR, a_RI = svd.factors(svd.best(left, rank=rank, seed=seed), rank)
        low = b_OR @ a_RI
        error = float((left - low).square().sum().sqrt())
        if nearest is None or error < nearest.error:
            nearest = Apart(rounded, b_OR, a_RI, error)
        target = (wanted - low).to(wide)
    assert nearest is not None
    return nearest
