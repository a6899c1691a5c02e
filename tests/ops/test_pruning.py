"""Which tokens are kept: exact counts, uniform draws, thresholds that reach their share, lines that stay in order."""

from __future__ import annotations

from math import floor

import pytest
import torch
from torch import Tensor

from afina.ops.layout import with_layout
from afina.ops.pruning import (
    drawn,
    lengths_of,
    lowest,
    quantile_above,
    ramped,
    rounded,
    shortened,
    uniform,
)
from afina.types import Context

SEGMENTS = torch.tensor([0] * 7 + [1] * 4 + [2] * 9 + [-1] * 3)
PLACES = torch.tensor([*range(7), *range(4), *range(9), 0, 1, 2])
NOBODY = torch.zeros(23, dtype=torch.bool)


def context() -> Context:
    return with_layout(Context(SEGMENTS[None], PLACES[None]))


def test_random_ltds_schedule_is_known() -> None:
    # DeepSpeed's fixed_linear scheduler: 128 to 2048 over 1000 steps, in multiples of 16.
    assert rounded(torch.tensor(ramped(500, 1000, 128, 2048)), 16) == 1088
    for step in range(0, 1200, 7):
        value = floor(min(step, 1000) / 1000 * (2048 - 128) + 128)
        expected = min(value - value % 16, 2048)
        assert rounded(torch.tensor(ramped(step, 1000, 128, 2048)), 16) == expected


def test_a_share_is_rounded_up_and_no_further() -> None:
    lengths = torch.arange(1, 40)
    for tenths in range(1, 11):
        kept = rounded(lengths.double() * (tenths / 10))
        assert kept.tolist() == [-(-n * tenths // 10) for n in lengths.tolist()]


def test_exactly_so_many_of_each_row_are_kept_and_never_padding() -> None:
    counts = torch.tensor([4, 2, 5])
    kept = lowest(drawn(3, SEGMENTS, PLACES), SEGMENTS, counts, NOBODY)
    assert lengths_of(SEGMENTS).tolist() == [7, 4, 9]
    assert lengths_of(torch.where(kept, SEGMENTS, -1)).tolist() == [4, 2, 5]
    assert not kept[SEGMENTS < 0].any()


def test_the_lowest_of_a_row_are_those_a_sort_finds() -> None:
    keys = drawn(11, SEGMENTS, PLACES)
    kept = lowest(keys, SEGMENTS, torch.tensor([3, 1, 6]), NOBODY)
    for row, count in enumerate((3, 1, 6)):
        mine = keys[row == SEGMENTS]
        assert sorted(mine.tolist())[:count] == sorted(keys[kept & (row == SEGMENTS)].tolist())


def test_those_that_stay_count_first_and_may_be_more_than_the_row_keeps() -> None:
    stays = PLACES.eq(0) | (SEGMENTS == 1)
    kept = lowest(drawn(5, SEGMENTS, PLACES), SEGMENTS, torch.tensor([3, 2, 3]), stays)
    assert bool((kept[stays & (SEGMENTS >= 0)]).all())
    assert lengths_of(torch.where(kept, SEGMENTS, -1)).tolist() == [3, 4, 3]


def test_draws_are_uniform_and_those_of_a_row_do_not_depend_on_other_rows() -> None:
    rows, places = torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200)
    numbers = uniform(drawn(1, rows, places))
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    counts = torch.histc(numbers, 20, 0, 1)
    assert (
        float(((counts - 1000).square() / 1000).sum()) < 50
    )  # chi-square, 19 degrees: 50 is beyond 1 in 7,000
    correlation = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(correlation) < 0.02
    alone = drawn(1, torch.full((100,), 7), torch.arange(100))
    assert torch.equal(alone, drawn(1, rows, places)[700:800])
    assert not torch.equal(alone, drawn(2, torch.full((100,), 7), torch.arange(100)))


def test_the_first_number_is_that_of_the_published_generator() -> None:
    # SplitMix64 from the state 0 gives 0xE220A8397B1DCDAF; here the state is that of row and seed 0, mixed to 0.
    first = drawn(0, torch.tensor([0]), torch.tensor([0]))
    assert int(first) & ((1 << 64) - 1) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("wanted", [1, 3, 9, 10])
def test_a_threshold_is_reached_by_as_many_as_are_wanted(wanted: int) -> None:
    scores = torch.tensor([3.0, -1, 8, 2, 7, 0, 5, 9, -4, 6], dtype=torch.float64)
    assert int((scores >= quantile_above(scores, wanted)).sum()) == wanted
    assert not (scores >= quantile_above(scores, 0)).any()


def test_a_shortened_line_has_the_rows_positions_and_layout_of_what_is_kept() -> None:
    kept = torch.tensor([0, 2, 3, 7, 11, 12, 15, 19])
    line = shortened(context(), kept)
    assert line.segments_BT[0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert line.positions_BT[0].tolist() == [0, 2, 3, 0, 0, 1, 4, 8]
    assert line.layout is not None
    again = with_layout(Context(line.segments_BT, line.positions_BT)).layout
    assert again is not None
    for name in ("queries_P", "keys_Q", "back_T"):
        one: Tensor = getattr(line.layout, name)
        assert torch.equal(one, getattr(again, name))


def test_lines_of_equal_lengths_share_a_layout() -> None:
    made: dict[tuple[int, ...], object] = {}
    one = shortened(context(), torch.tensor([0, 2, 7, 12]), made)  # pyright: ignore[reportArgumentType]
    two = shortened(context(), torch.tensor([0, 5, 9, 18]), made)  # pyright: ignore[reportArgumentType]
    three = shortened(context(), torch.tensor([0, 7, 9, 18]), made)  # pyright: ignore[reportArgumentType]
    assert one.layout is two.layout
    assert three.layout is not one.layout
    assert set(made) == {(2, 1, 1), (1, 2, 1)}


def test_places_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in order"):
        shortened(context(), torch.tensor([2, 0, 7]))
