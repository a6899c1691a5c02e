"""Slow and obvious: the arbiter of every test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afina.types import IGNORE


def attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    segments_BT: Tensor,
    *,
    causal: bool,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of each query over the keys of its own row, one score at a time in one matrix.

    Args:
        q_BHTD: queries (B, H, T, D).
        k_BHTD: keys; their heads divide the queries'.
        v_BHTD: values, as the keys.
        segments_BT: number of each token's row; -1 is padding, which nobody sees.
        causal: a query sees no later key.
        scaling: factor of the scores; 1/sqrt(D) when None.
        window: a query sees the `window` latest keys only, itself included.
        softcap: scores become softcap·tanh(score / softcap).

    Returns:
        (B, H, T, D); zero where a query is padding.
    """
    repeat = q_BHTD.shape[1] // k_BHTD.shape[1]
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k_BHTD, v_BHTD))
    scores = q_BHTD @ k.transpose(-1, -2) * (scaling or 1 / math.sqrt(q_BHTD.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(segments_BT, causal=causal, window=window)[:, None]
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1).nan_to_num(0.0)
    return weights @ v


def visible(segments_BT: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """(B, T, T) booleans: query i sees key j. Rows never see each other; padding is never seen."""
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    seen = same & (segments_BT >= 0)[:, None, :]
    steps = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    distance = steps[:, None] - steps[None, :]
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window if causal else distance.abs() < window)
    return seen


def token_losses(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Minus the log-probability of each target; zero where the target is IGNORE."""
    logprobs = logits_NV - torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    picked = logprobs.gather(-1, targets_N.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets_N == IGNORE, 0.0, -picked)


def low_rank_linear(
    x: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float
) -> Tensor:
    """x (W + s·B A)ᵀ with the changed weight written out."""
    return x @ (weight_OI + scaling * (b_OR @ a_RI)).t()


def rounded_through(x: Tensor, exponent: int) -> Tensor:
    """x as a multiple of 2^-exponent, with the gradient of x."""
    return x + (torch.round(x * 2.0**exponent) * 2.0**-exponent - x).detach()


def multi_bit_bdia(
    x: Tensor,
    blocks: Sequence[Callable[[Tensor], Tensor]],
    factors: Sequence[Tensor | float],
    bits: int,
    exponent: int,
) -> Tensor:
    """The last state of blocks that are run reversibly, by ordinary autograd: nothing is forgotten or computed back.

    Args:
        x: what the first block is given.
        blocks: from a state to the next; the first of them is run plainly.
        factors: ±2^-bits of each but the first; numbers, or tensors that fit x.
        bits: m.
        exponent: l of the grid 2^-l.
    """
    past = rounded_through(x, exponent)
    cur = rounded_through(blocks[0](past), exponent)
    for block, factor in zip(blocks[1:], factors, strict=True):
        digits = torch.remainder(past.detach() * 2.0**exponent, 2.0**bits) * 2.0**-exponent
        mixed = (1 - factor) * cur + (1 + factor) * (block(cur) - cur)
        past, cur = cur, factor * (past - digits) + rounded_through(mixed, exponent)
    return cur


def additive_coupling(
    x: Tensor,
    halves: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
    exponent: int,
) -> Tensor:
    """The mean of two streams that add to each other in turn, by ordinary autograd.

    Args:
        x: what both begin with.
        halves: of each block what its attention adds, and what its feed-forward adds.
        exponent: l of the grid 2^-l.
    """
    one = two = rounded_through(x, exponent)
    for attention_of, feed_forward in halves:
        one = one + rounded_through(attention_of(two), exponent)
        two = two + rounded_through(feed_forward(one), exponent)
    return (one + two) / 2
