"""Processes that share each matrix make the step that one process makes."""

from __future__ import annotations

import functools

import pytest
import torch

from afina.config import ParallelSettings
from tests.parallel.parity import Case, Found, joined, run
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist


@functools.cache
def alone(case: Case) -> Found:
    """The same in this process."""
    return run(case, None)


def check(case: Case, found: list[Found]) -> None:
    """Every figure is that of one process."""
    expected = alone(case)
    gradients = joined([one.gradients for one in found])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected.gradients[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=1e-9)
        assert one.norm == pytest.approx(expected.norm, rel=1e-9)
        assert one.losses == pytest.approx(expected.losses, abs=1e-9)
    for name, value in joined([one.values for one in found]).items():
        torch.testing.assert_close(value, expected.values[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("rows_each", [None, 1])
def test_gradients_are_those_of_one_process(
    pool: Pool, technique: str, rows_each: int | None
) -> None:
    case = Case(technique, rows_each)
    check(case, pool.run(2, run, case, ParallelSettings(tensor=2)))
