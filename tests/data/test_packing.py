"""Batches by value; packed targets are the rows' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afina.data.packing import collate, pack, targets_of
from afina.errors import DataError
from afina.types import IGNORE, Row

X = IGNORE


def row(id: int, tokens: list[int], trained: list[int], label: int | None = None) -> Row:
    return Row(tuple(tokens), tuple(map(bool, trained)), id, label=label)


A, B = row(7, [10, 11, 12], [0, 0, 1]), row(9, [20, 21], [1, 1])


def test_packed_by_value() -> None:
    batch = collate([A, B], packed=True, pad_id=0, pad_to_multiple=4)
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [[X, 12, X, 21, X, X, X, X]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch.segments_BT.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert (batch.packed, batch.rows, batch.real_tokens, batch.trained_tokens) == (
        True,
        (7, 9),
        5,
        2,
    )
    assert batch.labels_B is None


def test_padded_by_value() -> None:
    batch = collate([B, A], packed=False, pad_id=21)
    assert batch.tokens_BT.tolist() == [[20, 21, 21], [10, 11, 12]]
    assert batch.targets_BT.tolist() == [[21, X, X], [X, 12, X]]
    assert batch.positions_BT.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch.segments_BT.tolist() == [[0, 0, -1], [1, 1, 1]]
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64


def test_classes_travel() -> None:
    rows = [row(0, [1, 2], [0, 0], label=3), row(1, [1], [0], label=0)]
    labels = collate(rows, packed=False, pad_id=0).labels_B
    assert labels is not None
    assert labels.tolist() == [3, 0]


def test_nothing_to_batch_is_an_error() -> None:
    for rows in ([], [row(0, [], [])]):
        with pytest.raises(DataError, match="at least one row"):
            collate(rows, packed=True, pad_id=0)


def test_first_fit_in_order_and_a_long_row_alone() -> None:
    rows = [row(i, [1] * n, [1] * n) for i, n in enumerate([3, 9, 4, 1, 2, 5])]
    assert [[r.id for r in group] for group in pack(rows, 8)] == [[0, 2, 3], [1], [4, 5]]
    with pytest.raises(DataError, match="at least one token"):
        pack(rows, 0)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=7),
    min_size=1,
    max_size=8,
).map(
    lambda drawn: [
        row(i, [id for id, _ in one], [flag for _, flag in one]) for i, one in enumerate(drawn)
    ]
)


@given(
    rows=ROWS, packed=st.booleans(), multiple=st.sampled_from([None, 1, 4]), pad=st.integers(0, 9)
)
def test_every_row_keeps_its_own_tokens_targets_and_positions(
    rows: list[Row], packed: bool, multiple: int | None, pad: int
) -> None:
    batch = collate(rows, packed, pad, multiple)
    for number, one in enumerate(rows):
        mine = batch.segments_BT == number
        assert tuple(batch.tokens_BT[mine].tolist()) == one.tokens
        assert batch.targets_BT[mine].tolist() == targets_of(one)
        assert batch.positions_BT[mine].tolist() == list(range(len(one.tokens)))
    assert batch.targets_BT[batch.segments_BT == -1].eq(IGNORE).all()
    assert batch.trained_tokens == int((batch.targets_BT != IGNORE).sum())
    assert batch.tokens_BT.shape[1] % (multiple or 1) == 0


@given(rows=ROWS, most=st.integers(1, 12))
def test_packing_loses_and_repeats_no_row(rows: list[Row], most: int) -> None:
    groups = pack(rows, most)
    assert sorted(r.id for group in groups for r in group) == [r.id for r in rows]
    for group in groups:
        assert len(group) == 1 or sum(len(r.tokens) for r in group) <= most
        assert [r.id for r in group] == sorted(r.id for r in group)
