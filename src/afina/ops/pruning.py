"""Which tokens of a line are kept, and the line that they make: pure functions, the same on every machine.

A line is all tokens of a call one after the other, whether its rows lie packed or padded. Exact shares are drawn by
ranks inside rows; thresholds keep each token by its own score, so that no token's fate depends on another's.

Legend: L tokens of the line, R rows, N kept tokens.

Source of the mixing of bits: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", the
finaliser of SplitMix64. The schedule: Yao et al. 2022, "Random-LTD", arXiv 2211.11586, and DeepSpeed's
`random_ltd` scheduler (fixed_linear).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from afina.ops.layout import layout_of
from afina.types import Context, Layout, Run

_GOLDEN = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_SLACK = 1e-9
"""What a product such as 0.7 · 10 may miss a whole number by."""


# --- drawn numbers -------------------------------------------------------------------------------------------------


def drawn(seed: int, rows_L: Tensor, places_L: Tensor) -> Tensor:
    """A random number of 64 bits for each token (L,), int64: a function of seed, row and place alone."""
    by_row_L = _mixed(rows_L * _signed(_GOLDEN) + _signed(seed))
    return _mixed(by_row_L + (places_L + 1) * _signed(_GOLDEN))


def uniform(bits: Tensor) -> Tensor:
    """Drawn bits as numbers from 0 up to 1, fp64."""
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit that is given."""
    for shift, factor in _MIXERS:
        x = (x ^ _right(x, shift)) * _signed(factor)
    return x ^ _right(x, _LAST)


def _right(x: Tensor, shift: int) -> Tensor:
    """Shifted right, zeros coming in."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(number: int) -> int:
    """The same 64 bits as int64 has them."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


# --- how many ------------------------------------------------------------------------------------------------------


def ramped(step: int, steps: float, first: float, last: float) -> float:
    """From `first` at step 0 evenly to `last` at step `steps`, and `last` from there on."""
    if step >= steps:
        return last
    return first + (last - first) * step / steps


def rounded(wanted_R: Tensor, granularity: int = 1) -> Tensor:
    """Whole tokens, int64: rounded up, or for a granularity above 1 down to a multiple of it."""
    if granularity == 1:
        return (wanted_R - _SLACK).ceil().long()
    return (wanted_R + _SLACK).floor().long() // granularity * granularity


def lengths_of(segments_L: Tensor) -> Tensor:
    """Tokens of each row (R,); -1 is padding."""
    return torch.bincount(segments_L + 1)[1:]


# --- which ---------------------------------------------------------------------------------------------------------


def lowest(keys_L: Tensor, segments_L: Tensor, counts_R: Tensor, stays_L: Tensor) -> Tensor:
    """Of each row the tokens with the lowest keys, as many as it may keep (L,), bool.

    Args:
        keys_L: any numbers; equal ones count in their order.
        segments_L: number of the row; -1 is padding, which is never kept.
        counts_R: tokens to keep of each row.
        stays_L: kept whatever their key, even where they are more than the row may keep.
    """
    # Three stable sorts: by key, then those that stay first, then row by row.
    order_L = keys_L.argsort(stable=True)
    for by_L in ((~stays_L).long(), segments_L):
        order_L = order_L[by_L[order_L].argsort(stable=True)]
    sorted_L = segments_L[order_L]
    starts_L = torch.searchsorted(sorted_L.contiguous(), sorted_L.contiguous())
    rank_L = torch.empty_like(order_L)
    rank_L[order_L] = torch.arange(len(order_L), device=order_L.device) - starts_L
    real_L = segments_L >= 0
    return real_L & (stays_L | (rank_L < counts_R[segments_L.clamp(min=0)]))


def quantile_above(scores_N: Tensor, wanted: int) -> Tensor:
    """The score that `wanted` of these reach; below the lowest where all are wanted, above the highest for none."""
    ordered_N = scores_N.sort(descending=True).values
    if wanted <= 0:
        return _next(ordered_N[0], up=True)
    if wanted >= len(ordered_N):
        return _next(ordered_N[-1], up=False)
    return ordered_N[wanted - 1]


def _next(value: Tensor, *, up: bool) -> Tensor:
    return torch.nextafter(value, torch.full_like(value, torch.inf if up else -torch.inf))


# --- the line that they make -----------------------------------------------------------------------------------------


def shortened(
    context: Context, kept_N: Tensor, layouts: dict[tuple[int, ...], Layout] | None = None
) -> Context:
    """The context of a packed line of the kept tokens alone: their rows, their own positions, their layout.

    Args:
        context: of a packed line in which no beginning is shared.
        kept_N: places in the line, in order; no padding among them.
        layouts: by the lengths of the rows, those that were made; lines of equal lengths share one.

    Raises:
        ValueError: rows share their beginnings, or places are not in order.
    """
    if context.layout is None or context.layout.shared:
        raise ValueError("only a packed line of separate rows can be shortened")
    if bool((kept_N[1:] <= kept_N[:-1]).any()):
        raise ValueError("the places of kept tokens must be in order: attention goes by it")
    segments_1N = context.segments_BT[:, kept_N]
    counts_R = lengths_of(segments_1N[0])
    counts = cast("list[int]", counts_R[counts_R > 0].tolist())  # pyright: ignore[reportUnknownMemberType]
    lengths = tuple(counts)
    layouts = {} if layouts is None else layouts
    if lengths not in layouts:
        ends = accumulate(lengths)
        runs = [Run(end - length, length) for end, length in zip(ends, lengths, strict=True)]
        layouts[lengths] = layout_of(runs, kept_N.device)
    return replace(
        context,
        segments_BT=segments_1N,
        positions_BT=context.positions_BT[:, kept_N],
        layout=layouts[lengths],
    )
