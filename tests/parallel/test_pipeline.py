"""Processes that share out a model's blocks make the step that one process makes with all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from afina.config import ParallelSettings
from tests.parallel.parity import Case, Found, joined, run
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist

FOUR = (("num_hidden_layers", 4),)
TIED = (*FOUR, ("tie_word_embeddings", True))
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]


@functools.cache
def alone(case: Case) -> Found:
    """The same in this process."""
    return run(case, None)


def same(
    pool: Pool, processes: int, case: Case, settings: ParallelSettings, *, within: float = 1e-9
) -> list[Found]:
    """Asserts that these processes make the steps of one; what each found."""
    expected = alone(case)
    found = pool.run(processes, run, case, settings)
    gradients = joined([one.gradients for one in found])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=within)
    values = joined([one.values for one in found])
    for name, value in values.items():
        torch.testing.assert_close(value, expected.values[name], rtol=0, atol=within)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=within)
        assert one.norm == pytest.approx(expected.norm, rel=within)
        assert one.losses == pytest.approx(expected.losses, abs=within)
    return found


@pytest.mark.parametrize("rows_each", [1, 2])
@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_are_those_of_one_process(
    pool: Pool, schedule: Any, technique: str, rows_each: int
) -> None:
    case = Case(technique, rows_each, model=FOUR)
    found = same(pool, 2, case, ParallelSettings(pipeline=2, schedule=schedule))
    # No block is in both, and nothing is in none.
    first, last = (set(one.gradients) for one in found)
    assert not first & last
    assert first | last == set(alone(case).gradients)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("family", "technique"), [("gpt2", "full"), ("gemma2", "full"), ("qwen2", "lora")]
)
def test_other_models(pool: Pool, family: str, technique: str, packed: bool) -> None:
    changes = (("n_layer", 4),) if family == "gpt2" else (*FOUR, ("sliding_window", 12))
    case = Case(technique, 2, family=family, packed=packed, model=changes)
    # Attention that Transformers makes rounds to fp32, and padding is summed with the rest.
    within = 1e-9 if packed else 1e-6
    same(pool, 2, case, ParallelSettings(pipeline=2), within=within)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("technique", ["lora", "full"])
def test_blocks_that_run_again_in_backward(pool: Pool, schedule: Any, technique: str) -> None:
    case = Case(technique, 2, model=FOUR, recompute=True)
    same(pool, 2, case, ParallelSettings(pipeline=2, schedule=schedule))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_pipelines_beside_each_other(pool: Pool, zero: Any) -> None:
    case = Case("full", 1, model=TIED)
    found = same(pool, 4, case, ParallelSettings(pipeline=2, zero=zero))
    shared = "model.embed_tokens.weight"
    assert all(shared in one.shapes for one in found)
    if zero:
        assert found[0].shapes[shared] == (130, 32)


def test_one_micro_batch_is_plain_model_parallelism(pool: Pool) -> None:
    case = Case("lora", None, model=FOUR)
    same(pool, 4, case, ParallelSettings(pipeline=4, schedule="gpipe"))


def test_a_split_that_the_user_gives(pool: Pool) -> None:
    case = Case("lora", 1, model=FOUR)
    found = same(pool, 2, case, ParallelSettings(pipeline=2, split=(1, 3)))
    layers = [{name.split(".")[2] for name in one.gradients} for one in found]
    assert layers == [{"0"}, {"1", "2", "3"}]


def test_fewer_rows_than_pipelines(pool: Pool) -> None:
    same(pool, 4, Case("lora", 1, rows=2, model=FOUR), ParallelSettings(pipeline=2))


@pytest.mark.parametrize("technique", ["lora", "full"])
@pytest.mark.parametrize("beside", [{"tensor": 2}, {"zero": 3}], ids=["tensor", "zero"])
def test_stages_whose_weights_are_shared_too(
    pool: Pool, technique: str, beside: dict[str, Any]
) -> None:
    same(pool, 4, Case(technique, 2, model=TIED), ParallelSettings(pipeline=2, **beside))
