"""Settings that would do nothing, or ask for what is not there: refused before a run begins, by `check` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import afina
from afina.config import TrainSettings
from afina.errors import AfinaError, ConfigError, RunError
from afina.reports.check import check
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.token_pruning import TokenPruning
from afina.train import fit
from afina.train.fit import refuse_idle_settings
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train.kit import ragged_rows, run, same, weights


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "train.betas would do nothing: SGD has no"),
        ({"optimizer": "Muon", "betas": (0.8, 0.9)}, "train.betas would do nothing"),
        ({"optimizer": "adafactor", "eps": 1e-6}, "train.eps would do nothing"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "train.weight_decay would do nothing"),
        ({"optimizer": "adamww"}, "no such optimiser"),
    ],
)
def test_an_optimiser_that_is_not_there_or_an_option_that_it_lacks_is_refused(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        refuse_idle_settings(TrainSettings(**given), validates=False)
    assert "adamw" in str(caught.value).lower()


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "sgd", "weight_decay": 0.1},
        {"optimizer": "AdamW", "betas": (0.8, 0.9), "eps": 1e-6},
        {"optimizer": "sgd", "betas": (0.9, 0.999)},  # as a written config.yaml has it
    ],
)
def test_options_that_it_has_or_that_nobody_changed_pass(given: dict[str, Any]) -> None:
    refuse_idle_settings(TrainSettings(**given), validates=False)


def test_a_package_that_is_not_there_is_missed_before_a_run_that_is_there_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path / "run", data=ragged_rows(4), steps=1)
    kept = weights(first)
    monkeypatch.setattr(fit, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the tensorboard package"):
        run(tmp_path / "run", steps=1, tensorboard=True, options={"overwrite": True})
    assert same(kept, weights(first))


def test_a_score_that_is_not_measured_is_refused_with_what_would_measure_it() -> None:
    for best, cure in (("accuracy", "eval.choices"), ("exact_match", "eval.generate")):
        settings = TrainSettings(best=best)
        with pytest.raises(ConfigError, match=f"train.best is {best}") as caught:
            refuse_idle_settings(settings, True, ("loss", "perplexity"))
        assert cure in str(caught.value.cure)
        refuse_idle_settings(settings, True, ("loss", best))
        refuse_idle_settings(settings, True, None)  # not known beforehand


def test_a_run_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.betas"):
        run(tmp_path / "run", data=ragged_rows(4), steps=1, optimizer="sgd", betas=(0.5, 0.9))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": None}, "this is no model"),
        ({"model": "tiny"}, "this is no model"),
        ({"tokenizer": "tiny"}, "a model and its tokenizer are needed"),
        ({"edit": None}, "there is no edit"),
        ({"edit": LoRA(rank=2)}, "there is no edit"),
        ({"out": None}, "the run's folder needs a name"),
        ({"out": 3}, "the run's folder needs a name"),
        ({"settings": {"steps": 1}}, "these are no TrainSettings"),
        ({"options": {"resume": True}}, "these are no RunOptions"),
        ({"options": False}, "these are no RunOptions"),
        ({"options": RunOptions(data_settings={"packing": False})}, "these are no DataSettings"),  # type: ignore[arg-type]
        ({"options": RunOptions(evaluate="loss")}, r"the option evaluate is to be called"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_what_its_place_asks_for_is_told_as_that(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    """From Python, where nothing reads the arguments before; a check, which may do without a folder, asks the same."""
    model = tiny_llama()
    edit = apply(model, [LoRA(rank=2)])
    right: dict[str, Any] = {
        "model": model,
        "tokenizer": byte_tokenizer(),
        "data": ragged_rows(4),
        "edit": edit,
        "out": tmp_path / "run",
        "options": RunOptions(reporter=Silent()),
    }
    for verb in (train, check)[: 1 if given == {"out": None} else 2]:
        with pytest.raises(AfinaError, match=named) as caught:
            verb(**{**right, **given})
        assert caught.value.got is not None
        assert caught.value.wanted is not None
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_may_be_named_by_its_step(tmp_path: Path) -> None:
    first = run(tmp_path / "run", steps=2, save_every=1)
    again = run(tmp_path / "run", steps=2, save_every=1, options={"resume_from": 1})
    assert same(weights(first), weights(again))


def test_a_type_or_device_is_chosen_when_the_model_is_loaded_and_not_here(tmp_path: Path) -> None:
    """Half-precision weights under an fp32 adapter are not fp32; what agrees with the model passes."""
    for given, named in (({"dtype": "fp32"}, "bf16"), ({"device": "cuda"}, "cpu")):
        with pytest.raises(ConfigError, match="would do nothing: the model is loaded") as caught:
            run(tmp_path / "run", model=tiny_llama(dtype=torch.bfloat16), steps=1, **given)
        assert named in str(caught.value.got)
        assert "afina.load(" in str(caught.value.cure)
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "run", steps=1, dtype="fp64", device="cpu").steps == 1


def test_what_a_run_is_made_from_is_not_in_its_folder_from_python_either(tmp_path: Path) -> None:
    first = run(tmp_path / "run", Full(), model=tiny_llama(dtype=torch.float32), steps=1)
    model, tokenizer = afina.load(first.weights)
    edit = apply(model, [LoRA(rank=2)])
    rows = first.folder / "nan/rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    again = {"edit": edit, "out": first.folder, "options": RunOptions(overwrite=True)}
    for given, named in (
        ({"model": model, "tokenizer": tokenizer, "data": ragged_rows(4)}, "the tokenizer lies in"),
        ({"model": model, "tokenizer": None, "data": ragged_rows(4)}, "the loaded model lies in"),
        (
            {"model": model, "tokenizer": byte_tokenizer(), "data": rows},
            "the training data lies in",
        ),
    ):
        with pytest.raises(RunError, match=named):
            train(**given, **again)
    assert (first.weights / "model.safetensors").exists()


def test_what_trains_beside_a_model_that_is_saved_as_itself_is_refused_instead_of_lost() -> None:
    model: Any = BertForSequenceClassification(
        BertConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_labels=3,
            num_attention_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    edit = apply(model, [Full(), TokenPruning(score="learned")])
    with pytest.raises(RunError) as caught:
        fit.refuse_unfit(model, edit)
    assert "no place for what trains beside it" in str(caught.value)
    assert "token_pruning.threshold" in str(caught.value)
    edit.undo()
    # The control: LoRA's folder has a place for the thresholds, and a model alone loses nothing.
    for techniques in ([LoRA(rank=2), TokenPruning(score="learned")], [Full()]):
        edit = apply(model, techniques)
        fit.refuse_unfit(model, edit)
        edit.undo()
