"""A product with a frozen weight that is kept in few bits and computed anew each time it is needed.

    y = x w',    dx = dy w'ᵀ    (w' as (in, out); the reverse where it lies as (out, in))

Kept for backward is the packed weight, which is there anyway; never w'.

Legend: x (..., in) input, w' the values of the packed weight, y (..., out).

Source: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3, equation 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from afina.ops import native
from afina.ops.native import gemm
from afina.ops.quantise import Quantised


class Packed(Protocol):
    """A tensor that computes its values when they are needed."""

    compute: torch.dtype | None

    @property
    def packed(self) -> Quantised:
        """Its parts."""
        ...

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """Its values, of that type."""
        ...


def multiply(x: Tensor, weight: Packed, *, transposed: bool) -> Tensor:
    """x w'ᵀ, or x w' where the weight is stored as (in, out), in the weight's own type of products.

    Args:
        x: (..., in), any floating-point type.
        weight: (out, in); frozen.
        transposed: it is (in, out).

    Returns:
        (..., out), in x's type.
    """
    apply = cast("Callable[..., Tensor]", _Product.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(x, weight, transposed)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.transposed = transposed
        return _product(x, weight, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = cast("tuple[Any]", ctx.saved_tensors)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _product(grads[0], weight, not ctx.transposed), None, None


def _product(x: Tensor, weight: Packed, transposed: bool) -> Tensor:
    compute = weight.compute or x.dtype
    fast = compute == x.dtype and not torch.compiler.is_compiling() and native.serves(x)
    if fast and gemm.serves(weight.packed):
        return _by_kernel(x, weight.packed, transposed)
    values = weight.unpacked(compute)
    return F.linear(x.to(compute), values.t() if transposed else values).to(x.dtype)


def _by_kernel(x: Tensor, b: Quantised, transposed: bool) -> Tensor:
    """The same in bf16, without the weight's values in memory."""
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    # No view, for autograd would not let a change beside the map be added in place.
    y = x.new_empty(*x.shape[:-1], b.shape[1 if transposed else 0])
    gemm.gemm(y.view(-1, y.shape[-1]), gemm.part(x_MK, b, by_rows=transposed))
    return y
