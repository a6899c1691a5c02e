"""The factor of the learning rate, against values worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from afina.config import TrainSettings
from afina.errors import AfinaError
from afina.optim.schedules import Kind, factor


def curve(kind: Kind, total: int, warmup: int) -> list[float]:
    return [factor(s, total_steps=total, warmup_steps=warmup, kind=kind) for s in range(total)]


def test_warm_up_is_linear_to_one() -> None:
    assert curve("constant", 6, 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear() -> None:
    assert curve("linear", 5, 0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert curve("linear", 6, 2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine() -> None:
    assert curve("cosine", 4, 0) == pytest.approx(
        [1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4]
    )


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_it_would_end_at_zero_and_stays_there(kind: Kind) -> None:
    for step in (10, 11, 500):
        assert factor(step, total_steps=10, warmup_steps=3, kind=kind) == pytest.approx(0.0)


@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.sampled_from(["linear", "cosine", "constant"]),
)
def test_it_rises_then_falls_between_zero_and_one(total: int, warmup: int, kind: Kind) -> None:
    warmup = min(warmup, total)
    factors = curve(kind, total, warmup)
    assert all(0 < f <= 1 for f in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


# --- by tokens -------------------------------------------------------------------------------------------------


def by_tokens(each: list[int], warmup: int, kind: Kind) -> list[float]:
    shown = [sum(each[:step]) for step in range(len(each) + 1)]
    steps = range(len(each))
    return [
        factor(s, total_steps=len(each), warmup_steps=warmup, kind=kind, shown=shown) for s in steps
    ]


def test_by_tokens_the_rate_falls_with_what_was_shown() -> None:
    # 100 tokens after the warm-up: before its steps 0, 10, 20, 60 of them were shown.
    each = [5, 5, 10, 10, 40, 40]
    assert by_tokens(each, 2, "linear") == [0.5, 1.0, 1.0, 0.9, 0.8, 0.4]
    half = [0.5 * (1 + math.cos(math.pi * done)) for done in (0.0, 0.1, 0.2, 0.6)]
    assert by_tokens(each, 2, "cosine") == pytest.approx([0.5, 1.0, *half])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_equal_steps_are_the_schedule_by_steps_bit_for_bit(kind: Kind) -> None:
    plain = [factor(s, total_steps=11, warmup_steps=3, kind=kind) for s in range(11)]
    assert by_tokens([37] * 11, 3, kind) == plain
    assert by_tokens([37] * 10 + [38], 3, kind) != plain


def test_more_steps_than_were_planned_have_the_rate_of_the_end() -> None:
    assert factor(9, total_steps=2, warmup_steps=0, kind="linear", shown=[0, 4, 8]) == 0.0


def test_what_falls_with_tokens_must_fall() -> None:
    with pytest.raises((AfinaError, ValidationError), match="schedule_by: tokens would do nothing"):
        TrainSettings(schedule="constant", schedule_by="tokens")
