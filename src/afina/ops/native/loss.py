"""Losses of rows of products, and their slopes in the products' place, in `loss.cpp`.

Legend: C rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import c_double, c_int64
from typing import Any

import torch
from torch import Tensor, nn

from afina.ops import native
from afina.ops.native.gemm import gemm, part
from afina.ops.native.rooms import wide_rooms
from afina.types import IGNORE

IDS = 1024
"""Of the vocabulary at a time, a multiple of 32."""


def takes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a head's loss can be had here: plain tensors in bf16 on a CPU, and there are kernels."""
    given = [x for x in (hidden, weight, bias) if x is not None]
    return (
        all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in given)
        and hidden.dtype == weight.dtype == torch.bfloat16
        and (bias is None or bias.dtype in (torch.bfloat16, torch.float32))
        and native.library() is not None
    )


def inward(slopes_CV: Tensor, weight_VD: Tensor, to_CD: Tensor) -> None:
    """Writes the slopes by the head, (C, D): the vocabulary some ids at a time, so that they stay near the core."""
    vocabulary = weight_VD.shape[0]
    if vocabulary % 32 or not weight_VD.is_contiguous():
        torch.mm(slopes_CV, weight_VD, out=to_CD)
        return
    sums_CD = wide_rooms.take(*to_CD.shape)
    for first in range(0, vocabulary, IDS):
        some = slice(first, min(first + IDS, vocabulary))
        piece = part(slopes_CV[:, some], weight_VD[some], by_rows=True)
        gemm(sums_CD, piece, more=first > 0)
    to_CD.copy_(sums_CD)
    wide_rooms.give(sums_CD)


def losses_(
    products_CV: Tensor,
    targets_C: Tensor,
    *,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    above_C: Tensor | None = None,
    slopes: bool = False,
) -> Tensor:
    """Minus the log-probability of each target (C,), in fp32; and slopes, in the products' place.

    Args:
        products_CV: bf16, dense; hidden states by the head.
        targets_C: ids; where IGNORE, loss and slopes are 0.
        bias_V: of the head, bf16 or fp32.
        scale: factor of the logits.
        softcap: logits become softcap·tanh(logits / softcap).
        above_C: factors of the slopes, which are ∂loss/∂products.
        slopes: whether they are asked for; the products are lost to them.

    Raises:
        IndexError: a target that is no id of the vocabulary.
    """
    positions, vocabulary = products_CV.shape
    targets_C = targets_C.to(torch.int64).contiguous()
    if bool(((targets_C >= vocabulary) | (targets_C < 0) & (targets_C != IGNORE)).any()):
        raise IndexError(f"a target is none of the {vocabulary} ids of the head")
    # Held by name until the kernel is done.
    bias_V = None if bias_V is None else bias_V.contiguous()
    above_C = None if above_C is None else above_C.to(torch.float32).contiguous()
    losses_C = torch.empty(positions, dtype=torch.float32)
    found: Any = native.library()
    found.afina_loss(
        native.address(products_CV),
        c_int64(positions),
        c_int64(vocabulary),
        native.address(bias_V),
        c_int64(bias_V is not None and bias_V.dtype == torch.float32),
        c_double(scale),
        c_double(softcap or 0.0),
        native.address(targets_C),
        c_int64(IGNORE),
        native.address(above_C),
        native.address(losses_C),
        c_int64(slopes),
    )
    return losses_C
