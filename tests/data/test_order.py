"""The order and the windows are pure functions: of seed and epoch, of the step."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.order import Window, cut, order, steps_in, windows
from afina.errors import ConfigError

SIZES = st.one_of(
    st.integers(1, 9).map(lambda n: {"rows_per_step": n}),
    st.integers(1, 40).map(lambda n: {"tokens_per_step": n}),
)
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def test_the_order_by_value() -> None:
    """Kept, so that a run can be resumed by a later version of afina."""
    assert order(8, seed=0, epoch=0) == [4, 0, 3, 6, 7, 1, 5, 2]
    assert order(8, seed=0, epoch=1) == [7, 6, 3, 2, 1, 5, 0, 4]
    assert order(8, seed=1, epoch=0) == [7, 2, 3, 4, 0, 5, 1, 6]


@given(n=st.integers(0, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch)) == list(range(n))


def test_seed_and_epoch_change_the_order_and_first_places_are_even() -> None:
    assert len({tuple(order(20, seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    firsts = [order(10, seed, 0)[0] for seed in range(2000)]
    counts = [firsts.count(place) for place in range(10)]
    assert all(abs(count - 200) < 60 for count in counts)  # 4.5 standard errors


def test_windows_by_value() -> None:
    assert cut([3, 0, 2, 1], [5, 1, 4, 9], rows_per_step=3) == [(3, 0, 2), (1,)]
    assert cut([3, 0, 2, 1], [5, 1, 4, 9], tokens_per_step=9) == [(3,), (0, 2), (1,)]
    assert cut([3, 0, 2, 1], [5, 1, 4, 99], tokens_per_step=10) == [(3,), (0, 2, 1)]


@given(lengths=LENGTHS, seed=st.integers(0, 99), size=SIZES)
def test_an_epoch_has_every_row_once(lengths: list[int], seed: int, size: dict[str, Any]) -> None:
    steps = steps_in(lengths, seed, 2, **size)
    seen = list(islice(windows(lengths, seed, **size), steps + 1))
    for epoch in (0, 1):
        rows = [place for window in seen if window.epoch == epoch for place in window.rows]
        assert rows == order(len(lengths), seed, epoch)
    assert [window.step for window in seen] == list(range(steps + 1))
    assert seen[-1].epoch == 2


@given(lengths=LENGTHS, seed=st.integers(0, 99), size=SIZES, start=st.integers(0, 60))
def test_starting_at_a_step_is_going_on_to_it(
    lengths: list[int], seed: int, size: dict[str, Any], start: int
) -> None:
    after = list(islice(windows(lengths, seed, **size), start, start + 3))
    assert list(islice(windows(lengths, seed, **size, start=start), 3)) == after


def test_steps_of_part_of_an_epoch_are_rounded_up() -> None:
    lengths = [1] * 10
    assert steps_in(lengths, 0, 1, rows_per_step=4) == 3
    assert steps_in(lengths, 0, 0.5, rows_per_step=4) == 2
    assert steps_in(lengths, 0, 2.1, rows_per_step=4) == 7
    assert next(windows(lengths, 0, rows_per_step=4, start=5)) == Window(
        5, 1, tuple(order(10, 0, 1)[8:])
    )


@pytest.mark.parametrize(
    "size", [{}, {"rows_per_step": 0}, {"rows_per_step": 1, "tokens_per_step": 1}]
)
def test_a_step_has_one_size(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a step needs one size"):
        next(windows([1, 2], 0, **size))


def test_no_rows_or_no_epochs() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        next(windows([], 0, rows_per_step=1))
    with pytest.raises(ConfigError, match="no rows"):
        steps_in([], 0, 1, rows_per_step=1)
    with pytest.raises(ConfigError, match="epochs out of range"):
        steps_in([1], 0, 0, rows_per_step=1)
