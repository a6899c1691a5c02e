"""Processes that share each matrix make the step that one process makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache

from afina.config import ParallelSettings
from afina.models.blocks import Blocks
from afina.models.forward import own_attention, packing
from afina.parallel.processes import Processes
from afina.parallel.runtime import OneProcess
from afina.train.ahead import made
from afina.train.loop import backward
from afina.train.validate import mean_loss
from afina.tree.pieces import mark, piece_of
from tests.parallel.parity import Case, Found, edited, joined, whole, windows, work_of
from tests.parallel.pool import Pool
from tests.parallel.tensor_kit import FAMILIES, alone, check_all, runs

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
    adam = [Case("lora", 1, optimizer="adamw"), Case("full", optimizer="adamw")]
    cases = adam if zero else CASES[::3]
    check_all(cases, pool.run(4, runs, cases, ParallelSettings(tensor=2, zero=zero)))


def test_weights_that_are_shared_out_twice(pool: Pool) -> None:
    cases = [Case("lora"), Case("full", 1)]
    check_all(cases, pool.run(4, runs, cases, ParallelSettings(tensor=2, zero=3)))


def test_nine_heads_and_three_of_keys_in_three_processes(pool: Pool) -> None:
    """SmolLM2's proportions, which two processes cannot share (`test_tensor_refused`)."""
    sizes = (("hidden_size", 36), ("intermediate_size", 48), ("head_dim", 4))
    heads = (("num_attention_heads", 9), ("num_key_value_heads", 3))
    cases = [Case("lora", 1, model=(*sizes, *heads)), Case("full", model=(*sizes, *heads))]
    check_all(cases, pool.run(3, runs, cases, ParallelSettings(tensor=3)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_families(pool: Pool, family: str) -> None:
    cases = [Case("lora", family=family), Case("full", family=family)]
    check_all(cases, pool.run(2, runs, cases, ParallelSettings(tensor=2)))


def test_blocks_that_run_again_in_backward(pool: Pool) -> None:
    cases = [Case("lora", recompute=True), Case("full", 1, recompute=True)]
    check_all(cases, pool.run(2, runs, cases, ParallelSettings(tensor=2)))


@pytest.mark.parametrize("technique", ["lora", "prefix"])
def test_validation_and_generation(pool: Pool, technique: str) -> None:
    expected = validated(technique, None)
    for found in pool.run(2, validated, technique, ParallelSettings(tensor=2)):
        assert found.loss == pytest.approx(expected.loss, abs=1e-9)
        assert found.ids == expected.ids
        # The cache has the heads of this process alone.
        assert found.heads == expected.heads // 2
        assert found.later == pytest.approx(expected.later, abs=1e-9)


class Validated(NamedTuple):
    """Mean loss of validation rows, what is generated, heads in its cache, and the loss of a training pass after."""

    loss: float
    ids: list[list[int]]
    heads: int
    later: float


def validated(technique: str, settings: ParallelSettings | None) -> Validated:
    case = Case(technique, 1, rows=5)
    mesh: Any = OneProcess() if settings is None else Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    rows, later = windows(case)
    with packing(edit.model, True):
        loss = mean_loss(edit.model, work.cut(mesh.share(rows)), work.passes, mesh)
        own = "eager" if technique == "lora" else "eager_with_prefix"
        with mesh.opened(), torch.no_grad(), own_attention(edit.model, own):
            model: Any = edit.model.eval()
            cache = DynamicCache()
            ids = model.generate(
                torch.tensor([[5, 9, 11], [7, 3, 4]]),
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
                cache=cache,
            )
        then = backward(work, made(work, mesh.share(later)), 0).loss
    heads = cache.layers[0].keys.shape[1]
    return Validated(loss, ids.tolist(), heads, then)


def compiled(case: Case, settings: ParallelSettings) -> Found:
    """The first window of a case, its blocks compiled."""
    mesh = Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    found = Found()
    with packing(edit.model, True), Blocks(edit.model).running() as blocks:
        blocks.compile(True)
        found.loss = backward(work, made(work, mesh.share(windows(case)[0])), 0).loss
        mesh.reduce(edit.trainable())
        own = mesh.own(edit.trainable())
        found.norm, found.gradients = float(mesh.norm(own)), whole(own)
    return found


@pytest.mark.slow
def test_compiled_blocks(pool: Pool) -> None:
    case = Case("lora", model=(("num_hidden_layers", 1),))
    expected = alone(case)
    found = pool.run(2, compiled, case, ParallelSettings(tensor=2))
    # Norms compute in fp32, which a compiled graph rounds otherwise.
    for name, gradient in joined([one.gradients for one in found]).items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-5)
    assert [one.norm for one in found] == [pytest.approx(expected.norm, rel=1e-5)] * 2


def filled(settings: ParallelSettings) -> tuple[torch.Tensor, bool]:
    """What a model says that was shared out before it had values, and then given its own alone."""
    edit = edited(Case("lora"))
    whole_model, model = edited(Case("lora")).model, edit.model
    for name, parameter in list(model.named_parameters()):
        put(model, name, torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
    mesh = Processes(settings)
    mesh.begin()
    mesh.hold(model, edit.trainable())
    less = False
    for name, parameter in list(model.named_parameters()):
        piece = piece_of(parameter)
        value = piece.of(whole_model.get_parameter(name).detach()).clone()
        assert value.shape == parameter.shape, name
        less = less or not piece.whole
        put(model, name, mark(torch.nn.Parameter(value, parameter.requires_grad), piece))
    return model(input_ids=torch.arange(2, 9)[None])[0].detach(), less


def put(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, parameter)


def test_a_model_is_shared_out_before_it_has_values(pool: Pool) -> None:
    expected = edited(Case("lora")).model(input_ids=torch.arange(2, 9)[None])[0].detach()
    for said, less in pool.run(2, filled, ParallelSettings(tensor=2)):
        assert less
        torch.testing.assert_close(said, expected, rtol=0, atol=1e-9)
