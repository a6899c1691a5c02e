"""Which tokens leave behind a block of an encoder, or go into which: what the next blocks are given.

Legend: B rows, S places of a row, R columns that the block was given, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from afina.ops import merging
from afina.techniques.encoder_rows import Change, Columns, Journey


def whole(journey: Journey) -> Columns:
    """Whole rows as columns."""
    real = journey.real_BT
    assert real is not None
    places = torch.arange(real.shape[1], device=real.device).expand_as(real)
    return Columns(places, places, real, places.masked_fill(~real, -1))


def at_random(journey: Journey, share: float, number: int) -> Columns:
    """A share of each row's tokens, drawn, for one block alone.

    Args:
        journey: of the batch; its seed and the block's number decide.
        share: of each row.
        number: of the block.
    """
    before = whole(journey)
    generator = torch.Generator().manual_seed((journey.seed + 0x9E3779B97F4A7C15 * number) % 2**63)
    drawn = torch.rand(before.real_BR.shape, generator=generator).to(before.real_BR.device)
    count_B = merging.portion(journey.count_B, share, journey.protected)
    return _left(_highest(drawn, before, count_B, journey), before, journey)


def by_mass(
    mass_BR: Tensor, before: Columns, count_B: Tensor, journey: Journey, *, fuses: bool
) -> Change:
    """Those looked at least leave.

    Args:
        mass_BR: how much each column is looked at.
        before: the columns.
        count_B: how many tokens of a row are to be left, the fused one not counted.
        journey: of the batch.
        fuses: what leaves goes into one token, with what went there before.
    """
    kept = _highest(mass_BR, before, count_B, journey)
    return _without(kept, mass_BR, before, journey, fuses=fuses)


def by_threshold(
    mass_BR: Tensor, before: Columns, threshold: Tensor, journey: Journey, *, fuses: bool
) -> Change:
    """Those looked at less than a threshold leave; as `by_mass`."""
    kept = (mass_BR >= threshold) | _protected(before, journey)
    return _without(kept & _own(before), mass_BR, before, journey, fuses=fuses)


def by_likeness(keys_BRD: Tensor, before: Columns, count_B: Tensor, journey: Journey) -> Change:
    """Those that are most like others go into these.

    Args:
        keys_BRD: what is compared.
        before: the columns.
        count_B: how many of a row are to be left.
        journey: of the batch.
    """
    real = before.real_BR
    wide = torch.promote_types(keys_BRD.dtype, torch.float32)
    size_BR = real.to(wide) if before.size_BR is None else before.size_BR
    goes, into = merging.partners(
        keys_BRD, real, (real.sum(1) - count_B).clamp(min=0), journey.protected
    )
    stays = real & ~goes
    column_BR = (stays.cumsum(1) - 1).gather(1, into).clamp(min=0)
    index, left = merging.columns_of(stays)
    # Padding has no size, so that it counts nowhere.
    sizes = size_BR.new_zeros(left.shape).scatter_add_(1, column_BR, size_BR)
    column_BS = column_BR.gather(1, before.column_BS.clamp(min=0))
    after = Columns(
        before.place_BR.gather(1, index),
        before.position_BR.gather(1, index),
        left,
        column_BS.masked_fill(before.column_BS < 0, -1),
        sizes,
    )
    return Change(after, column_BR=column_BR, size_BR=size_BR)


def applied(
    change: Change, rows_BSD: Tensor, y_BRD: Tensor, before: Columns | None, tokens: int
) -> Tensor:
    """The rows behind a block, each with what the change makes of the block's result.

    Args:
        change: behind this block.
        rows_BSD: that came to the block.
        y_BRD: what it made of its columns.
        before: its columns; None for whole rows.
        tokens: T.
    """
    if change.column_BR is not None:
        assert change.size_BR is not None
        columns = change.after.place_BR.shape[1]
        merged, _ = merging.merge(y_BRD, change.size_BR, change.column_BR, columns)
        return merging.write(y_BRD if before is None else rows_BSD, merged, change.after.column_BS)
    rows = y_BRD if before is None else merging.write(rows_BSD, y_BRD, before.column_BS)
    if change.weight_BR is None:
        return rows
    fused = merging.fuse(y_BRD, change.weight_BR)
    return torch.cat([rows[:, :tokens], fused[:, None]], 1)


def softly(
    y_BTD: Tensor, mass_BT: Tensor, threshold: Tensor, temperature: float, journey: Journey
) -> tuple[Tensor, Tensor]:
    """The states, each times how far it is above a threshold, σ((mass - threshold) / temperature).

    Returns:
        (B, T, D); the mean factor of all tokens that are no padding, a scalar.
    """
    before = whole(journey)
    factor = torch.sigmoid((mass_BT - threshold) / temperature)
    factor = factor.masked_fill(_protected(before, journey), 1)
    real = before.real_BR
    open_share = (factor * real).sum() / real.sum()
    return y_BTD * factor.to(y_BTD.dtype)[:, :, None], open_share


def _own(before: Columns) -> Tensor:
    """Columns that are tokens of the row: neither padding nor the fused one."""
    if not before.fused:
        return before.real_BR
    own = before.real_BR.clone()
    own[:, -1] = False
    return own


def _protected(before: Columns, journey: Journey) -> Tensor:
    """The first tokens of each row."""
    own = _own(before)
    return own & (own.cumsum(1) <= journey.protected)


def _highest(score_BR: Tensor, before: Columns, count_B: Tensor, journey: Journey) -> Tensor:
    score = score_BR.detach().masked_fill(_protected(before, journey), torch.inf)
    return merging.highest(score, _own(before), count_B)


def _left(kept_BR: Tensor, before: Columns, journey: Journey) -> Columns:
    """The kept columns."""
    index, real = merging.columns_of(kept_BR)
    place, position = (x.gather(1, index) for x in (before.place_BR, before.position_BR))
    return Columns(place, position, real, _written(place, real, journey.tokens))


def _written(place_BR: Tensor, real_BR: Tensor, places: int) -> Tensor:
    """Of each place the column that is written there, -1 where none is."""
    b, columns = place_BR.shape
    number = torch.arange(columns, device=place_BR.device).expand_as(place_BR)
    # What is padding is written behind the row, to a place that is cut off.
    empty = torch.full((b, places + 1), -1, device=place_BR.device)
    return empty.scatter_(1, place_BR.masked_fill(~real_BR, places), number)[:, :places]


def _without(
    kept_BR: Tensor, mass_BR: Tensor, before: Columns, journey: Journey, *, fuses: bool
) -> Change:
    after = _left(kept_BR, before, journey)
    if not fuses:
        return Change(after)
    weight = mass_BR.detach() * (before.real_BR & ~kept_BR)
    heaviest = weight.argmax(1, keepdim=True)
    there = weight.sum(1, keepdim=True) > 0
    place = torch.cat([after.place_BR, torch.full_like(heaviest, journey.tokens)], 1)
    real = torch.cat([after.real_BR, there], 1)
    position = torch.cat([after.position_BR, before.position_BR.gather(1, heaviest)], 1)
    column = _written(place, real, journey.tokens + 1)
    after = replace(
        after, place_BR=place, position_BR=position, real_BR=real, column_BS=column, fused=True
    )
    return Change(after, weight_BR=weight)
