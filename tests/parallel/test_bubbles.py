"""Idle time by the tables of torch's schedules is what the papers say; blocks are shared out by what they cost."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from afina.config import ParallelSettings
from afina.errors import ConfigError
from afina.parallel.bubbles import Slot, micro_batches, table, waiting
from afina.parallel.pipeline_balance import kinds, measured, stretches
from tests.tiny import tiny_gemma2, tiny_llama

PROCESSES = range(2, 9)


def shares(schedule: Any, processes: int, micros: int, chunks: int, **costs: float) -> list[float]:
    found = waiting(table(schedule, processes, micros, chunks), **costs)
    assert len(found.shares) == processes
    return list(found.shares)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_a_process(schedule: Any, processes: int) -> None:
    """Huang et al. 2019; Narayanan et al. 2021, section 2.2."""
    for micros in {processes, processes + 3, 4 * processes, 32}:
        expected = (processes - 1) / (micros + processes - 1)
        assert shares(schedule, processes, micros, 1) == pytest.approx([expected] * processes)
        # However long backward takes beside forward.
        assert shares(
            schedule, processes, micros, 1, forward=1, inputs=3, weights=2
        ) == pytest.approx([expected] * processes)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_several_stages_a_process(processes: int, chunks: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: the idle time is divided by the stages of a process."""
    for micros in (processes, 4 * processes):
        expected = (processes - 1) / (chunks * micros + processes - 1)
        found = shares("interleaved", processes, micros, chunks)
        assert found == pytest.approx([expected] * processes)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_backward_in_two_parts(processes: int, chunks: int) -> None:
    """ZB-H1 of Qi et al. 2023, table 2: (p - 1)(F + B - W), a third of 1F1B's with equal parts; none with LoRA."""
    for micros in (processes, 4 * processes):
        work = chunks * micros
        found = shares("zero_bubble", processes, micros, chunks)
        assert found == pytest.approx([(processes - 1) / (3 * work + processes - 1)] * processes)
        # Where weights take no time there is nothing to fill the gaps with.
        found = shares("zero_bubble", processes, micros, chunks, weights=0)
        assert found == pytest.approx([(processes - 1) / (work + processes - 1)] * processes)


def test_known_figures() -> None:
    """Those of `afina plan`'s page: 4 processes and 8 micro-batches, 8 and 32, the latter interleaved."""
    assert shares("1f1b", 4, 8, 1)[0] == pytest.approx(3 / 11)
    assert shares("1f1b", 8, 32, 1)[0] == pytest.approx(7 / 39)
    assert shares("interleaved", 8, 32, 2)[0] == pytest.approx(7 / 71)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_micro_batches_in_memory_at_once(processes: int) -> None:
    micros = 2 * processes
    assert waiting(table("gpipe", processes, micros, 1)).most == (micros,) * processes
    found = waiting(table("1f1b", processes, micros, 1)).most
    assert found == tuple(processes - rank for rank in range(processes))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_micro_batch_goes_through_every_stage(schedule: Any) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    micros = micro_batches(schedule, 3, 5)
    slots = [slot for one in table(schedule, 3, micros, chunks) for slot in one]
    assert len(set(slots)) == len(slots)
    wanted = {(stage, n) for stage in range(3 * chunks) for n in range(micros)}
    for kind in "FIW" if schedule == "zero_bubble" else "FB":
        assert {(s.stage, s.micro) for s in slots if s.kind == kind} == wanted


def test_how_many_micro_batches_a_schedule_takes() -> None:
    assert micro_batches("gpipe", 4, 1) == 1
    assert micro_batches("1f1b", 4, 1) == 4
    assert micro_batches("1f1b", 4, 7) == 7
    assert micro_batches("interleaved", 4, 9) == 10  # two rounds of five
    assert micro_batches("zero_bubble", 2, 3) == 3


def test_a_table_that_waits_for_itself() -> None:
    order = [[Slot("B", 0, 0), Slot("F", 0, 0)], [Slot("F", 1, 0), Slot("B", 1, 0)]]
    with pytest.raises(ValueError, match="waits"):
        waiting(order)


def best(costs: list[int], stages: int) -> int:
    """The slowest stage of the best split, by trying all."""
    count = len(costs)
    cuts = itertools.combinations(range(1, count), stages - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, count))) for cut in cuts
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "costs", [[1, 5, 1, 1, 4, 2], [9, 1, 1, 1, 1, 1, 1], [3, 1, 4, 1, 5, 9, 2]]
)
def test_no_split_has_a_faster_slowest_stage(costs: list[int], stages: int) -> None:
    found = stretches(costs, stages)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(costs)
    assert max(sum(costs[a:b]) for a, b in found) == best(costs, stages)


def test_equal_blocks_are_shared_out_equally() -> None:
    assert stretches([1.0] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    sizes = [end - first for first, end in stretches([2.0] * 10, 4)]
    assert sizes == [3, 3, 2, 2]
    with pytest.raises(ConfigError, match="more stages"):
        stretches([1.0] * 3, 4)


def test_blocks_are_timed_one_of_a_kind() -> None:
    model = tiny_gemma2(num_hidden_layers=4)
    blocks = list(model.model.layers)
    assert kinds(blocks, model.config) == [0, 1, 0, 1]
    # A clock by which each reading is a second later than the last, and the fourth block's kind takes long.
    ticks = iter([0, 9, 0, 7, 0, 8, 0, 2, 0, 3, 0, 4])
    ids_BT = torch.ones(1, 6, dtype=torch.int64)
    run = lambda: model(input_ids=ids_BT, use_cache=False)  # noqa: E731
    assert measured(blocks, model.config, run, lambda: float(next(ticks))) == [7, 2, 7, 2]
    assert all(p.grad is None for p in model.parameters())


def test_blocks_that_are_alike_are_not_timed() -> None:
    model = tiny_llama(num_hidden_layers=4)

    def never() -> nn.Module:
        raise AssertionError

    assert measured(list(model.model.layers), model.config, never) == [1.0] * 4
    model.model.layers[2].requires_grad_(False)
    assert kinds(list(model.model.layers), model.config) == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": (2, 2)}, "no pipeline"),
        ({"pipeline": 2, "split": (1, 1, 2)}, "3 stages"),
        ({"pipeline": 2, "split": (1, 1, 1, 1)}, "1f1b runs one"),
        ({"pipeline": 2, "schedule": "interleaved", "split": (2, 2)}, "runs several"),
    ],
)
def test_splits_that_no_schedule_runs(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ParallelSettings(**given)


def test_shares_are_exact_fractions() -> None:
    found = waiting(table("1f1b", 5, 20, 1), forward=1, inputs=1, weights=1)
    assert Fraction(found.length - found.busy[0]).limit_denominator() / Fraction(
        found.length
    ).limit_denominator() == Fraction(4, 24)
