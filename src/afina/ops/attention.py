"""Exact attention over packed rows: each row attends to itself alone, and no cross-row score is computed.

The rows of a packed line are gathered into (rows, longest) and run as one batch, then put back in their places. It
is entered through Transformers' `AttentionInterface`; the mask the model would build is replaced by the `Context`
that travels with the batch (`AttentionMaskInterface` must be registered too, or padded and packed logits are wrong).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afina.errors import ModelError
from afina.types import Context

NAME = "afina_rows"
"""The name under which the attention function is known to Transformers."""


def with_layout(context: Context) -> Context:
    """Adds the places of a packed line's rows to its context.

    Args:
        context: with segments_BT of one line (B = 1); -1 is padding.

    Returns:
        The context with gather_NL, scatter_T and valid_NL; padding forms a row of its own.
    """
    segments_T = cast("list[int]", context.segments_BT[0].tolist())  # pyright: ignore[reportUnknownMemberType]
    starts = [i for i, s in enumerate(segments_T) if i == 0 or s != segments_T[i - 1]]
    lengths = [b - a for a, b in zip(starts, [*starts[1:], len(segments_T)], strict=True)]
    longest = max(lengths)
    places = torch.arange(longest)
    starts_N, lengths_N = torch.tensor(starts), torch.tensor(lengths)
    valid_NL = places[None] < lengths_N[:, None]
    # A short row repeats its last token: causal attention never looks there, and `valid` hides it elsewhere.
    gather_NL = starts_N[:, None] + torch.minimum(places[None], lengths_N[:, None] - 1)
    scatter_T = valid_NL.flatten().nonzero()[:, 0]
    device = context.segments_BT.device
    return replace(
        context,
        gather_NL=gather_NL.to(device),
        scatter_T=scatter_T.to(device),
        valid_NL=valid_NL.to(device),
    )


def rows_attention(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    context: Context,
    *,
    causal: bool,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each query over its own row; arguments and result as `ops.reference.attention`.

    Where a query is padding the result is finite and means nothing.
    """
    gather = context.gather_NL
    if gather is None:
        valid = context.segments_BT >= 0
        return _attend(q_BHTD, k_BHTD, v_BHTD, valid, causal, scaling, window, softcap, dropout)
    assert context.scatter_T is not None
    assert context.valid_NL is not None
    q, k, v = (_gather(x, gather) for x in (q_BHTD, k_BHTD, v_BHTD))
    out_NHLD = _attend(q, k, v, context.valid_NL, causal, scaling, window, softcap, dropout)
    lines = out_NHLD.transpose(1, 2).reshape(-1, *out_NHLD.shape[1::2])
    return lines.index_select(0, context.scatter_T).transpose(0, 1)[None]


def _gather(x_1HTD: Tensor, gather_NL: Tensor) -> Tensor:
    """(1, H, T, D) -> (N, H, L, D)."""
    lines = x_1HTD[0].transpose(0, 1).index_select(0, gather_NL.flatten())
    return lines.view(*gather_NL.shape, *lines.shape[1:]).transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid_NL: Tensor,
    causal: bool,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    length = q.shape[2]
    windowed = window is not None and window < length
    if causal and not windowed and not softcap:
        # Rows are padded on the right, so no real query sees padding, and the kernel needs no mask.
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    seen = _visible(valid_NL, causal, window if windowed else None)
    if not softcap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scaling or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1, dtype=wide)
    return F.dropout(weights.to(q.dtype), dropout) @ v


def _visible(valid_NL: Tensor, causal: bool, window: int | None) -> Tensor:
    """(N, 1, L, L) booleans; padding sees itself, so that its softmax stays finite."""
    length = valid_NL.shape[1]
    steps = torch.arange(length, device=valid_NL.device)
    distance = steps[:, None] - steps[None, :]
    seen = valid_NL[:, None, :].expand(-1, length, -1)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window if causal else distance.abs() < window)
    return (seen | (distance == 0)[None])[:, None]


class _HasAttention(Protocol):
    config: Any

    def set_attn_implementation(self, name: str) -> None: ...


@contextmanager
def rows(model: nn.Module) -> Generator[None, None, None]:
    """Inside the block the model's attention goes by rows (see `rows_attention`).

    Raises:
        ModelError: when the model does not take its attention from Transformers' interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _interface)  # pyright: ignore[reportUnknownMemberType]
    AttentionMaskInterface.register(NAME, _reach)  # pyright: ignore[reportUnknownMemberType]
    speaker: _HasAttention = model  # type: ignore[assignment]
    before = speaker.config._attn_implementation
    speaker.set_attn_implementation(NAME)
    if speaker.config._attn_implementation != NAME:
        raise ModelError(
            "this model's attention cannot be told which row a token belongs to",
            got=type(model).__name__,
            cure="train with data.packing=false",
        )
    try:
        yield
    finally:
        speaker.set_attn_implementation(before)


def _reach(*args: object, local_size: int | None = None, **kwargs: object) -> Tensor | None:
    """In place of a mask, which is the context's matter: the window that the mask would have had."""
    return None if local_size is None else torch.tensor(local_size)


def _interface(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    afina_context: Context | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What Transformers calls; returns (B, T, H, D)."""
    if afina_context is None:
        raise ModelError(
            "attention by rows was called without its context",
            cure="call the model through afina.models.forward, or outside the `rows` block",
        )
    unknown = [
        name for name in ("s_aux", "position_bias", "head_mask") if others.get(name) is not None
    ]
    if unknown:
        raise ModelError(
            "this model's attention has a part that attention by rows does not know",
            got=", ".join(unknown),
            cure="train with data.packing=false",
        )
    # Some models tell their window, or their chunks, to the mask alone.
    if attention_mask is not None and sliding_window not in (
        reach := int(attention_mask),
        reach + 1,
    ):
        raise ModelError(
            "this model limits what a token sees in a way that attention by rows is not told",
            got=f"{reach} tokens in the mask, a window of {sliding_window} in the attention",
            cure="train with data.packing=false",
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    out = rows_attention(
        q,
        k,
        v,
        afina_context,
        causal=bool(causal),
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    return out.transpose(1, 2), None
