"""Exact attention over a packed line by the package flash-attn, which users of a GPU may have.

Its function for lengths that vary takes a line of queries and one of keys, cut at the same number of places. A run of
the line is cut out with the tokens that come before it and its own as keys, of which its queries see, by the package's
rule, what lies before each: query i of n stands beside key i + (keys - n).

It has not been run on a GPU here, so it is taken only where it is asked for (`train.attention=flash`).

Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691; `flash_attn_varlen_func` as documented in flash-attn 2.8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from afina.ops.gathers import copy
from afina.types import Runs

FORMATS = (torch.float16, torch.bfloat16)
WIDEST = 256
"""Width of a head."""


@dataclass(frozen=True)
class Cuts:
    """How a line's runs lie in the lines of queries and keys.

    Attributes:
        queries_P: place in the line of each query; None where all lie in their order.
        keys_Q: place in the line of each key; None likewise.
        query_ends, key_ends: where the runs begin, and the end; int32, one more than runs.
        queries_most, keys_most: of a run.
    """

    queries_P: Tensor | None
    keys_Q: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    queries_most: int
    keys_most: int


def knows(q_HTD: Tensor, k_HTD: Tensor) -> bool:
    """Whether the package takes such tensors."""
    formats = q_HTD.dtype in FORMATS and k_HTD.dtype == q_HTD.dtype
    return formats and q_HTD.shape[-1] <= WIDEST and q_HTD.shape[-1] % 8 == 0


def cuts_of(runs: Runs, tokens: int, device: torch.device) -> Cuts:
    """The cuts of a line.

    Args:
        runs: of the line.
        tokens: that it has.
        device: of the attention.
    """
    own = list(zip(_numbers(runs.starts), _numbers(runs.lengths), strict=True))
    pieces = list(zip(_numbers(runs.piece_starts), _numbers(runs.piece_lengths), strict=True))
    before = [pieces[first:last] for first, last in pairwise(_numbers(runs.offsets))]
    seen = [[*earlier, run] for earlier, run in zip(before, own, strict=True)]
    queries, keys = (
        [list(_places(of)) for of in spans] for spans in ([[run] for run in own], seen)
    )

    def line(each: list[list[int]]) -> Tensor | None:
        flat = [place for one in each for place in one]
        plain = flat == list(range(tokens))
        return None if plain else torch.tensor(flat, dtype=torch.int64, device=device)

    def ends(each: list[list[int]]) -> Tensor:
        sizes = torch.tensor([0, *map(len, each)], dtype=torch.int32)
        return sizes.cumsum(0, dtype=torch.int32).to(device)

    most = (max(map(len, each), default=0) for each in (queries, keys))
    return Cuts(line(queries), line(keys), ends(queries), ends(keys), *most)


def _numbers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor]


def _places(spans: list[tuple[int, int]]) -> list[int]:
    return [place for start, length in spans for place in range(start, start + length)]


def attend(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cuts: Cuts,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of each token over what its run sees; zeros for tokens of no run.

    Args:
        q_THD: queries of the line, all heads.
        k_TKD: keys, of heads that divide those.
        v_TKD: values.
        cuts: of the line.
        causal: whether a query sees nothing behind itself.
        scale: of the scores; None is 1/sqrt(width).
        window: places that a query sees, itself counted; None is all.
    """
    function: Any = import_module("flash_attn").flash_attn_varlen_func
    q = q_THD if cuts.queries_P is None else copy(q_THD, cuts.queries_P)
    k, v = (x if cuts.keys_Q is None else copy(x, cuts.keys_Q) for x in (k_TKD, v_TKD))
    far = -1 if window is None else window - 1
    out: Tensor = function(
        *(x.contiguous() for x in (q, k, v)),
        cu_seqlens_q=cuts.query_ends,
        cu_seqlens_k=cuts.key_ends,
        max_seqlen_q=cuts.queries_most,
        max_seqlen_k=cuts.keys_most,
        softmax_scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        causal=causal,
        window_size=(far, 0 if causal and window is not None else far),
    )
    if cuts.queries_P is None:
        return out
    return torch.zeros_like(q_THD).index_copy(0, cuts.queries_P, out)
