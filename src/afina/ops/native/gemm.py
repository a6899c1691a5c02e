"""Products of bf16 matrices in `gemm.cpp`: several at once, added up in fp32 and rounded once.

Legend: M rows of the result, N columns of it, K what is summed over, R rank.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from afina.ops import native
from afina.ops.quantise import NF4, Quantised, scales_of

_BF16, _FP32, _NF4, _INT8 = range(4)
"""Kinds of a B, as `product.h` numbers them."""


class Part(Structure):
    """One product; see `part`."""

    _fields_ = [
        ("a", c_void_p),
        ("a_step", c_int64),
        ("k", c_int64),
        ("b", c_void_p),
        ("b_step", c_int64),
        ("k_real", c_int64),
        ("n_real", c_int64),
        ("by_rows", c_int64),
        ("kind", c_int64),
        ("scale", c_double),
        ("scales", c_void_p),
        ("block", c_int64),
        ("levels", c_void_p),
    ]

    held: tuple[Tensor, ...] = ()
    """What it points to."""


def part(a_MK: Tensor, b: Tensor | Quantised, *, by_rows: bool = False, scale: float = 1.0) -> Part:
    """A B, or A Bᵀ.

    Args:
        a_MK: bf16, rows one after the other or further apart; K a multiple of 32.
        b: (N, K), or with `by_rows` (K, N); bf16 or fp32. Where it has less of K or N, the rest counts as zero. Or in
            few bits, if `serves` says yes: then its numbers, those of `quantise.dequantise` in bf16, are computed as
            they are read.
        by_rows: see above.
        scale: of a B in fp32; rounded with it.
    """
    k_real, n_real = b.shape if by_rows else (b.shape[1], b.shape[0])
    a = (a_MK.data_ptr(), a_MK.stride(0), a_MK.shape[1])
    if isinstance(b, Tensor):
        kind = _FP32 if b.dtype == torch.float32 else _BF16
        made = Part(*a, b.data_ptr(), b.stride(0), k_real, n_real, by_rows, kind, scale)
        made.held = a_MK, b
        return made
    kind, scales = _NF4 if b.scheme.kind == "nf4" else _INT8, scales_of(b)
    how = (kind, 1.0, scales.data_ptr(), b.scheme.block.bit_length() - 1, _levels().data_ptr())
    made = Part(*a, b.codes.data_ptr(), b.shape[1], k_real, n_real, by_rows, *how)
    made.held = a_MK, b.codes, scales
    return made


def serves(b: Quantised) -> bool:
    """Whether there is a product with such a B."""
    block = b.scheme.block
    fits = len(b.shape) == 2 and not any(size % 32 for size in b.shape)
    return fits and block >= 32 and block.bit_count() == 1 and b.codes.device.type == "cpu"


@cache
def _levels() -> Tensor:
    return torch.tensor(NF4, dtype=torch.float32)


def gemm(
    out_MN: Tensor,
    *parts: Part,
    alpha: float = 1.0,
    gain_N: Tensor | None = None,
    raw_MN: Tensor | None = None,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
    more: bool = False,
) -> Tensor:
    """out = alpha · gain ∘ (sum of the parts) + bias + residual.

    Args:
        out_MN: bf16 or fp32, its rows dense; written, and returned.
        parts: see `part`.
        alpha: see above.
        gain_N: of each column; fp32.
        raw_MN: bf16, its rows dense; gets alpha · (sum of the parts).
        bias_N: bf16.
        residual_MN: bf16; may be `out_MN` itself.
        more: it is added to `out_MN`, which is fp32.
    """
    found: Any = native.library()
    found.afina_gemm(
        c_int64(out_MN.shape[0]),
        c_int64(out_MN.shape[1]),
        (Part * len(parts))(*parts),
        c_int64(len(parts)),
        c_void_p(out_MN.data_ptr()),
        c_int64(out_MN.stride(0)),
        c_int64(out_MN.dtype == torch.float32),
        c_int64(more),
        c_double(alpha),
        native.address(gain_N),
        native.address(raw_MN),
        c_int64(0 if raw_MN is None else raw_MN.stride(0)),
        native.address(bias_N),
        native.address(residual_MN),
        c_int64(0 if residual_MN is None else residual_MN.stride(0)),
    )
    return out_MN


def padded(rank: int) -> int:
    """The columns that a low-rank product takes: a multiple of 32."""
    return -(-rank // 32) * 32
