"""Tokens of a packed line to their places in blocks of rows, and back: gathers with a backward that adds little.

Legend: T tokens of the line, P places of queries, Q places of keys (a shared token has several), H heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def pick(x_THD: Tensor, there_P: Tensor, back_T: Tensor) -> Tensor:
    """Each token to its place, and its last copies to the padding, through which no gradient comes back (P, H, D).

    Args:
        x_THD: one line of tokens.
        there_P: of each place the token that goes there.
        back_T: of each token the one place through which its gradient comes back.
    """
    return _call(_Pick, x_THD, there_P, back_T)


def unpick(x_PHD: Tensor, back_T: Tensor) -> Tensor:
    """The inverse of `pick` (T, H, D)."""
    return _call(_Unpick, x_PHD, back_T)


def copy(x_THD: Tensor, there_Q: Tensor) -> Tensor:
    """Each token to all its places (Q, H, D); what comes back from them is summed, in fp32 or wider."""
    return _call(_Copy, x_THD, there_Q)


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*args)  # pyright: ignore[reportUnknownMemberType]


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, there_P: Tensor, back_T: Tensor) -> Tensor:
        ctx.save_for_backward(back_T)
        return x_THD.index_select(0, there_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back_T,) = ctx.saved_tensors
        return grads[0].index_select(0, back_T), None, None


class _Unpick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PHD: Tensor, back_T: Tensor) -> Tensor:
        ctx.save_for_backward(back_T)
        ctx.length = x_PHD.shape[0]
        return x_PHD.index_select(0, back_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back_T,) = ctx.saved_tensors
        # Every real token is in back_T once: the copies find their places, and padding gets nothing.
        given = grads[0].new_zeros(ctx.length, *grads[0].shape[1:])
        return given.index_copy_(0, back_T, grads[0]), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, there_Q: Tensor) -> Tensor:
        ctx.save_for_backward(there_Q)
        ctx.length = x_THD.shape[0]
        return x_THD.index_select(0, there_Q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (there_Q,) = ctx.saved_tensors
        (grad_QHD,) = grads
        wide = torch.promote_types(grad_QHD.dtype, torch.float32)
        given = grad_QHD.new_zeros(ctx.length, *grad_QHD.shape[1:], dtype=wide)
        return given.index_add_(0, there_Q, grad_QHD.to(wide)).to(grad_QHD.dtype), None
