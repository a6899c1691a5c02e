"""Attention by rows as Transformers calls it: what is registered, and what a model's own words mean for it.

The mask that the model would build is replaced by the `Context` that travels with the batch: `AttentionMaskInterface`
must be registered beside `AttentionInterface`, or padded and packed logits are wrong.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from afina.errors import ModelError
from afina.ops.attention import rows_attention
from afina.ops.prefix import Prefix
from afina.types import Context

NAME = "afina_rows"
"""The name under which the attention function is known to Transformers."""


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


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
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
    afina_prefix: Prefix | None = None,
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
    if afina_prefix is not None:
        k, v = afina_prefix.into(module, k, v, afina_context)
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
