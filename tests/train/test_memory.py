"""A pass that does not fit into memory: named, saved before, and what to make smaller."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from afina.errors import RunError
from afina.train.memory import OutOfMemoryError, is_out_of_memory
from afina.tree import Seams
from afina.types import Batch
from tests.train import kit
from tests.train.kit import ragged_rows, same, weights

# What weighs losses keeps rows apart; a run without it that must equal one with it does so too.
run = partial(kit.run, share=False)


def real_error() -> RuntimeError:
    """What torch raises for more memory than any machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_errors_of_memory_are_known_among_others() -> None:
    assert is_out_of_memory(real_error())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_a_pass_that_does_not_fit_names_its_rows_and_saves_the_steps_before(tmp_path: Path) -> None:
    """On the CPU, where torch's error is a plain RuntimeError; then it goes on with smaller passes."""

    def swell(losses: Tensor, batch: Batch, step: int) -> Tensor:
        if step == 2 and len(batch.rows) > 1:
            torch.empty(2**60, dtype=torch.uint8)
        return losses

    seams = Seams(loss=(swell,))
    settings = {"steps": 4, "rows_per_step": 4}
    with pytest.raises(RunError, match="step 3: too little memory") as caught:
        run(tmp_path / "run", micro_rows=4, options={"seams": seams}, **settings)
    rows = [row for row in ragged_rows(10) if f"({row.source})" in str(caught.value.got)]
    assert len(rows) == 1
    assert "rows with" in str(caught.value.got)
    assert f"with {len(rows[0].tokens)}" in str(caught.value.got)
    assert "--set train.micro_tokens=" in str(caught.value.cure)
    assert "2 steps before it saved" in str(caught.value.cure)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002"
    allow = {"resume": True, "allow_changes": True, "seams": seams}
    rest = run(tmp_path / "run", micro_rows=1, options=allow, **settings)
    whole = run(tmp_path / "whole", micro_rows=4, **settings)
    one, two = weights(rest), weights(whole)
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-10
    assert not same(
        one, two
    )  # cut otherwise, it differs in the last bits: which is why it has to be allowed


def test_another_error_of_a_pass_passes_as_it_is(tmp_path: Path) -> None:
    def fail(losses: Tensor, batch: Batch, step: int) -> Tensor:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        run(tmp_path / "run", steps=1, options={"seams": Seams(loss=(fail,))})


def test_one_row_alone_that_does_not_fit_is_told_other_ways() -> None:
    rows = ragged_rows(1)
    assert "data.max_tokens" in str(OutOfMemoryError(1, rows).cure)
    assert "micro_tokens" not in str(OutOfMemoryError(1, rows).cure)
