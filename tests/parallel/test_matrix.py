"""The parity matrix: every way to share a model out, alone and together, makes the steps of one process.

{full, LoRA} x zero 0 to 3 x tensor 1, 2 x pipeline 1, 2 x one micro-batch and several. Where a stage needs processes
with other rows beside tensor 2 and pipeline 2, eight of them run.
"""

from __future__ import annotations

from typing import Any

import pytest

from afina.config import ParallelSettings
from tests.parallel.parity import Case
from tests.parallel.pool import Pool
from tests.parallel.tensor_kit import check_all, runs

pytestmark = pytest.mark.dist

CASES = tuple(
    Case(technique, rows_each, model=(("num_hidden_layers", 4),), optimizer=optimizer)
    for technique in ("lora", "full")
    for rows_each, optimizer in ((None, "sgd"), (1, "adamw"))
)
SHARED = [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]
PLANS = [{"zero": zero, **shared} for shared in SHARED for zero in range(4)]


def name_of(plan: dict[str, int]) -> str:
    """Its degrees."""
    return "-".join(f"{key}{value}" for key, value in plan.items())


def processes_of(plan: dict[str, int]) -> int:
    """Two with other rows where a stage shares among them; tensor 2 and pipeline 2 alone are four."""
    together = plan.get("tensor", 1) * plan.get("pipeline", 1)
    return 4 if together == 4 and not plan["zero"] else 2 * together


@pytest.mark.parametrize("plan", PLANS, ids=name_of)
def test_steps_are_those_of_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    processes = processes_of(plan)
    # Of eight processes on two cores, half of the cases.
    cases = CASES if processes < 8 else CASES[1::2]
    check_all(cases, pool.run(processes, runs, cases, ParallelSettings.model_validate(plan)))
