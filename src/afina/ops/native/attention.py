"""Attention over the runs of a packed line in `attention.cpp`.

Legend: T tokens of the line, H heads, K key heads, W width of a head.
"""

from __future__ import annotations

from ctypes import c_double, c_int64
from typing import Any

import torch
from torch import Tensor

from afina.ops import native
from afina.ops.native.rooms import wide_rooms
from afina.types import Runs


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsum_TH: Tensor,
    runs: Runs,
    heads: int,
    key_heads: int,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
) -> None:
    """Writes the attention of every query over its own row, and the logarithms of the softmax's denominators.

    Args:
        q: (T, H * W), bf16, its rows dense; W a multiple of 32.
        k: (T, K * W), likewise.
        v: as `k`.
        out: as `q`; written.
        logsum_TH: fp32; written.
        runs: of the line, which they fill.
        heads: H.
        key_heads: K.
        scale: of the scores.
        causal: no later key is seen.
        window: keys at this distance or further are not seen.
    """
    found: Any = native.library()
    found.afina_attention_forward(
        *_lines(q, k, v, out),
        native.address(logsum_TH),
        *_sizes(q, runs, heads, key_heads, scale, causal, window),
    )


def attend_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsum_TH: Tensor,
    by_out: Tensor,
    by_q: Tensor,
    by_k: Tensor,
    by_v: Tensor,
    runs: Runs,
    heads: int,
    key_heads: int,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
) -> None:
    """Writes the gradients of queries, keys and values; arguments as of `attend`, whose results it needs."""
    found: Any = native.library()
    tokens = q.shape[0]
    width = q.shape[1] // heads
    threads = torch.get_num_threads()
    room = wide_rooms.take(2 * threads * tokens * key_heads * width)
    found.afina_attention_backward(
        *_lines(q, k, v, out),
        native.address(logsum_TH),
        *_lines(by_out, by_q, by_k, by_v),
        *_sizes(q, runs, heads, key_heads, scale, causal, window),
        c_int64(tokens),
        c_int64(threads),
        native.address(room),
    )
    wide_rooms.give(room)


def _lines(*lines: Tensor) -> list[Any]:
    """Of each its address, and how far its rows are apart."""
    return [x for line in lines for x in (native.address(line), c_int64(line.stride(0)))]


def _sizes(
    q: Tensor,
    runs: Runs,
    heads: int,
    key_heads: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> list[Any]:
    numbers = (heads, key_heads, q.shape[1] // heads, runs.starts.shape[0])
    parts = (runs.starts, runs.lengths, runs.offsets, runs.piece_starts, runs.piece_lengths)
    return [
        *map(c_int64, numbers),
        *map(native.address, parts),
        c_double(scale),
        c_int64(causal),
        c_int64(window or 0),
    ]
