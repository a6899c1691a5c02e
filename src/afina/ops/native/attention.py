"""Attention over the runs of a packed line in `attention.cpp`.

Legend: T tokens of the line, H heads, K key heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_double, c_int64
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afina.ops import native
from afina.ops.native.rooms import wide_rooms
from afina.types import Runs

WIDEST = 256
"""Heads that are no wider keep their tiles in a core's cache."""


def knows(q_1HTW: Tensor, k_1KTW: Tensor) -> bool:
    """Whether the kernels compute attention of such queries and keys here."""
    fits = q_1HTW.dtype == k_1KTW.dtype == torch.bfloat16 and q_1HTW.device.type == "cpu"
    width = q_1HTW.shape[3]
    return fits and width % 32 == 0 and width <= WIDEST and native.library() is not None


def attention(
    q_1HTW: Tensor,
    k_1KTW: Tensor,
    v_1KTW: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of every query of a packed line over its own row, (1, H, T, W); differentiable once.

    Args:
        q_1HTW: such as `knows` agrees to.
        k_1KTW: likewise, for as many tokens.
        v_1KTW: as the keys.
        runs: that fill the line.
        causal: no later key is seen.
        scale: of the scores; 1 / √W when None.
        window: keys at this distance or further are not seen.
    """
    function = cast("Callable[..., Tensor]", _Attention.apply)  # pyright: ignore[reportUnknownMemberType]
    scale = q_1HTW.shape[3] ** -0.5 if scale is None else scale
    return function(q_1HTW, k_1KTW, v_1KTW, runs, causal, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: Runs,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> Tensor:
        heads, key_heads = q.shape[1], k.shape[1]
        lines = [_line(x) for x in (q, k, v)]
        out = torch.empty_like(lines[0])
        logsum = torch.empty(q.shape[2], heads)
        ctx.settings = (runs, heads, key_heads, scale)
        how: dict[str, Any] = {"causal": causal, "window": window}
        ctx.how = how
        attend(lines[0], lines[1], lines[2], out, logsum, *ctx.settings, **how)
        ctx.save_for_backward(*lines, out, logsum)
        return _heads(out, heads)

    @staticmethod
    @once_differentiable  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsum = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        by = [torch.empty_like(x) for x in (q, k, v)]
        above = _line(grads[0])
        attend_back(q, k, v, out, logsum, above, by[0], by[1], by[2], *ctx.settings, **ctx.how)
        _, heads, key_heads, _ = ctx.settings
        slopes = [_heads(x, n) for x, n in zip(by, (heads, key_heads, key_heads), strict=True)]
        return *slopes, None, None, None, None


def _line(x_1HTW: Tensor) -> Tensor:
    """(1, H, T, W) -> (T, H * W), its rows dense."""
    return x_1HTW[0].transpose(0, 1).flatten(1).contiguous()


def _heads(x_TC: Tensor, heads: int) -> Tensor:
    """(T, H * W) -> (1, H, T, W)."""
    return x_TC.view(x_TC.shape[0], heads, -1).transpose(0, 1)[None]


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
