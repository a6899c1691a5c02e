"""The prefix tree of rows: every row can be read back, shared runs lie once, labels count for every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.prefix import Node, labels, tree, unique_tokens
from afina.types import Row


def row(tokens: str, trained: str = "", number: int = 0) -> Row:
    """A row of letters; `trained` has an x under each label."""
    flags = tuple(mark == "x" for mark in trained.ljust(len(tokens)))
    return Row(tuple(map(ord, tokens)), flags, number)


rows_of_few_letters = st.lists(
    st.text("ab", min_size=1, max_size=8).map(lambda t: row(t, "x" * len(t))),
    min_size=1,
    max_size=8,
)


@given(rows=rows_of_few_letters, worth=st.integers(1, 12))
def test_every_row_is_read_back_along_its_path(rows: list[Row], worth: int) -> None:
    found = tree(rows, worth=worth)
    assert sorted(found.order) == list(range(len(rows)))
    for one, places in zip(rows, found.places, strict=True):
        assert tuple(found.tokens[p] for p in places) == one.tokens
        assert [found.positions[p] for p in places] == list(range(len(one.tokens)))
        # A row is the path to the node that holds its last token, up to that token.
        path = found.path(found.owners[places[-1]])
        assert path[: len(places)] == list(places)


@given(rows=rows_of_few_letters, worth=st.integers(1, 12))
def test_nodes_fill_the_line_and_what_is_below_a_node_follows_it(
    rows: list[Row], worth: int
) -> None:
    found = tree(rows, worth=worth)
    at = 0
    for number, node in enumerate(found.nodes):
        assert node.start == at
        assert node.length >= 1
        assert found.owners[at : at + node.length] == (number,) * node.length
        assert node.parent is None or node.parent < number
        at += node.length
        below = [n for n in range(len(found.nodes)) if number in ancestors(found.nodes, n)]
        assert below == list(range(number + 1, number + 1 + len(below)))
    assert at == len(found.tokens) == unique_tokens(rows, worth=worth)


def ancestors(nodes: tuple[Node, ...], number: int) -> set[int]:
    found: set[int] = set()
    parent = nodes[number].parent
    while parent is not None:
        found.add(parent)
        parent = nodes[parent].parent
    return found


@given(rows=rows_of_few_letters)
def test_at_worth_one_there_is_one_place_for_each_beginning(rows: list[Row]) -> None:
    beginnings = {one.tokens[: n + 1] for one in rows for n in range(len(one.tokens))}
    assert len(tree(rows, worth=1).tokens) == len(beginnings)


@given(rows=rows_of_few_letters, worth=st.integers(1, 12))
def test_labels_count_for_every_row(rows: list[Row], worth: int) -> None:
    found = tree(rows, worth=worth)
    counted = labels(found, rows)
    assert sum(counted.values()) == sum(one.trained_tokens for one in rows)
    for (place, target), count in counted.items():
        assert 0 <= place < len(found.tokens)
        assert 1 <= count <= len(rows)
        assert target in (ord("a"), ord("b"))


def test_by_value() -> None:
    rows = [row("abcd", "  xx", 0), row("x", "", 1), row("abe", "  x", 2)]
    found = tree(rows, worth=2)
    assert "".join(map(chr, found.tokens)) == "abcdex"
    assert found.nodes == (
        Node(0, 0, 2, None),
        Node(2, 2, 2, 0),
        Node(4, 2, 1, 0),
        Node(5, 0, 1, None),
    )
    assert found.positions == (0, 1, 2, 3, 2, 0)
    assert found.owners == (0, 0, 1, 1, 2, 3)
    assert found.places == ((0, 1, 2, 3), (5,), (0, 1, 4))
    assert found.order == (0, 2, 1)
    assert found.path(2) == [0, 1, 4]
    # The last token of the shared run has a target for each way in which the rows go on.
    assert labels(found, rows) == {(1, ord("c")): 1, (1, ord("e")): 1, (2, ord("d")): 1}


def test_a_shared_label_counts_once_for_each_row_that_trains_it() -> None:
    rows = [row("abc", " xx", 0), row("abc", " xx", 1), row("abd", "  x", 2)]
    found = tree(rows, worth=1)
    assert labels(found, rows) == {(0, ord("b")): 2, (1, ord("c")): 2, (1, ord("d")): 1}
    assert len(found.tokens) == 4


@pytest.mark.parametrize(("worth", "tokens"), [(4, 8), (5, 12)])
def test_a_run_that_saves_too_little_is_not_shared(worth: int, tokens: int) -> None:
    rows = [row("aabb"), row("aacc"), row("aadd")]  # "aa" saves 2 · 2
    assert unique_tokens(rows, worth=worth) == tokens


def test_a_row_that_begins_another_ends_inside_it() -> None:
    found = tree([row("abc"), row("ab")], worth=1)
    assert found.places == ((0, 1, 2), (0, 1))
    assert found.order == (1, 0)
