"""Processes that see different rows make the step that one process makes with all of them."""

from __future__ import annotations

import functools

import pytest
import torch

from afina.config import ParallelSettings
from tests.parallel.parity import Case, Found, joined, run
from tests.parallel.pool import Failed, Pool

pytestmark = pytest.mark.dist


@functools.cache
def alone(case: Case) -> Found:
    """The same in this process."""
    return run(case, None)


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("rows_each", [None, 1])
@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_are_those_of_one_process(
    pool: Pool, technique: str, rows_each: int | None, processes: int
) -> None:
    case = Case(technique, rows_each)
    expected = alone(case)
    found = pool.run(processes, run, case, ParallelSettings())
    gradients = joined([one.gradients for one in found])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=1e-9)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=1e-9)
        assert one.norm == pytest.approx(expected.norm, rel=1e-9)
        assert one.losses == pytest.approx(expected.losses, abs=1e-9)
        for name, value in one.values.items():
            torch.testing.assert_close(value, expected.values[name], rtol=0, atol=1e-9)


def test_more_processes_than_rows(pool: Pool) -> None:
    case = Case(rows=2)
    expected = alone(case)
    found = pool.run(3, run, case, ParallelSettings())
    assert [one.losses for one in found] == [pytest.approx(expected.losses, abs=1e-9)] * 3


def _fails(rank: int) -> None:
    import os

    if int(os.environ["RANK"]) == rank:
        raise ValueError("on purpose")


def test_what_goes_wrong_in_a_process_is_told(pool: Pool) -> None:
    with pytest.raises(Failed, match="on purpose"):
        pool.run(2, _fails, 1)
