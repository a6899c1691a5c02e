"""Verbs that answer with several adapters at once, each as often as it counts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

import afina
from afina import cli
from afina.adapters import files
from afina.cli.several import split, weighted
from afina.errors import AdapterError, ConfigError
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

HERE = ["--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two runs on it, their weighted sum, one of its own head, and rows."""
    folder = tmp_path_factory.mktemp("several")
    base = save_model(folder / "base", tiny_llama(), byte_tokenizer())
    for number, name in enumerate(("one", "two")):
        save_run(folder / name, base, seed=number)
    afina.combine([(folder / "one", 0.7), (folder / "two", -0.3)], folder / "sum")
    for name in ("head", "other_head"):
        model, _ = afina.load(base, dtype="fp32", device="cpu")
        edit = afina.apply(model, [afina.LoRA(rank=2, modules_to_save=("lm_head",))])
        with torch.no_grad():
            edit.in_place["lm_head.weight"].mul_(1.5)
        files.save(edit, folder / name, base=str(base))
    turns = [{"role": r, "content": c} for r, c in (("user", "hello"), ("assistant", "good"))]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))


def loss(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    """What `afina eval` measures."""
    line = ["eval", *words, "--metrics", "loss", "--json", "-", *HERE]
    assert cli.main([line[0], line[1], "rows.jsonl", *line[2:]]) == 0
    return float(json.loads(capsys.readouterr().out)["loss"])


def test_two_that_act_are_their_weighted_sum(capsys: pytest.CaptureFixture[str]) -> None:
    together = loss(capsys, "one:0.7", "--adapter", "two:-0.3")
    assert together == pytest.approx(loss(capsys, "sum"), rel=1e-5)
    alone = {loss(capsys, *words) for words in (("one",), ("two",), ("one:0.7",), ("base",))}
    assert all(abs(together - other) > 1e-3 for other in alone)
    assert len(alone) == 4
    # A model alone takes the adapters as they are named.
    named = loss(capsys, "base", "--adapter", "one:0.7", "--adapter", "two:-0.3")
    assert named == pytest.approx(together, rel=1e-6)
    assert loss(capsys, "one:0", "--adapter", "two:0") == loss(capsys, "base")


def test_the_base_beside_them_is_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "one", "rows.jsonl", "--adapter", "two", "--beside-base", "--metrics", "loss"]
    assert cli.main([*words, "--json", "-", *HERE]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["base_scores"]["loss"] == loss(capsys, "base")
    assert told["further"] == ["two"]


def test_answers_are_theirs_together(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[str] = []
    for words in (["one:0.7", "--adapter", "two:-0.3"], ["sum"], ["one"]):
        line = ["generate", words[0], "rows.jsonl", *words[1:], "-o", "-", "--max-new-tokens", "8"]
        assert cli.main([*line, *HERE]) == 0
        captured = capsys.readouterr()
        answers.append(json.loads(captured.out)["completion"])
        if len(words) == 3:
            assert "counts 0.7 times" in captured.err
            assert "counts -0.3 times" in captured.err
    assert answers[0] == answers[1] != answers[2]
    assert (
        cli.main(["chat", "one:0.7", "--adapter", "two:-0.3", "--max-new-tokens", "8", *HERE]) == 0
    )
    assert answers[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["base:0.5"], "this is a model, without an adapter"),
        (["on:0.5"], "did you mean one"),
        (["one", "--adapter", "twq"], "did you mean two"),
        (["one", "--adapter", "two:half"], "the weight of an adapter is no number"),
        (["one", "--adapter", "two:nan"], "counts a number of times"),
        (
            ["head", "--adapter", "other_head"],
            "tensor whole that an adapter which is there has too",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", words[0], "rows.jsonl", *words[1:], "--metrics", "loss", *HERE]
    assert cli.main(line) in (ConfigError.exit_code, AdapterError.exit_code)
    assert says in capsys.readouterr().err


def test_names_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:2").mkdir()
    assert split("runs/a:0.5") == ("runs/a", 0.5)
    assert split("a:2") == ("a:2", None)  # there is a place of the whole name
    assert split("C:/runs/a") == ("C:/runs/a", None)
    assert weighted("a:-1e-1") == ("a", -0.1)
    assert weighted("a") == ("a", 1.0)
