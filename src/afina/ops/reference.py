"""Slow and obvious: the arbiter of every test."""

from __future__ import annotations

import math

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
