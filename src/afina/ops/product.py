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


class Packed(Protocol):
    """A tensor that computes its values when they are needed."""

    compute: torch.dtype | None

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
    values = weight.unpacked(compute)
    return F.linear(x.to(compute), values.t() if transposed else values).to(x.dtype)
