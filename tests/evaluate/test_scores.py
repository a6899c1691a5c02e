"""Scores against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.errors import DataError
from afina.evaluate import scores


def test_the_loss_is_a_mean_over_tokens_and_not_over_rows():
    sums, tokens = [1.0, 9.0], [1, 3]
    assert scores.mean_loss(sums, tokens) == 2.5
    assert sum(s / n for s, n in zip(sums, tokens, strict=True)) / 2 == 2.0  # what it is not


def test_an_empty_loss_is_an_error():
    with pytest.raises(DataError, match="2 rows without a trained token"):
        scores.mean_loss([0.0, 0.0], [0, 0])


def test_the_error_of_a_loss_is_that_of_a_ratio():
    # residuals s - 2.5 n: -1.5 and 1.5; squares 4.5, times 2/1, root 3, over 4 tokens
    assert scores.mean_loss_error([1.0, 9.0], [1, 3]) == pytest.approx(0.75)
    assert scores.mean_loss_error([1.0], [1]) is None


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_with_equal_rows_it_is_the_error_of_a_mean(losses):
    n = len(losses)
    mean = sum(losses) / n
    plain = math.sqrt(sum((x - mean) ** 2 for x in losses) / (n - 1) / n)
    got = scores.mean_loss_error([3 * x for x in losses], [3] * n)
    assert got == pytest.approx(plain, abs=1e-9)


def test_perplexity():
    assert scores.perplexity(math.log(7)) == pytest.approx(7)
    assert scores.perplexity(1e4) == math.inf


def test_a_proportion_and_its_error():
    share, error = scores.proportion([True, True, True, False])
    assert share == 0.75
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    with pytest.raises(DataError):
        scores.proportion([])


def test_a_paired_difference_sees_what_two_errors_would_not():
    before = [True, False] * 50
    after = [True, False] * 49 + [True, True]
    mean, error = scores.paired_difference(after, before)
    assert mean == pytest.approx(0.01)
    assert error == pytest.approx(0.01)
    assert scores.proportion(after)[1] > 0.04
    assert scores.paired_difference([2.0], [1.5]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (" yes\n", "yes", True),
        ("Yes", "yes", False),
        ("a  b", "a b", False),
        ("", "yes", False),
    ],
)
def test_exact_match_forgives_only_the_space_around(answer, reference, expected):
    assert scores.exact_match(answer, reference) is expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ('{"b": [1, 2], "a": 1.0}', '{"a": 1, "b": [1, 2]}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": [2, 1]}', '{"a": [1, 2]}', False),
        ('{"a": [1]}', '{"a": [1, 2]}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 1', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("1", '{"a": 1}', False),
        ("42", "42", None),
        ("{}", "not json", None),
        ("[" * 100_000, "[]", False),
    ],
)
def test_json_match_compares_values(answer, reference, expected):
    assert scores.json_match(answer, reference) is expected


@pytest.mark.parametrize(
    ("answer", "field", "expected"),
    [
        ('{"intent": "Play", "slots": {}}', "intent", True),
        ('{"intent": "Play", "slots": {"city": "Rio"}}', "slots.city", True),
        ('{"intent": "Stop"}', "intent", False),
        ("Play", "intent", False),
        ("[]", "intent", False),
        ('{"intent": "Play"}', "mood", None),
        ('{"intent": "Play"}', "intent.deep", None),
    ],
)
def test_one_field_of_a_json_answer(answer, field, expected):
    reference = '{"intent": "Play", "slots": {"city": "Rio"}}'
    assert scores.json_field_match(answer, reference, field) is expected


def test_the_best_choice_by_sum_and_by_token():
    losses, tokens = [3.0, 4.0, 4.0], [1, 4, 4]
    assert scores.best_choice(losses, tokens, per_token=False) == 0
    assert scores.best_choice(losses, tokens, per_token=True) == 1
