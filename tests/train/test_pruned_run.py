"""Runs of decoders whose tokens are pruned: cut anyhow, resumed, saved as what was trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from afina.adapters import files
from afina.adapters.contents import parts_of
from afina.data.settings import DataSettings
from afina.errors import RunError
from afina.models.forward import packing
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.pruned_blocks import PrunedBlock
from afina.techniques.pruned_pass import Entry
from afina.techniques.pruned_scores import ByThreshold
from afina.techniques.quantize import Quantize
from afina.techniques.token_pruning import TokenPruning
from afina.train.loop import loop
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.result import Run
from afina.train.run import train
from afina.tree import Edit, Seams
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train.kit import Stop, ragged_rows, same, stop_after, weights, work_of

SCORES = pytest.mark.parametrize("score", ["random", "predictor", "loss"])
SETTINGS: dict[str, Any] = {"rows_per_step": 4, "micro_rows": 2, "lr": 1e-2}


def edited(*others: Any, layers: int = 4, **settings: Any) -> Edit:
    """A tiny Llama whose two middle blocks are pruned, beside LoRA or others."""
    model = tiny_llama(num_hidden_layers=layers)
    return apply(model, [*(others or (LoRA(rank=2),)), TokenPruning(**settings)], seed=1)


def run(out: Path, edit: Edit, *, options: dict[str, Any] | None = None, **settings: Any) -> Run:
    mine = {"reporter": Silent(), "base": "tiny", "data_settings": DataSettings()}
    chosen = RunOptions(**{**mine, **(options or {})})
    return train(
        edit.model,
        byte_tokenizer(),
        ragged_rows(10),
        edit,
        out,
        options=chosen,
        **SETTINGS | settings,
    )


# --- steps -----------------------------------------------------------------------------------------------------------


def steps(edit: Edit, rows_each: int, *, packed: bool = True) -> dict[str, Tensor]:
    """Four steps of eight rows: what trains, and what the children hold, afterwards."""
    rows = ragged_rows(8, seed=4)
    edit.model.train()
    work = work_of(edit, rows_each=rows_each, packed=packed, seams=edit.seams(4))
    with packing(edit.model, packed):
        for _ in loop(work, iter([rows] * 4)):
            pass
    return {n: t.detach().clone() for n, t in {**edit.trainable(), **edit.state()}.items()}


@SCORES
@pytest.mark.parametrize("dropped", ["restore", "cut"])
def test_how_a_step_is_cut_changes_nothing(score: str, dropped: str) -> None:
    whole = steps(edited(score=score, dropped=dropped), 8)
    for rows_each, packed in ((1, True), (4, True), (4, False)):
        parts = steps(edited(score=score, dropped=dropped), rows_each, packed=packed)
        assert parts.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-7)
    moved = edited(score=score, dropped=dropped)
    thresholds = [n for n in whole if n.endswith("threshold")]
    assert all(torch.isfinite(whole[n]) for n in thresholds)
    assert all(torch.isinf(moved.state()[n]) for n in thresholds)


# --- going on --------------------------------------------------------------------------------------------------------


@SCORES
@pytest.mark.parametrize("dropped", ["restore", "cut"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    score: str, dropped: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"score": score, "dropped": dropped, "ramp": 0.5}
    whole = edited(**settings)
    one = run(tmp_path / "whole", whole, steps=6, save_every=2)
    with pytest.raises(Stop):
        run(
            tmp_path / "cut",
            edited(**settings),
            steps=6,
            save_every=2,
            options={"seams": stop_after(3)},
        )
    rest = edited(**settings)
    two = run(tmp_path / "cut", rest, steps=6, save_every=2, options={"resume": True})
    assert same(weights(one), weights(two))
    values = {**rest.trainable(), **rest.state()}
    for name, value in {**whole.trainable(), **whole.state()}.items():
        assert torch.equal(value, values[name]), name


def test_a_checkpoint_without_the_predictor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path / "run", edited(), steps=6, save_every=2, options={"seams": stop_after(3)})
    held = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "techniques.safetensors")
    assert {n.rpartition(".")[2] for n in held} == {"down", "down_bias", "up", "threshold"}
    again = {"resume": True, "allow_changes": True}
    with pytest.raises(RunError):
        run(tmp_path / "run", edited(predictor_width=4), steps=6, save_every=2, options=again)


# --- what is left ----------------------------------------------------------------------------------------------------


@SCORES
def test_what_is_saved_is_the_adapter_alone(score: str, tmp_path: Path) -> None:
    edit = edited(score=score)
    done = run(tmp_path / "run", edit, steps=3)
    config = json.loads((done.weights / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert not any("token_pruning" in name for name in weights(done))
    assert [part.technique.key for part in parts_of(edit)] == ["lora"]
    # It loads as a plain LoRA, and answers as the trained model does.
    other = tiny_llama(num_hidden_layers=4)
    loaded = files.load(other, done.weights)
    assert [t.key for t in loaded.techniques] == ["lora"]
    ids = torch.arange(9)[None]
    assert torch.equal(other(ids).logits, edit.model.eval()(ids).logits)
    assert "token_pruning" in (tmp_path / "run" / "config.yaml").read_text()


def test_it_is_merged_as_if_nothing_had_been_pruned(tmp_path: Path) -> None:
    edit = edited()
    run(tmp_path / "run", edit, steps=3)
    ids = torch.arange(9)[None]
    answer = edit.model.eval()(ids).logits.detach()
    edit.merge()
    torch.testing.assert_close(edit.model(ids).logits, answer, rtol=0, atol=1e-5)
    edit.unmerge()
    edit.undo()
    assert not any("token_pruning" in name for name, _ in edit.model.named_modules())


def test_a_model_that_is_trained_whole_is_saved_without_the_predictor(tmp_path: Path) -> None:
    edit = edited(Full())
    done = run(tmp_path / "run", edit, steps=2)
    saved = {n for file in done.weights.glob("*.safetensors") for n in load_file(file)}
    assert saved
    assert not any("token_pruning" in name for name in saved)


@pytest.mark.parametrize("score", ["random", "predictor"])
def test_alone_it_trains_nothing_and_is_refused(score: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing would train") as caught:
        run(tmp_path / "run", edited(Quantize(block=8), score=score), steps=2)
    assert "--technique lora" in str(caught.value)
    assert not (tmp_path / "run").exists()


# --- while it runs ---------------------------------------------------------------------------------------------------


def test_rows_that_begin_alike_are_computed_apart(tmp_path: Path) -> None:
    said: list[str] = []

    class Heard(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    run(tmp_path / "run", edited(score="random"), steps=1, options={"reporter": Heard()})
    assert any("computed apart" in line for line in said)
    assert any("run on 50% of a row's tokens in training" in line for line in said)


def test_validation_and_trial_passes_teach_nothing(tmp_path: Path) -> None:
    """Only the micro-batches of steps move thresholds: as many scores as these have tokens that may be dropped."""
    edit = edited(score="predictor")
    seen: list[int] = []
    by = [d.by for d in edit.deltas.values() if isinstance(d, PrunedBlock)]
    entry = next(d for d in edit.deltas.values() if isinstance(d, Entry))

    def count(step: int) -> None:
        assert entry.told is None
        seen.append(sum(isinstance(one, ByThreshold) and bool(one.seen) for one in by))

    run(
        tmp_path / "run",
        edit,
        steps=3,
        micro_rows="auto",
        options={"seams": Seams(after_step=(count,))},
    )
    assert seen == [0, 0, 0]  # what a step taught was taken in, and nothing is left over
    assert all(isinstance(one, ByThreshold) and not one.seen for one in by)


def test_the_loss_falls(tmp_path: Path) -> None:
    for score in ("random", "predictor", "loss"):
        edit = edited(score=score)
        done = run(tmp_path / score, edit, steps=30, lr=3e-2)
        lines = [
            json.loads(x) for x in (tmp_path / score / "metrics.jsonl").read_text().splitlines()
        ]
        assert done.steps == 30
        assert sum(x["loss"] for x in lines[-5:]) < 0.8 * sum(x["loss"] for x in lines[:5])


def test_the_predictor_is_no_part_of_the_norm_that_is_clipped(tmp_path: Path) -> None:
    def norms(name: str) -> list[float]:
        edit = edited(keep=1.0, score=name)
        run(tmp_path / name, edit, steps=3)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["gradient_norm"] for line in lines]

    assert norms("predictor") == pytest.approx(norms("random"), rel=1e-3)
