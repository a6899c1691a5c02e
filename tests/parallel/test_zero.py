"""ZeRO: whatever processes share out, a step is that of one process with all rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from afina.config import ParallelSettings
from tests.parallel.parity import Case, Found, joined, run
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist

CASES = tuple(
    Case(technique, rows_each, optimizer=optimizer)
    for technique in ("lora", "full")
    for rows_each, optimizer in ((None, "sgd"), (1, "adamw"))
)


@functools.cache
def alone(case: Case) -> Found:
    """The same in this process."""
    return run(case, None)


def every(cases: Sequence[Case], settings: ParallelSettings) -> list[Found]:
    """One after the other in this process, which is one of several."""
    return [run(case, settings, more=True) for case in cases]


@pytest.mark.parametrize(("processes", "replicate"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_are_those_of_one_process(
    pool: Pool, zero: int, processes: int, replicate: int
) -> None:
    settings = ParallelSettings.model_validate({"zero": zero, "replicate": replicate})
    found = pool.run(processes, every, CASES, settings)
    for case, ones in zip(CASES, zip(*found, strict=True), strict=True):
        same(case, ones)


def same(case: Case, found: Sequence[Found]) -> None:
    """Asserts that what processes found is what one finds."""
    expected = alone(case)
    for name in ("gradients", "values"):
        wholes = joined([getattr(one, name) for one in found])
        wanted: dict[str, torch.Tensor] = getattr(expected, name)
        assert wholes.keys() == wanted.keys()
        for key, whole in wholes.items():
            torch.testing.assert_close(whole, wanted[key], rtol=0, atol=1e-9)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=1e-9)
        assert one.norm == pytest.approx(expected.norm, rel=1e-9)
        assert one.losses == pytest.approx(expected.losses, abs=1e-9)
