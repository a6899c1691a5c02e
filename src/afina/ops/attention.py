"""Exact attention over packed rows: each row attends to itself alone, and no cross-row score is computed.

The rows of a packed line are gathered into blocks of rows of about one length, computed, and put back in their places.
Where rows share their beginning, the shared tokens lie in the line once: their keys are gathered into every row that
begins with them, and what the rows say about them is summed on the way back.

It is entered through Transformers' `AttentionInterface` (`ops.interface`). Three things compute it. `ops.tiles` knows
everything: soft caps, dropout that can be made again, rows of any length in memory that grows with the length alone.
PyTorch's own kernels are faster on a GPU, and on a CPU in fp32 (two to three times, forward and backward); in bf16 it
is the tiles that are faster there, for PyTorch's backward is slow, and where the CPU multiplies bf16 itself,
`ops.native.attention`, which gathers nothing. `ops.kernels` and `ops.flash` are for a GPU and wait to be measured on
one: they are taken where they are asked for (`computed_by`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from afina.errors import ConfigError
from afina.ops import flash, tiles
from afina.ops.gathers import copy, pick, unpick
from afina.ops.native import attention as native
from afina.ops.native import library, unit
from afina.ops.ranges import Ranges, ranges_of, shared_ranges
from afina.ops.tiles import Rule
from afina.types import Context, Layout, Places


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """What computes attention, for the log."""
    if _asked == "triton":
        return "afina's Triton kernels, which are unverified on a GPU"
    if _asked == "flash" and dtype in flash.FORMATS:
        return "the package flash-attn, which afina has not been tried with on a GPU"
    if device.type == "cpu" and dtype == torch.bfloat16 and library() is not None:
        return f"afina's kernels in C++ ({unit()})"
    mine = device.type == "cpu" and dtype != torch.float32
    return "afina's tiles" if mine else "PyTorch's scaled_dot_product_attention"


Way = Literal["auto", "triton", "flash"]
"""What is asked for: what is known to be fastest, `ops.kernels`, or `ops.flash`."""

_asked: Way = "auto"


@contextmanager
def computed_by(way: Way, device: torch.device) -> Generator[None, None, None]:
    """Inside the block it computes packed rows, where no soft cap and no dropout is asked for.

    Args:
        way: one of `Way`.
        device: of the model.

    Raises:
        ConfigError: it is not installed, or cannot run on this device.
    """
    global _asked
    refuse_missing(way, device)
    before, _asked = _asked, way
    try:
        yield
    finally:
        _asked = before


def refuse_missing(way: Way, device: torch.device) -> None:
    """Raises where a way cannot compute attention.

    Raises:
        ConfigError: it is not installed, or cannot run on this device.
    """
    if way == "auto":
        return
    cure = "leave train.attention out: then what is known to work here computes it"
    package = {"triton": "triton", "flash": "flash_attn"}[way]
    if find_spec(package) is None:
        get = (
            "torch for CUDA, which brings it"
            if way == "triton"
            else "flash-attn, as it says itself"
        )
        raise ConfigError(
            f"train.attention={way} needs the package {package}", cure=f"install {get}; or {cure}"
        )
    if device.type != "cuda" and not (way == "triton" and _interpreted()):
        raise ConfigError(f"train.attention={way} needs a CUDA device", got=str(device), cure=cure)


def _interpreted() -> bool:
    from triton import knobs  # pyright: ignore

    return bool(knobs.runtime.interpret)  # pyright: ignore


# --- attention -----------------------------------------------------------------------------------------------------


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
    # The seed comes from torch's own generator, so that recomputation, which restores it, gets the same mask.
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    rule = Rule(causal, scaling, window, softcap, dropout, seed)
    layout = context.layout
    if layout is None:
        return _padded(q_BHTD, k_BHTD, v_BHTD, context.segments_BT >= 0, rule)
    if _asked == "triton" and not softcap and not dropout:
        return _in_kernels(q_BHTD, k_BHTD, v_BHTD, context, layout, rule)
    if _asked == "flash" and not softcap and not dropout and flash.knows(q_BHTD, k_BHTD):
        return _in_flash(q_BHTD, k_BHTD, v_BHTD, layout, rule)
    if not softcap and not dropout and native.knows(q_BHTD, k_BHTD):
        how: dict[str, Any] = {"causal": causal, "scale": scaling, "window": window}
        return native.attention(q_BHTD, k_BHTD, v_BHTD, layout.runs, **how)
    q_PHD = pick(_by_token(q_BHTD), layout.queries_P, layout.back_T)
    if layout.shared:
        k_QKD, v_QKD = (copy(_by_token(x), layout.keys_Q) for x in (k_BHTD, v_BHTD))
    else:
        k_QKD, v_QKD = (pick(_by_token(x), layout.keys_Q, layout.back_T) for x in (k_BHTD, v_BHTD))
    outs: list[Tensor] = []
    queries_at = keys_at = 0
    for rows, length, keys, places in layout.blocks:
        q_MHLD = _rows(q_PHD, queries_at, rows, length)
        k_MKSD, v_MKSD = (_rows(x, keys_at, rows, keys) for x in (k_QKD, v_QKD))
        # Padding repeats a row's last query, which sees at least itself: every result is finite.
        ruled = replace(rule, seed=seed + queries_at)
        out_MHLD = _attend(q_MHLD, k_MKSD, v_MKSD, places, ruled, layout.masks)
        outs.append(out_MHLD.transpose(1, 2).reshape(rows * length, *q_PHD.shape[1:]))
        queries_at += rows * length
        keys_at += rows * keys
    out_PHD = outs[0] if len(outs) == 1 else torch.cat(outs)
    return unpick(out_PHD, layout.back_T).transpose(0, 1)[None]


def _by_token(x_1HTD: Tensor) -> Tensor:
    """(1, H, T, D) -> (T, H, D)."""
    return x_1HTD[0].transpose(0, 1)


def _rows(x_PHD: Tensor, start: int, rows: int, length: int) -> Tensor:
    """Rows that lie one after the other -> (M, H, L, D)."""
    part = x_PHD[start : start + rows * length]
    return part.view(rows, length, *x_PHD.shape[1:]).transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: Rule, masks: dict[Any, Tensor | None]
) -> Tensor:
    on_cpu = q.device.type == "cpu"
    if on_cpu and (q.dtype != torch.float32 or rule.softcap or rule.dropout or _wide(q, k)):
        return tiles.attend(q, k, v, places, rule)[0]
    far = max(places.first_most + q.shape[2], k.shape[2])
    square = q.shape[2] == k.shape[2] and places.first_most == 0
    windowed = rule.window is not None and rule.window < far
    if rule.causal and square and not windowed and not rule.softcap:
        # Rows are padded on the right, so no real query sees padding, and the kernel needs no mask.
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=rule.scale, dropout_p=rule.dropout, enable_gqa=True
        )
    key = (id(places), q.shape[2], k.shape[2], rule.causal, rule.window)
    if key not in masks:
        masks[key] = _mask(places, rule, q, k)
    return _written_out(q, k, v, masks[key], rule)


def _wide(q: Tensor, k: Tensor) -> bool:
    """Whether a mask would hold more numbers than are worth keeping."""
    return q.shape[0] * q.shape[2] * k.shape[2] > tiles.TILE_NUMBERS


def _mask(places: Places, rule: Rule, q: Tensor, k: Tensor) -> Tensor | None:
    """What a block's queries see, as a term of the scores (M, 1, L, S), or (1, 1, L, S) where rows are alike.

    All layers share it: what the kernel keeps for backward is then there once.
    """
    alike = places.first_least == places.first_most and places.keys_least >= k.shape[2]
    ends = Places(places.first_M[:1], places.keys_M[:1], *places.bounds) if alike else places
    length = q.shape[2]
    seen_ML = tiles.seen(ends, rule, length, slice(0, k.shape[2]), slice(0, length))
    if seen_ML is None:
        return None
    term = torch.zeros(seen_ML.shape, dtype=q.dtype, device=q.device)
    return term.masked_fill_(~seen_ML, -torch.inf)[:, None]


def _in_kernels(
    q: Tensor, k: Tensor, v: Tensor, context: Context, layout: Layout, rule: Rule
) -> Tensor:
    """One packed line through `ops.kernels`."""
    from afina.ops import kernels  # only here: it imports Triton

    keys = [("range", part, rule.causal, rule.window) for part in range(4)]
    if keys[0] not in layout.masks:
        how: dict[str, Any] = {"causal": rule.causal, "window": rule.window}
        made = (
            shared_ranges(layout, **how)
            if layout.shared
            else ranges_of(context.segments_BT[0], **how)
        )
        layout.masks.update(zip(keys, vars(made).values(), strict=True))
    ranges = Ranges(*(cast("Tensor", layout.masks[key]) for key in keys))
    k_SKD, v_SKD = (_by_token(x) for x in (k, v))
    if layout.shared:
        k_SKD, v_SKD = (copy(x, layout.keys_Q) for x in (k_SKD, v_SKD))
    out_THD, _ = kernels.attend(_by_token(q), k_SKD, v_SKD, ranges, scale=rule.scale)
    return out_THD.transpose(0, 1)[None]


def _in_flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout, rule: Rule) -> Tensor:
    """One packed line through `ops.flash`."""
    key = f"flash, {q.device}"
    if key not in layout.made:
        layout.made[key] = flash.cuts_of(layout.runs, q.shape[2], q.device)
    how: dict[str, Any] = {"causal": rule.causal, "scale": rule.scale, "window": rule.window}
    by_token = [_by_token(x) for x in (q, k, v)]
    out_THD = flash.attend(by_token[0], by_token[1], by_token[2], layout.made[key], **how)
    return out_THD.transpose(0, 1)[None]


def _padded(q: Tensor, k: Tensor, v: Tensor, valid_BT: Tensor, rule: Rule) -> Tensor:
    """One row a line, padded on either side."""
    length = q.shape[2]
    lengths_B = valid_BT.sum(1)
    steps = torch.arange(length, device=q.device)
    if bool((valid_BT == (steps < lengths_B[:, None])).all()) and bool((lengths_B > 0).all()):
        return _attend(q, k, v, Places.of(torch.zeros_like(lengths_B), lengths_B), rule, {})
    whole = Places.of(torch.zeros_like(lengths_B), torch.full_like(lengths_B, length))
    seen = valid_BT[:, None].expand(-1, length, -1)
    limits = tiles.seen(whole, rule, length, slice(0, length), slice(0, length))
    seen = seen if limits is None else seen & limits
    # Padding sees itself, so that its softmax stays finite.
    return _written_out(q, k, v, (seen | (steps[:, None] == steps))[:, None], rule)


def _written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, rule: Rule) -> Tensor:
    """Attention under a mask that is written out."""
    if not rule.softcap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=rule.scale, dropout_p=rule.dropout, enable_gqa=True
        )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (rule.scale or q.shape[-1] ** -0.5)
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden = scores
    if seen is not None:
        hidden = (
            scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        )
    weights = torch.softmax(hidden, dim=-1, dtype=wide)
    return F.dropout(weights.to(q.dtype), rule.dropout) @ v
