"""Processes that share each matrix make the step that one process makes."""

from __future__ import annotations

import pytest

from afina.config import ParallelSettings
from tests.parallel.parity import Case
from tests.parallel.pool import Pool
from tests.parallel.tensor_kit import FAMILIES, check_all, runs

pytestmark = pytest.mark.dist

CASES = [
    Case(technique, rows_each, packed=packed)
    for technique in ("lora", "full")
    for rows_each in (None, 1)
    for packed in (True, False)
]


def test_gradients_are_those_of_one_process(pool: Pool) -> None:
    check_all(CASES, pool.run(2, runs, CASES, ParallelSettings(tensor=2)))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_beside_processes_with_other_rows(pool: Pool, zero: int) -> None:
    cases = [Case("lora"), Case("full", 1)] if zero else CASES[::3]
    check_all(cases, pool.run(4, runs, cases, ParallelSettings(tensor=2, zero=zero)))


def test_weights_that_are_shared_out_twice(pool: Pool) -> None:
    cases = [Case("lora"), Case("full", 1)]
    check_all(cases, pool.run(4, runs, cases, ParallelSettings(tensor=2, zero=3)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_families(pool: Pool, family: str) -> None:
    cases = [Case("lora", family=family), Case("full", family=family)]
    check_all(cases, pool.run(2, runs, cases, ParallelSettings(tensor=2)))


def test_blocks_that_run_again_in_backward(pool: Pool) -> None:
    cases = [Case("lora", recompute=True), Case("full", 1, recompute=True)]
    check_all(cases, pool.run(2, runs, cases, ParallelSettings(tensor=2)))
