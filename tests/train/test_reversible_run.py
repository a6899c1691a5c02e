"""Reversible blocks in runs: micro-batches, resuming, what the first lines say, and models that are loaded again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import afina
from afina import cli
from afina.config import GenerateSettings
from afina.data.settings import DataSettings
from afina.errors import ModelError, RunError, TechniqueError
from afina.models import generate
from afina.table import apply, restore
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.reversible import Reversible, pass_of
from afina.techniques.token_pruning import TokenPruning
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from afina.tree import Edit, Seams, Technique
from tests import battery
from tests.techniques.test_reversible import remembered
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train.kit import (
    Stop,
    gradients,
    largest_difference,
    ragged_rows,
    same,
    stop_after,
    weights,
    work_of,
)

REVERSIBLE = Reversible(plain=1, check="always", signs="row")


class Listen(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def heard(self, part: str) -> list[str]:
        return [line for line in self.lines if part in line]


def started(*techniques: Technique, **changes: Any) -> Edit:
    """A tiny fp64 Llama whose adapter is not at its start."""
    edit = apply(tiny_llama(num_hidden_layers=4, **changes), techniques, seed=5)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in edit.trainable().items():
            if name.endswith(".b"):
                tensor += torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) / 10
    return edit


def run(out: Path, *techniques: Technique, **settings: Any) -> Any:
    options = settings.pop("options", {})
    edit = started(*(techniques or (LoRA(rank=2), REVERSIBLE)))
    given = {"steps": 4, "rows_per_step": 4, "micro_rows": 2, "lr": 1e-2, **settings}
    mine = {"reporter": Silent(), "base": "tiny", "data_settings": DataSettings(), **options}
    data = ragged_rows(10)
    return train(edit.model, byte_tokenizer(), data, edit, out, options=RunOptions(**mine), **given)


# --- one step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signs", ["row", "step"])
@pytest.mark.parametrize("headed", [True, False])
def test_the_cut_into_micro_batches_and_packing_change_no_gradient(
    signs: Any, headed: bool
) -> None:
    edit = started(LoRA(rank=3), Reversible(plain=1, check="always", signs=signs))
    rows = ragged_rows(6)
    make: dict[str, Any] = {"make": work_of, "headed": headed, "seams": edit.seams(4)}
    edit.model.train()
    loss, whole = gradients(edit, rows, **make)
    for each, packed in ((2, True), (1, True), (None, False), (3, False)):
        other, found = gradients(edit, rows, rows_each=each, packed=packed, **make)
        assert abs(other - loss) < 1e-6
        assert largest_difference(found, whole) < 1e-5
    plain = gradients(apply_plain(edit), rows, make=work_of, headed=headed)
    assert largest_difference(plain[1], whole) > 1e-3  # that it acted at all


def apply_plain(edit: Edit) -> Edit:
    edit.undo()
    return started(LoRA(rank=3))


def test_rows_share_their_beginnings_only_with_one_sign_for_all() -> None:
    from afina.train.passes import unshared

    by_row = started(LoRA(rank=2), REVERSIBLE)
    assert "a sign for each row" in str(unshared(by_row.model, by_row, by_row=False))
    edit = started(LoRA(rank=3), Reversible(plain=1, check="always", signs="step"))
    assert unshared(edit.model, edit, by_row=bool(edit.seams(3).on_batch)) is None
    edit.model.train()
    rows = [
        row.__class__((7, 8, 9, *row.tokens), (False,) * 3 + row.trained, row.id, row.source)
        for row in ragged_rows(5)
    ]
    loss, apart = gradients(edit, rows)
    other, shared = gradients(edit, rows, shared=True)
    assert abs(other - loss) < 1e-6
    assert largest_difference(shared, apart) < 1e-5


@pytest.mark.parametrize("score", ["random", "predictor", "loss"])
def test_pruned_blocks_run_reversibly_on_the_tokens_that_they_keep(
    score: Any, monkeypatch: Any
) -> None:
    edit = started(LoRA(rank=3), TokenPruning(keep=0.5, score=score), REVERSIBLE)
    edit.model.train()
    seams, rows = edit.seams(4), ragged_rows(5)
    gradients(edit, rows, seams=seams)
    for after in seams.after_step:  # thresholds and losses are those of a step before
        after(0)
    loss, found = gradients(edit, rows, seams=seams)
    with remembered(monkeypatch):
        true = gradients(edit, rows, seams=seams)
    assert loss == true[0]
    assert largest_difference(found, true[1]) == 0
    whole = started(LoRA(rank=3), REVERSIBLE)
    whole.model.train()
    assert loss != gradients(whole, rows, seams=whole.seams(4))[0]


@pytest.mark.parametrize("plain", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_tokens_that_stay_out_are_refused(plain: int, packed: bool) -> None:
    pruning = TokenPruning(keep=0.5, score="random", dropped="cut")
    edit = started(LoRA(rank=3), pruning, Reversible(plain=plain, signs="row"))
    edit.model.train()
    with pytest.raises(RunError, match="other tokens than before") as caught:
        gradients(edit, ragged_rows(5), seams=edit.seams(4), packed=packed)
    assert "set its dropped to restore" in str(caught.value.cure)


def test_each_step_draws_its_own_signs() -> None:
    edit = started(LoRA(rank=3), REVERSIBLE)
    edit.model.train()
    found: list[Any] = []
    for step in (0, 1, 0):
        (begin,) = edit.seams(4).at_step
        begin(step)
        found.append(gradients(edit, ragged_rows(4), seams=edit.seams(4))[1])
    assert largest_difference(found[0], found[2]) == 0
    assert largest_difference(found[0], found[1]) > 1e-5


# --- runs ------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "run", save_every=2, options={"seams": stop_after(2)})
    rest = run(tmp_path / "run", save_every=2, options={"resume": True})
    assert same(weights(whole), weights(rest))
    plain = run(tmp_path / "plain", LoRA(rank=2))
    assert not same(weights(whole), weights(plain))
    config = (whole.folder / "config.yaml").read_text(encoding="utf-8")
    assert "reversible" in config


def test_tensors_that_move_in_backward_move_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"micro_rows": 4, "clip": None}
    found = [
        run(tmp_path / str(inside), Full(), REVERSIBLE, step_in_backward=inside, **settings)
        for inside in (False, True)
    ]
    losses = [[line["loss"] for line in read_metrics(one.folder)] for one in found]
    assert losses[0] == losses[1]


def test_the_first_lines_say_what_it_costs_at_the_start(tmp_path: Path) -> None:
    heard = Listen()
    run(tmp_path / "bdia", options={"reporter": heard})
    (line,) = heard.heard("loss of the first rows")
    mixed, plain = (float(word) for word in (line.split()[6], line.split()[9]))
    gap = float(line.partition("(")[2].split()[0])
    assert gap == pytest.approx(mixed - plain, abs=2e-4)
    assert mixed != plain
    # The plain loss is the plain run's own first loss.
    bare = run(tmp_path / "plain", LoRA(rank=2), rows_per_step=4)
    assert read_metrics(bare.folder)[0]["loss"] == pytest.approx(plain, abs=2e-3)
    assert heard.heard("6 side bits a number; the first 1 left plain")
    loud = Listen()
    run(tmp_path / "additive", Full(), Reversible(form="additive"), options={"reporter": loud})
    assert loud.heard("another function than the plain model")


def test_a_loss_that_is_no_number_is_told_as_such_and_may_be_left_out(tmp_path: Path) -> None:
    """The states that come back are none either, and no check speaks of them."""
    now: list[int] = []

    def spoilt(out: str, **settings: Any) -> Any:
        edit = started(LoRA(rank=2), REVERSIBLE)
        cast("Any", edit.model).model.layers[2].mlp.register_forward_hook(
            lambda module, args, y: y * (torch.nan if now and now[-1] == 1 else 1.0)
        )
        options = RunOptions(reporter=Silent(), base="tiny", seams=Seams(at_step=(now.append,)))
        given: dict[str, Any] = {"options": options, "steps": 3, "lr": 1e-2, **settings}
        return train(edit.model, None, ragged_rows(6), edit, tmp_path / out, **given)

    with pytest.raises(RunError, match="step 2: the loss or the gradient is not finite"):
        spoilt("stops")
    now.clear()
    found = spoilt("skips", on_nan="skip")
    assert found.skipped == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights(found).values())


def test_entering_the_model_higher_up_is_refused(tmp_path: Path) -> None:
    for signs in ("row", "step"):
        value = Reversible(plain=1, signs=signs)
        with pytest.raises(TechniqueError, match="cache_inputs_gib"):
            run(
                tmp_path / signs,
                LoRA(rank=2, layers="2-3"),
                value,
                cache_inputs_gib=1.0,
                steps=8,
            )


# --- models that were trained in additive coupling -------------------------------------------------------------


@pytest.fixture
def coupled(tmp_path: Path) -> tuple[Path, Any, torch.Tensor]:
    """A run of full fine-tuning in additive coupling: its folder, the model, and what it says."""
    edit = started(Full(), Reversible(form="additive", plain=1))
    edit.model.float()
    options = RunOptions(reporter=Silent(), base="tiny")
    train(
        edit.model,
        byte_tokenizer(),
        ragged_rows(8),
        edit,
        tmp_path / "run",
        options=options,
        steps=3,
        rows_per_step=4,
        lr=1e-3,
    )
    edit.model.eval()
    return tmp_path / "run", edit.model, said(edit.model)


def said(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=battery.IDS).logits


def test_a_coupled_model_is_loaded_again_in_python(
    coupled: tuple[Path, Any, torch.Tensor], caplog: Any
) -> None:
    folder, _, answer = coupled
    with caplog.at_level(logging.WARNING):
        model, _ = afina.load(folder / "model", dtype="fp32", device="cpu")
    assert "additive coupling" in caplog.text
    assert "afina.apply(model, [])" in caplog.text
    battery.differs(said(model), answer)  # the control: alone it says something else
    edit = afina.apply(model, [])
    assert torch.equal(said(model), answer)
    edit.undo()
    restore(model)
    restore(model)
    assert torch.equal(said(model), answer)
    # An adapter beside it knows the base that it is trained beside.
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    assert torch.equal(said(model), answer)


def test_going_on_with_a_coupled_model_is_in_the_same_coupling(
    coupled: tuple[Path, Any, torch.Tensor],
) -> None:
    folder, _, answer = coupled
    for value, fits in (
        ([Full()], True),
        ([Full(), Reversible(check="never")], True),
        ([Full(), Reversible(plain=1)], True),
        ([Full(), Reversible(plain=0)], False),
        ([Full(), Reversible(form="bdia")], False),
    ):
        model, _ = afina.load(folder / "model", dtype="fp32", device="cpu")
        if not fits:
            with pytest.raises(TechniqueError, match="trained in additive coupling"):
                afina.apply(model, value)
            continue
        edit = afina.apply(model, value)
        assert torch.equal(said(model), answer)
        assert pass_of(edit).shape.bits is None
    model.config.afina_reversible = {"form": "sideways"}
    with pytest.raises(ModelError, match="does not say how the model's blocks are coupled"):
        afina.apply(model, [Full()])


def test_a_coupled_model_answers_by_the_verbs_and_with_a_cache(
    coupled: tuple[Path, Any, torch.Tensor], tmp_path: Path
) -> None:
    import json

    folder, model, _ = coupled
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"hello"\n"ab"\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    flags = ["--device", "cpu", "--dtype", "fp32", "--plain", "--max-new-tokens", "6"]
    assert cli.main(["generate", str(folder), str(prompts), "-o", str(out), *flags]) == 0
    found = [json.loads(line)["completion"] for line in out.read_text("utf-8").splitlines()]
    tokenizer = byte_tokenizer()
    settings = GenerateSettings(max_new_tokens=6)
    answers = generate.generate(model, tokenizer, ["hello", "ab"], settings)
    assert found == [answer.text for answer in answers]
    # Token by token without a cache.
    ids = list(tokenizer("hello", add_special_tokens=False)["input_ids"])
    for token in answers[0].tokens:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        assert int(logits[0, -1].argmax()) == token
        ids.append(token)


def test_undoing_takes_the_mark_from_the_config() -> None:
    model = tiny_llama(num_hidden_layers=4)
    edit = apply(model, [Full(), Reversible(form="additive")])
    assert model.config.afina_reversible["form"] == "additive"
    edit.undo()
    assert not hasattr(model.config, "afina_reversible")
