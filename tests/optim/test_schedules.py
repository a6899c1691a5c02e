"""The factor of the learning rate, against values worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
