"""Verbs that load an adapter say how much of it was applied, and onto what; in part only when they are told to."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import afina
from afina import cli
from afina.adapters.layout import WEIGHTS
from afina.adapters.target import resolve_run
from afina.config import EvalSettings, RunConfig, TrainSettings, as_given
from afina.data.settings import DataSettings
from afina.errors import AdapterError
from afina.train.options import RunOptions
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

HERE = ["--device", "cpu", "--dtype", "fp32"]
LOST = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose adapter lacks a tensor, as the working directory, with rows."""
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    run = save_run(tmp_path / "run", base)
    tensors = load_file(run / "adapter" / WEIGHTS)
    del tensors[LOST]
    save_file(tensors, run / "adapter" / WEIGHTS, metadata={"format": "pt"})
    row = {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    return run


VERBS = {
    "eval": ["eval", "run", "rows.jsonl", "--metrics", "loss", *HERE],
    "chat": ["chat", "run", "--max-new-tokens", "2", *HERE],
    "generate": ["generate", "run", "rows.jsonl", "-o", "-", "--max-new-tokens", "2", *HERE],
    "train": ["train", "base", "rows.jsonl", "-o", "new", "--steps", "1", "--init-from", "run"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_adapter_that_does_not_fit_is_applied_in_part_only_when_asked(
    verb: str, run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.up_proj.lora_A.weight"
    assert cli.main(VERBS[verb]) == AdapterError.exit_code
    said = capsys.readouterr().err
    assert f"{name}: the file lacks it" in said
    assert "--allow-partial" in said
    assert cli.main([*VERBS[verb], "--allow-partial"]) == 0
    captured = capsys.readouterr()
    assert "applied 26 of 27 tensors" in captured.err
    assert f"left out {name}: the file lacks it" in captured.err
    assert "IN PART" in caplog.text
    assert [r.levelno for r in caplog.records if "IN PART" in r.getMessage()] == [logging.WARNING]
    assert "applied" not in captured.out


def test_a_run_that_started_from_a_part_trains_that_part(run: Path) -> None:
    assert cli.main([*VERBS["train"], "--allow-partial"]) == 0
    saved = load_file("new/adapter/" + WEIGHTS)
    assert len(saved) == 26
    text = Path("new/config.yaml").read_text(encoding="utf-8")
    lines = {line.split(":")[0].strip(): line.rpartition("  # ")[2] for line in text.splitlines()}
    assert lines["rank"] == lines["target"] == f"--init-from {Path('run', 'adapter')}"
    assert lines["dropout"] == "default"


def test_an_adapter_for_another_base_is_refused_by_both_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base's folder holds other weights now; every name and shape is as before."""
    save_model(Path("base"), tiny_llama(seed=1), byte_tokenizer())
    assert cli.main(VERBS["generate"]) == AdapterError.exit_code
    said = capsys.readouterr().err
    assert "was made for another base" in said
    assert said.count(str(Path("base").absolute())) >= 2


def test_allow_partial_needs_an_adapter(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "base", "rows.jsonl", "-o", "new", "--allow-partial"]
    assert cli.main(words) == 2
    assert "--init-from" in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_whole_adapter_says_so_beside_the_results(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(Path("whole"), Path("base").absolute())
    words = [w if w != "run" else "whole" for w in VERBS["generate"]]
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    assert f"adapter {Path('whole', 'adapter')}: applied 28 of 28 tensors" in captured.err
    assert "its base is this model, by fingerprint" in captured.err
    assert len(captured.out.splitlines()) == 1


def test_an_adapter_out_of_its_run_knows_the_revision_of_its_base(run: Path) -> None:
    """`config.yaml` has it for the run; the adapter may be copied elsewhere."""
    model, tokenizer = afina.load("base", dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    config = RunConfig(
        model="org/base",
        source="rows.jsonl",
        val=None,
        revision="v2",
        data=DataSettings(),
        techniques=tuple(edit.techniques),
        train=TrainSettings(steps=1),
        eval=EvalSettings(),
    )
    options = RunOptions(base="org/base", config=as_given(config, ["lora"], "Python"))
    afina.train(
        model, tokenizer, "rows.jsonl", edit, "other", settings=config.train, options=options
    )
    found = resolve_run("other/adapter")
    assert (found.base, found.revision) == ("org/base", "v2")
    Path("other/adapter").rename("moved")
    found = resolve_run("moved")
    assert (found.base, found.revision) == ("org/base", "v2")
