"""Shorter rows: how much each token is looked at, which leave, and how several become one.

    mass_j = 1/H Σ_h Σ_i w_i P_hij                    how much key j is looked at; they sum to Σ_i w_i
    fused  = Σ_j m_j x_j / Σ_j m_j                    one token in place of many (EViT)
    merged = Σ_j s_j x_j / Σ_j s_j                    a token and those that went into it, of s_j tokens each (ToMe)

A tile of the mass is a few queries by all keys, so each row of P is whole, its softmax is that of the tile, and one
pass over the scores is enough, forward as backward. No matrix of all queries by all keys is made, nor one of all
similarities.

Legend: B rows, T queries, S keys, H heads, D width of a head or of a token, R columns of shorter rows, P attention.

Source: Liang et al. 2022, "EViT", arXiv 2202.07800, section 3.2; Bolya et al. 2022, "ToMe", arXiv 2210.09461, section 3
(tokens alternate between two sets; each of the first finds the one of the second most like it; the r most alike pairs
merge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from afina.ops.tiles import TILE_NUMBERS

_SLACK = 1e-6
"""A share of a count that is whole but for rounding is that whole number."""


def key_mass(
    q_BHTD: Tensor, k_BHSD: Tensor, mask: Tensor | None, weights_BT: Tensor, scale: float
) -> Tensor:
    """How much each key is looked at: the attention to it, a mean over heads and a sum over queries.

    Args:
        q_BHTD: queries.
        k_BHSD: keys; their heads divide the queries'.
        mask: (B or 1, 1 or H, 1 or T, S), booleans (True is seen) or a term of the scores; None sees all.
        weights_BT: of the queries: 1 for those that count, 0 for padding.
        scale: of the scores.

    Returns:
        (B, S), in fp32 or wider; differentiable in queries and keys.
    """
    repeat = q_BHTD.shape[1] // k_BHSD.shape[1]
    keys = k_BHSD if repeat == 1 else k_BHSD.repeat_interleave(repeat, 1)
    function = cast("Callable[..., Tensor]", _Mass.apply)  # pyright: ignore[reportUnknownMemberType]
    return function(q_BHTD, keys, mask, weights_BT, scale)


def _tiles(b: int, heads: int, queries: int, keys: int) -> Iterator[slice]:
    size = max(1, TILE_NUMBERS // max(1, b * heads * keys))
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))


def _probabilities(
    q_BHlD: Tensor, k_BHSD: Tensor, mask: Tensor | None, part: slice, scale: float
) -> Tensor:
    """P of some queries (B, H, l, S); of a query that sees nothing it means nothing."""
    wide = torch.promote_types(q_BHlD.dtype, torch.float32)
    scores = (q_BHlD @ k_BHSD.transpose(-1, -2)).to(wide).mul_(scale)
    if mask is not None:
        seen = mask if mask.shape[2] == 1 else mask[:, :, part]
        if seen.dtype == torch.bool:
            scores.masked_fill_(~seen, torch.finfo(wide).min)
        else:
            scores.add_(seen).clamp_(min=torch.finfo(wide).min)  # a softmax of -inf alone is none
    return torch.softmax(scores, -1)


class _Mass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, mask: Tensor | None, weights_BT: Tensor, scale: float
    ) -> Tensor:
        b, heads, queries, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        mass_BS = q.new_zeros(b, k.shape[2], dtype=wide)
        for part in _tiles(b, heads, queries, k.shape[2]):
            p_BHlS = _probabilities(q[:, :, part], k, mask, part, scale)
            weight_B11l = weights_BT[:, None, None, part].to(wide)
            mass_BS += (weight_B11l @ p_BHlS)[:, :, 0].mean(1)
        ctx.save_for_backward(q, k, mask, weights_BT)
        ctx.scale = scale
        return mass_BS

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mask, weights_BT = ctx.saved_tensors
        b, heads, queries, _ = q.shape
        above_B11S = grads[0][:, None, None] / heads
        by_q, by_k = torch.empty_like(q), torch.zeros_like(k, dtype=above_B11S.dtype)
        for part in _tiles(b, heads, queries, k.shape[2]):
            p_BHlS = _probabilities(q[:, :, part], k, mask, part, ctx.scale)
            by_score = p_BHlS * (above_B11S - (p_BHlS * above_B11S).sum(-1, keepdim=True))
            by_score *= weights_BT[:, None, part, None] * ctx.scale
            narrow = by_score.to(q.dtype)
            by_q[:, :, part] = narrow @ k
            by_k += narrow.transpose(-1, -2) @ q[:, :, part]
        return by_q, by_k.to(k.dtype), None, None, None


# --- who stays -----------------------------------------------------------------------------------------------------


def portion(count_B: Tensor, share: float, least: int) -> Tensor:
    """A share of each count, rounded up, and at least `least` where there are so many (B,)."""
    wanted_B = (count_B * share - _SLACK).ceil().long()
    return torch.minimum(wanted_B.clamp(min=least), count_B)


def highest(score_BR: Tensor, among_BR: Tensor, count_B: Tensor) -> Tensor:
    """The columns of the highest scores, `count_B` of each row, of equal ones the first (B, R).

    Args:
        score_BR: of each column.
        among_BR: which columns are there to be chosen.
        count_B: how many of a row; all that are there where it is more.
    """
    hidden = score_BR.masked_fill(~among_BR, -torch.inf)
    order_BR = hidden.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(score_BR.shape[1], device=score_BR.device).expand_as(order_BR)
    rank_BR = torch.empty_like(order_BR).scatter_(1, order_BR, places)
    return (rank_BR < count_B[:, None]) & among_BR


def columns_of(chosen_BR: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen columns of each row in their order, padded to the most of a row.

    Returns:
        their numbers (B, R'), 0 in padding; which are no padding (B, R').
    """
    count_B = chosen_BR.sum(1)
    most = int(count_B.max())
    index = (~chosen_BR).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=index.device) < count_B[:, None]
    return index * real, real


# --- many into one -------------------------------------------------------------------------------------------------


def fuse(x_BRD: Tensor, weight_BR: Tensor) -> Tensor:
    """The mean of each row's columns, by weight (B, D); 0 of a row whose weights are all 0.

    Args:
        x_BRD: the columns.
        weight_BR: of them, 0 or more; no gradient goes through.
    """
    total_B1 = weight_BR.sum(1, keepdim=True)
    share = weight_BR / torch.where(total_B1 > 0, total_B1, 1)
    return (share.to(x_BRD.dtype)[:, None] @ x_BRD)[:, 0]


def partners(
    keys_BRD: Tensor, real_BR: Tensor, merged_B: Tensor, protected: int
) -> tuple[Tensor, Tensor]:
    """Which columns go into which, by how alike their keys are: by the cosine, among two halves of a row.

    The first, third, … column of a row may go into the second, fourth, … one.

    Args:
        keys_BRD: what is compared, a mean over heads.
        real_BR: which columns are no padding.
        merged_B: how many are to go; as many as the first half has where it is more.
        protected: first columns of a row that neither go nor take another in.

    Returns:
        goes (B, R), booleans; into (B, R): the column that each goes into, itself for those that stay.
    """
    rank_BR = real_BR.cumsum(1) - 1
    free_BR = real_BR & (rank_BR >= protected)
    givers, given = columns_of(free_BR & (rank_BR % 2 == 0))
    takers, taken = columns_of(free_BR & (rank_BR % 2 == 1))
    own = torch.arange(real_BR.shape[1], device=real_BR.device).expand_as(real_BR)
    goes = torch.zeros_like(real_BR)
    if not givers.shape[1] or not takers.shape[1]:
        return goes, own
    wide = torch.promote_types(keys_BRD.dtype, torch.float32)
    unit = torch.nn.functional.normalize(keys_BRD.detach().to(wide), dim=-1)
    alike, best = _nearest(_take(unit, givers), _take(unit, takers), taken)
    possible = given & (alike > -torch.inf)
    going = highest(alike, possible, merged_B)
    # What is padding points at column 0; the columns that go are told one by one.
    row, place = going.nonzero(as_tuple=True)
    goes[row, givers[row, place]] = True
    into = own.clone()
    into[row, givers[row, place]] = takers[row, best[row, place]]
    return goes, into


def _take(x_BRD: Tensor, index_BA: Tensor) -> Tensor:
    return x_BRD.gather(1, index_BA[:, :, None].expand(-1, -1, x_BRD.shape[2]))


def _nearest(x_BAD: Tensor, y_BCD: Tensor, real_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column of x the highest product with one of y, and which that is (B, A)."""
    b, columns, _ = x_BAD.shape
    products: list[Tensor] = []
    which: list[Tensor] = []
    for part in _tiles(b, 1, columns, y_BCD.shape[1]):
        alike = x_BAD[:, part] @ y_BCD.transpose(1, 2)
        found = alike.masked_fill_(~real_BC[:, None], -torch.inf).max(-1)
        products.append(found.values)
        which.append(found.indices)
    return torch.cat(products, 1), torch.cat(which, 1)


def merge(x_BRD: Tensor, size_BR: Tensor, column_BR: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Each new column's mean over the old ones that go there, by size; and how many tokens it stands for.

    Args:
        x_BRD: the old columns.
        size_BR: how many tokens each stands for; 0 in padding.
        column_BR: the new column of each.
        columns: how many new ones there are.

    Returns:
        (B, columns, D), 0 where nothing goes; sizes (B, columns).
    """
    size_BC = size_BR.new_zeros(x_BRD.shape[0], columns).scatter_add(1, column_BR, size_BR)
    whole = torch.where(size_BC > 0, size_BC, 1)
    share = (size_BR / whole.gather(1, column_BR)).to(x_BRD.dtype)
    index = column_BR[:, :, None].expand_as(x_BRD)
    empty = x_BRD.new_zeros(x_BRD.shape[0], columns, x_BRD.shape[2])
    return empty.scatter_add(1, index, x_BRD * share[:, :, None]), size_BC


def unmerge(x_BCD: Tensor, column_BR: Tensor) -> Tensor:
    """Each old column with what its new one has (B, R, D); the gradients of those that share one are summed."""
    return _take(x_BCD, column_BR)


# --- rows and their shorter ones -----------------------------------------------------------------------------------


def read(rows_BSD: Tensor, place_BR: Tensor) -> Tensor:
    """What stands at some places of each row (B, R, D); in memory of its own, nothing of the rows is kept."""
    function = cast("Callable[..., Tensor]", _Read.apply)  # pyright: ignore[reportUnknownMemberType]
    return function(rows_BSD, place_BR)


def write(rows_BSD: Tensor, x_BRD: Tensor, column_BS: Tensor) -> Tensor:
    """The rows with columns of x in some places, through which no gradient comes back to the rows (B, S, D).

    Args:
        rows_BSD: they are not changed.
        x_BRD: what is written.
        column_BS: of each place the column that is written there; -1 leaves what is there.
    """
    function = cast("Callable[..., Tensor]", _Write.apply)  # pyright: ignore[reportUnknownMemberType]
    return function(rows_BSD, x_BRD, column_BS)


def _summed(x_BSD: Tensor, place_BS: Tensor, places: int) -> Tensor:
    """The sum of what goes to each of so many places, in fp32 or wider until the end."""
    wide = torch.promote_types(x_BSD.dtype, torch.float32)
    index = place_BS[:, :, None].expand_as(x_BSD)
    empty = x_BSD.new_zeros(x_BSD.shape[0], places, x_BSD.shape[2], dtype=wide)
    return empty.scatter_add_(1, index, x_BSD.to(wide)).to(x_BSD.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BSD: Tensor, place_BR: Tensor) -> Tensor:
        ctx.save_for_backward(place_BR)
        ctx.places = rows_BSD.shape[1]
        return _take(rows_BSD, place_BR)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_BR,) = ctx.saved_tensors
        return _summed(grads[0], place_BR, ctx.places), None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BSD: Tensor, x_BRD: Tensor, column_BS: Tensor) -> Tensor:
        ctx.save_for_backward(column_BS)
        ctx.columns = x_BRD.shape[1]
        written = _take(x_BRD, column_BS.clamp(min=0))
        return torch.where((column_BS >= 0)[:, :, None], written, rows_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (column_BS,) = ctx.saved_tensors
        left = (column_BS < 0)[:, :, None]
        written = grads[0].masked_fill(left, 0)
        by_rows = grads[0].masked_fill(~left, 0)
        return by_rows, _summed(written, column_BS.clamp(min=0), ctx.columns), None
