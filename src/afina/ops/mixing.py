"""Ways to mix the changes that several adapters make to one tensor.

    weighted sum      Σᵢ wᵢ dᵢ
    magnitude_prune   Σᵢ wᵢ top(dᵢ)
    dare_linear       Σᵢ wᵢ mᵢ dᵢ / q,          mᵢ 1 with probability q, else 0
    ties              mean of the wᵢ top(dᵢ) whose sign is that of their sum, place by place
    dare_ties         the same of the wᵢ mᵢ dᵢ / q

Legend: d a change of a tensor, w its weight, q the density; top(d) keeps the share q of largest magnitude. The mean is
over those that agree: their sum, divided by their number.

The signs are elected among the *weighted* changes, so that a change that is subtracted votes for what it does. PEFT
elects among the unweighted; with weights of one size and sign the two are the same.

Source: TIES: Yadav et al. 2023, "TIES-Merging", arXiv 2306.01708, section 4 (trim, elect sign, disjoint merge), with
the trimming tensor by tensor. DARE: Yu et al. 2023, "Language Models are Super Mario", arXiv 2311.03099, equation 3.
Weighted sum and negation: Ilharco et al. 2022, "Editing Models with Task Arithmetic", arXiv 2212.04089.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mix = Callable[[Sequence[Tensor], Sequence[float], float, torch.Generator], Tensor]
"""Changes of one shape, their weights, the density, and where chance comes from; to one change."""


def weighted_sum(changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σᵢ wᵢ dᵢ, of changes of one shape."""
    total = changes[0] * weights[0]
    for change, weight in zip(changes[1:], weights[1:], strict=True):
        total = total.add_(change, alpha=weight)
    return total


def keep_largest(change: Tensor, density: float) -> Tensor:
    """The share `density` of the values, the largest in magnitude; of equal ones the first. The others are 0."""
    flat = change.reshape(-1)
    count = int(density * flat.numel())
    if count == 0:
        return torch.zeros_like(change)
    sizes = flat.abs()
    limit = sizes.kthvalue(flat.numel() - count + 1).values
    kept = sizes > limit
    equal = (sizes == limit).nonzero()[:, 0]
    kept[equal[: count - int(kept.sum())]] = True
    return torch.where(kept, flat, 0).reshape(change.shape)


def drop(change: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Each value kept with probability `density` and divided by it, else 0: the same in expectation."""
    chances = torch.rand(change.shape, generator=generator, dtype=torch.float64)
    return torch.where(chances.to(change.device) < density, change / density, 0)


def mean_of_agreeing(weighted: Sequence[Tensor]) -> Tensor:
    """Place by place, the mean of those values that are not 0 and have the sign of the sum of all."""
    sign = weighted_sum(weighted, [1.0] * len(weighted)).sign()
    total, number = torch.zeros_like(sign), torch.zeros_like(sign)
    for one in weighted:
        agrees = (one.sign() == sign) & (sign != 0)
        total += torch.where(agrees, one, 0)
        number += agrees
    return total / number.clamp(min=1)


def magnitude_prune(
    changes: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """The weighted sum of the largest values of each change."""
    return weighted_sum([keep_largest(one, density) for one in changes], weights)


def dare_linear(
    changes: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """The weighted sum of a random part of each change, scaled up to the whole."""
    return weighted_sum([drop(one, density, generator) for one in changes], weights)


def ties(
    changes: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """The largest values of each change, and of these the mean of those that agree in sign."""
    trimmed = [keep_largest(one, density) for one in changes]
    return mean_of_agreeing([one * w for one, w in zip(trimmed, weights, strict=True)])


def dare_ties(
    changes: Sequence[Tensor], weights: Sequence[float], density: float, generator: torch.Generator
) -> Tensor:
    """A random part of each change, scaled up, and of these the mean of those that agree in sign."""
    thinned = [drop(one, density, generator) for one in changes]
    return mean_of_agreeing([one * w for one, w in zip(thinned, weights, strict=True)])


MIXES: dict[str, Mix] = {
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
    "magnitude_prune": magnitude_prune,
}
"""What cannot be said of factors: each of these writes the changes out."""
