# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportUnknownLambdaType=false, reportOptionalMemberAccess=false
"""Attention over packed rows as Triton kernels: one line of queries, one of keys, each query seeing a range of keys.

    S = scale · Q Kᵀ,   L = logsumexp_j S,   P = exp(S − L),   O = P V
    dV = Pᵀ dO,   dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)),   dQ = scale · dS K,   dK = scale · dSᵀ Q

What a query sees is a range of keys (`ops.ranges`), and tiles outside of it are not computed.
Forward keeps a running maximum; backward computes P again from L, in one kernel by queries (dQ) and one by keys (dK,
dV, summed over the query heads that share them), so that nothing is added by several programs and results do not depend
on their order. Grouped queries copy no key.

Equal to `ops.reference` in Triton's interpreter (`TRITON_INTERPRET=1`), values and gradients. On a GPU nobody has run
it yet, so it is taken only where it is asked for. Importing this needs the package `triton`.

Legend: T queries, S keys (the same tokens where nothing is shared), H query heads, K key heads, D width of a head.

Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2; one kernel each for dQ and dK, dV, so
without atomic additions, as in Triton's own tutorial on fused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from afina.ops.ranges import Ranges

TILE = 64
"""Queries, and keys, of a tile; 64 of either fit the shared memory of every GPU that Triton knows, up to D = 128."""

LEAST = 16
"""The smallest side of a product that Triton makes."""

WIDE: dict[torch.dtype, Any] = {torch.float64: tl.float64}
"""What scores and sums are computed in; fp32 for all others."""


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    ranges: Ranges,
    *,
    scale: float | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithms of its softmax's denominators; differentiable in q, k and v.

    Args:
        q_THD: queries.
        k_SKD: keys; their heads divide the queries'.
        v_SKD: values.
        ranges: who sees whom.
        scale: of the scores; 1/sqrt(D) when None.
        tile: queries and keys of a tile, a power of two of at least 16.

    Returns:
        out (T, H, D) in q's dtype, zero where a query sees no key; log-sum-exp (H, T) in fp32 or wider, −inf there.
    """
    if q_THD.shape[1] % k_SKD.shape[1]:
        raise ValueError(f"{k_SKD.shape[1]} key heads do not divide {q_THD.shape[1]} query heads")
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    function = cast("Callable[..., tuple[Tensor, Tensor]]", _Attend.apply)
    return function(q_THD, k_SKD, v_SKD, ranges, scale, tile)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, scale: float, tile: int
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (length, heads, _), many = q.shape, len(k)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q.dtype, torch.float32)
        logsum_HT = q.new_empty((heads, length), dtype=wide)
        cast("Any", _forward)[triton.cdiv(length, tile), heads](
            q, k, v, out, logsum_HT, ranges.first_T, ranges.last_T, length, many, scale,
            *_strides(q, k, v, out), heads // k.shape[1], **_constants(q, tile),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, logsum_HT)
        ctx.ranges, ctx.scale, ctx.tile = ranges, scale, tile
        ctx.mark_non_differentiable(logsum_HT)
        return out, logsum_HT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsum_HT = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        ranges, scale, tile = ctx.ranges, ctx.scale, ctx.tile
        grad = grads[0].contiguous()
        (length, heads, _), many = q.shape, len(k)
        inner_HT = (grad.to(logsum_HT.dtype) * out.to(logsum_HT.dtype)).sum(-1).t().contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        given = (q, k, v, grad, logsum_HT, inner_HT, ranges.first_T, ranges.last_T)
        constants = _constants(q, tile)
        group = heads // k.shape[1]
        cast("Any", _by_query)[triton.cdiv(length, tile), heads](
            *given, dq, length, many, scale, *_strides(q, k, v, grad, dq), group, **constants
        )
        cast("Any", _by_key)[triton.cdiv(many, tile), k.shape[1]](
            *given, ranges.from_S, ranges.to_S, dk, dv, length, many, scale,
            *_strides(q, k, v, grad, dk, dv), group, **constants,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def _strides(*tensors: Tensor) -> list[int]:
    """Of tokens and heads."""
    return [x.stride(dim) for x in tensors for dim in (0, 1)]


def _constants(q: Tensor, tile: int) -> dict[str, Any]:
    width = q.shape[-1]
    return {
        "WIDTH": width,
        "BLOCK_D": max(LEAST, triton.next_power_of_2(width)),
        "TILE": tile,
        "WIDE": WIDE.get(q.dtype, tl.float32),
    }


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, at, stride_t, offset, length, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens `at` of one head (tile, BLOCK_D); zero behind the line and behind the head's width."""
    column = tl.arange(0, BLOCK_D)
    there = (at < length)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + at[:, None] * stride_t + offset + column[None, :], mask=there, other=0.0)


@triton.jit
def _put(x, value, at, stride_t, offset, length, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of `_rows`."""
    column = tl.arange(0, BLOCK_D)
    there = (at < length)[:, None] & (column < WIDTH)[None, :]
    place = x + at[:, None] * stride_t + offset + column[None, :]
    tl.store(place, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _product(a, b, WIDE: tl.constexpr):
    """a bᵀ, in the wide type; fp32 is not rounded on the way."""
    return tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=WIDE)


@triton.jit
def _forward(
    q, k, v, out, logsum, first, last, length, many, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, group,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    shared = head // group
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first_q = tl.load(first + at, mask=at < length, other=many)
    last_q = tl.load(last + at, mask=at < length, other=0)
    query = _rows(q, at, q_t, head * q_h, length, WIDTH, BLOCK_D)
    most = tl.full([TILE], float("-inf"), WIDE)
    total = tl.zeros([TILE], WIDE)
    summed = tl.zeros([TILE, BLOCK_D], WIDE)
    for start in range(tl.min(first_q) // TILE * TILE, tl.max(last_q), TILE):
        keys = start + tl.arange(0, TILE)
        key = _rows(k, keys, k_t, shared * k_h, many, WIDTH, BLOCK_D)
        value = _rows(v, keys, v_t, shared * v_h, many, WIDTH, BLOCK_D)
        seen = (keys[None, :] >= first_q[:, None]) & (keys[None, :] < last_q[:, None])
        scores = tl.where(seen, _product(query, key, WIDE) * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        # A query that has seen nothing yet must not subtract infinity from infinity.
        level = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - level[:, None])
        shrunk = tl.exp(most - level)
        total = total * shrunk + tl.sum(weights, 1)
        part = tl.dot(weights.to(value.dtype), value, input_precision="ieee", out_dtype=WIDE)
        summed = summed * shrunk[:, None] + part
        most = larger
    sees = total > 0
    divisor = tl.where(sees, total, 1.0)
    _put(out, summed / divisor[:, None], at, out_t, head * out_h, length, WIDTH, BLOCK_D)
    found = tl.where(sees, most + tl.log(divisor), float("-inf"))
    tl.store(logsum + head * length + at, found, mask=at < length)


@triton.jit
def _queries(
    q, grad, logsum, inner, first, last, at, length, many, head,
    q_t, q_h, grad_t, grad_h, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What backward needs of the queries `at` of one head; those behind the line see no key."""
    first_q = tl.load(first + at, mask=at < length, other=many)
    last_q = tl.load(last + at, mask=at < length, other=0)
    logsum_q = tl.load(logsum + head * length + at, mask=at < length, other=0.0)
    inner_q = tl.load(inner + head * length + at, mask=at < length, other=0.0)
    query = _rows(q, at, q_t, head * q_h, length, WIDTH, BLOCK_D)
    above = _rows(grad, at, grad_t, head * grad_h, length, WIDTH, BLOCK_D)
    return query, above, first_q, last_q, logsum_q, inner_q


@triton.jit
def _tile(
    query, above, key, value, keys, first_q, last_q, logsum_q, inner_q, scale, WIDE: tl.constexpr
):
    """P of a tile (q, k), again, and the gradient of its scores, times the scale."""
    seen = (keys[None, :] >= first_q[:, None]) & (keys[None, :] < last_q[:, None])
    scores = _product(query, key, WIDE) * scale
    level = tl.where(logsum_q == float("-inf"), 0.0, logsum_q)
    weights = tl.where(seen, tl.exp(scores - level[:, None]), 0.0)
    return weights, weights * (_product(above, value, WIDE) - inner_q[:, None]) * scale


@triton.jit
def _by_query(
    q, k, v, grad, logsum, inner, first, last, dq, length, many, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, grad_t, grad_h, dq_t, dq_h, group,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    shared = head // group
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    query, above, first_q, last_q, logsum_q, inner_q = _queries(
        q, grad, logsum, inner, first, last, at, length, many, head,
        q_t, q_h, grad_t, grad_h, WIDTH, BLOCK_D,
    )  # fmt: skip
    summed = tl.zeros([TILE, BLOCK_D], WIDE)
    for start in range(tl.min(first_q) // TILE * TILE, tl.max(last_q), TILE):
        keys = start + tl.arange(0, TILE)
        key = _rows(k, keys, k_t, shared * k_h, many, WIDTH, BLOCK_D)
        value = _rows(v, keys, v_t, shared * v_h, many, WIDTH, BLOCK_D)
        _, by_score = _tile(
            query, above, key, value, keys, first_q, last_q, logsum_q, inner_q, scale, WIDE
        )
        summed += tl.dot(by_score.to(key.dtype), key, input_precision="ieee", out_dtype=WIDE)
    _put(dq, summed, at, dq_t, head * dq_h, length, WIDTH, BLOCK_D)


@triton.jit
def _by_key(
    q, k, v, grad, logsum, inner, first, last, since, until, dk, dv, length, many, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, grad_t, grad_h, dk_t, dk_h, dv_t, dv_h, group,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    shared = tl.program_id(1)
    keys = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = _rows(k, keys, k_t, shared * k_h, many, WIDTH, BLOCK_D)
    value = _rows(v, keys, v_t, shared * v_h, many, WIDTH, BLOCK_D)
    low = tl.min(tl.load(since + keys, mask=keys < many, other=length))
    high = tl.max(tl.load(until + keys, mask=keys < many, other=0))
    by_key = tl.zeros([TILE, BLOCK_D], WIDE)
    by_value = tl.zeros([TILE, BLOCK_D], WIDE)
    for number in range(0, group):
        head = shared * group + number
        for start in range(low // TILE * TILE, high, TILE):
            at = start + tl.arange(0, TILE)
            query, above, first_q, last_q, logsum_q, inner_q = _queries(
                q, grad, logsum, inner, first, last, at, length, many, head,
                q_t, q_h, grad_t, grad_h, WIDTH, BLOCK_D,
            )  # fmt: skip
            weights, by_score = _tile(
                query, above, key, value, keys, first_q, last_q, logsum_q, inner_q, scale, WIDE
            )
            turned = tl.trans(weights.to(above.dtype))
            by_value += tl.dot(turned, above, input_precision="ieee", out_dtype=WIDE)
            turned = tl.trans(by_score.to(query.dtype))
            by_key += tl.dot(turned, query, input_precision="ieee", out_dtype=WIDE)
    _put(dk, by_key, keys, dk_t, shared * dk_h, many, WIDTH, BLOCK_D)
    _put(dv, by_value, keys, dv_t, shared * dv_h, many, WIDTH, BLOCK_D)
