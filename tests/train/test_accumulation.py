"""Accumulation beside every technique: neither the cut of a window nor its length changes what a token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.config import TrainSettings
from afina.models.forward import packing
from afina.table import TECHNIQUES, apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.ahead import made
from afina.train.loop import backward, loop
from afina.train.metrics import read_metrics
from afina.train.plan import optimiser_of
from afina.tree import Edit, Seams
from afina.types import Row
from tests import test_pairs
from tests.tiny import tiny_llama
from tests.train import kit

UNTRAINED = 2
"""A row without a label: with one row a micro-batch, one that trains nothing."""


def learner(*keys: str) -> Edit:
    """A tiny model with the techniques of these keys, LoRA beside what trains nothing, moved off its start."""
    edit = apply(tiny_llama(num_hidden_layers=3), test_pairs.values(keys), seed=5)
    edit.model.train()
    with torch.no_grad():
        for number, tensor in enumerate(edit.trainable().values()):
            draw = torch.Generator().manual_seed(number)
            tensor.add_(torch.randn(tensor.shape, generator=draw).to(tensor) * 0.05)
    return edit


def window(edit: Edit, rows: Sequence[Row], rows_each: int, step: int = 0) -> dict[str, Tensor]:
    """Loss and gradients of a window that is cut so, what techniques do in the loop among it."""
    work = kit.work_of(edit, rows_each=rows_each, seams=edit.seams(4))
    with packing(edit.model, True):
        for begin in work.seams.at_step:
            begin(step)
        loss = backward(work, made(work, rows), step).loss
    found = {n: p.grad.clone() for n, p in edit.trainable().items() if p.grad is not None}
    work.optimiser.clear_gradients()
    return {**found, "loss": torch.tensor(loss, dtype=torch.float64)}


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("key", TECHNIQUES)
def test_eight_ones_are_two_fours_are_one_eight(key: str) -> None:
    """G1 of the known checks, of ragged rows, one of which trains nothing (G3)."""
    edit = learner(key)
    rows = kit.ragged_rows(8, untrained=(UNTRAINED,))
    whole = window(edit, rows, 8)
    assert set(whole) - {"loss"} == set(edit.trainable())
    for each in (1, 4):
        near(window(edit, rows, each), whole)


@pytest.mark.parametrize("key", TECHNIQUES)
def test_a_short_window_is_divided_by_its_own_tokens(key: str) -> None:
    """G2: the last three of seven rows learn as three rows do, in parts or at once."""
    edit = learner(key)
    rows = kit.ragged_rows(7, seed=3)[4:]
    short, whole = window(edit, rows, 2), window(edit, rows, 3)
    near(short, whole)
    # The control: a mean over a full window's four rows would be smaller.
    assert not torch.allclose(short["loss"] * 3 / 4, whole["loss"], rtol=1e-3)


def test_the_last_step_of_an_epoch_is_the_mean_of_its_own_rows(tmp_path: Path) -> None:
    """G2 in a run: seven rows, four a step; the second step has three, and its loss is theirs alone."""
    rows = kit.ragged_rows(7, seed=3)
    kit.run(tmp_path / "run", Full(), data=rows, epochs=1, lr=1e-12, warmup_steps=0)
    first, last = read_metrics(tmp_path / "run")
    assert (len(first["rows"]), len(last["rows"])) == (4, 3)
    mine = [rows[n] for n in last["rows"]]
    assert last["trained_tokens"] == sum(row.trained_tokens for row in mine)
    edit = apply(tiny_llama(), [Full()])
    wanted = window(edit, mine, 1)["loss"]
    assert last["loss"] == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("key", ["adalora", "layer_decay", "gradient_noise", "token_pruning"])
def test_a_window_in_which_nothing_trains_moves_nothing(key: str) -> None:
    """G3: its loss is 0 and no NaN, and neither penalty nor noise moves what has no gradient."""
    edit = learner(key)
    before = {n: p.detach().clone() for n, p in edit.trainable().items()}
    work = kit.work_of(edit, total_steps=4, rows_each=1, seams=edit.seams(4))
    with packing(edit.model, True):
        step = next(loop(work, iter([kit.ragged_rows(3, untrained=(0, 1, 2))])))
    assert (step.loss, step.trained_tokens, step.moved) == (0.0, 0, False)
    # AdaLoRA cuts directions by the step, whatever moved: that is its e.
    still = [n for n in before if not n.endswith(".adalora.e")]
    assert still
    assert all(torch.equal(edit.trainable()[n], before[n]) for n in still)


def test_rates_noise_and_clipping_act_once_a_window() -> None:
    """Eight micro-batches end where one does, all that moves tensors in between."""
    ends: list[dict[str, Tensor]] = []
    for each in (1, 8):
        values = [LoRA(rank=2), TECHNIQUES["layer_decay"](), TECHNIQUES["gradient_noise"]()]
        edit = apply(tiny_llama(), values, seed=1)
        seams = edit.seams(3)
        settings = TrainSettings(steps=3, lr=1e-2)
        work = kit.work_of(edit, rows_each=each, seams=seams, total_steps=3, clip=0.5)
        work = replace(work, optimiser=optimiser_of(edit, settings, seams))
        with packing(edit.model, True):
            list(loop(work, iter([kit.ragged_rows(8, seed=n) for n in range(3)])))
        ends.append({n: p.detach() for n, p in edit.trainable().items()})
    near(*ends)


def test_what_is_added_to_each_micro_batch_would_be_seen() -> None:
    """The control of all this: a technique that acted once a micro-batch would not pass."""

    def often(losses: Tensor, batch: Any, step: int) -> Tensor:
        return losses + 1.0 / len(losses)

    edit = learner("lora")
    found: list[float] = []
    for each in (1, 8):
        work = kit.work_of(edit, rows_each=each, seams=Seams(loss=(often,)))
        with packing(edit.model, True):
            found.append(backward(work, made(work, kit.ragged_rows(8)), 0).loss)
        work.optimiser.clear_gradients()
    assert abs(found[0] - found[1]) > 1e-2
