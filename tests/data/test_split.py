"""A held-out row depends on its own content only, and no duplicate lies on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.split import content_of, shared, split
from afina.errors import DataError
from afina.types import Row


def rows_of(contents: list[int]) -> list[Row]:
    return [Row((c, c + 1), (False, True), id=i) for i, c in enumerate(contents)]


@given(
    st.lists(st.integers(0, 30), max_size=60), st.sampled_from([0.05, 0.3, 0.9]), st.integers(0, 9)
)
def test_no_content_on_both_sides_and_none_lost(
    contents: list[int], share: float, seed: int
) -> None:
    rows = rows_of(contents)
    if len(set(contents)) < 2:
        with pytest.raises(DataError, match="cannot be split"):
            split(rows, share, seed)
        return
    train, held = split(rows, share, seed)
    assert train
    assert held
    assert {row.tokens for row in train}.isdisjoint({row.tokens for row in held})
    assert sorted(row.id for row in (*train, *held)) == list(range(len(rows)))
    assert [row.id for row in train] == sorted(row.id for row in train)


def test_the_share_and_that_more_rows_move_none() -> None:
    few, many = rows_of(list(range(1000))), rows_of(list(range(3000)))
    held = {row.id for row in split(few, 0.1)[1]}
    more = {row.id for row in split(many, 0.1)[1]}
    assert held == {id for id in more if id < 1000}
    assert 70 < len(held) < 130
    reversed_rows = list(reversed(few))
    assert {row.id for row in split(reversed_rows, 0.1)[1]} == held
    assert {row.id for row in split(few, 0.1, seed=1)[1]} != held


def test_nothing_held_out() -> None:
    rows = rows_of([1, 1])
    assert split(rows, 0.0) == (rows, [])
    with pytest.raises(DataError, match="val_fraction out of range"):
        split(rows, 1.0)


def test_the_digest_of_the_data_goes_before_the_tokens() -> None:
    a = Row((1,), (True,), 0, meta={"digest": "x"})
    b = Row((2,), (True,), 1, meta={"digest": "x"})
    assert content_of(a) == content_of(b)
    assert shared([a], [b, Row((1,), (True,), 2)]) == [(a, b)]
