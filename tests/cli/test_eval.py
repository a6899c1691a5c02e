"""`afina eval`: the scores shown, as JSON and row by row, of models whose answers are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import afina
from afina import cli
from afina.cli.metrics import parse_metrics
from afina.config import EvalSettings
from afina.errors import ConfigError
from tests.tiny import byte_tokenizer, save_model, save_run, says, tiny_llama

HERE = ["--device", "cpu", "--dtype", "fp32"]
ROWS = [
    {"prompt": "q1", "completion": "yes", "choices": ["yes", "no"]},
    {"prompt": "question 2", "completion": "no", "choices": ["yes", "no"]},
    {"prompt": "q3", "completion": "yes", "choices": ["no", "yes", "maybe"]},
]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def yes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_tokenizer()
    return save_model(tmp_path_factory.mktemp("yes"), says(tokenizer, "yes"), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_llama(), byte_tokenizer())


def test_scores_are_shown_and_written(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    scores, rows = tmp_path / "s" / "scores.json", tmp_path / "rows.jsonl"
    words = ["eval", str(yes), data, "--json", str(scores), "--rows-out", str(rows)]
    assert cli.main([*words, *HERE]) == 0
    shown = capsys.readouterr()
    got = json.loads(scores.read_text(encoding="utf-8"))
    assert got["n"] == 3
    assert got["exact_match"] == got["accuracy"] == pytest.approx(2 / 3)
    error = math.sqrt(2 / 9 / 3)
    assert got["standard_errors"]["exact_match"] == pytest.approx(error)
    assert f"exact_match{'':9}0.6667 ± {error:.4f}  3 rows" in shown.out
    assert "format   prompt_completion" in shown.err
    assert got["trained_tokens"] == 4 + 3 + 4
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))
    table = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["exact_match"] for row in table] == [True, False, True]
    assert [row["reference"] for row in table] == ["yes", "no", "yes"]
    assert table[1]["source"].endswith("d.jsonl:2")
    total = sum(row["loss"] * row["tokens"] for row in table)
    assert got["loss"] == pytest.approx(total / 11)


def test_the_loss_is_the_librarys(model: Path, tmp_path: Path) -> None:
    data, out = jsonl(tmp_path / "d.jsonl", ROWS), tmp_path / "o.json"
    words = ["eval", str(model), data, "--metrics", "loss", "--json", str(out)]
    assert cli.main([*words, *HERE]) == 0
    got = json.loads(out.read_text(encoding="utf-8"))
    loaded, tokenizer = afina.load(model, dtype="fp32", device="cpu")
    expected = afina.evaluate(loaded, tokenizer, data, EvalSettings(generate=False))
    assert got["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert "exact_match" not in got


def test_metrics_choose_what_is_measured_and_shown(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    words = ["eval", str(yes), data, "--metrics", "accuracy,field:intent", *HERE]
    assert cli.main(words) == 3  # what could be measured is shown all the same
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("accuracy  0.6667")
    assert len(lines) == 1
    assert "not measured: field:intent\n" in shown.err
    assert "wanted: field:intent: JSON answers with intent\n" in shown.err


def test_accuracy_needs_choices_and_says_so_before_it_measures(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "yes"}])
    words = ["eval", str(yes), data, "--metrics", "loss,accuracy", *HERE]
    assert cli.main(words) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "a column `choices`" in shown.err
    assert cli.main([*words, "--set", "eval.choices=[yes, no]"]) == 0
    assert "accuracy  1.0000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "train.lr=1"], "--set train.lr changes nothing in an evaluation"),
        (["--set", "techniques.lora.rank=8"], "--set techniques.lora.rank changes nothing"),
        (["--set", "model=other"], "--set model changes nothing"),
        (["--limit", "0"], "--limit: eval.max_rows cannot have this value"),
    ],
)
def test_a_setting_without_effect_or_sense_is_refused(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    assert cli.main(["eval", str(yes), data, *flags, *HERE]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["los", "", "field:", "loss,exact-match"])
def test_unknown_metrics_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not measured"):
        parse_metrics(text)


def test_metrics_are_a_list_without_doubles() -> None:
    assert parse_metrics("loss, field:a.b,loss") == ("loss", "field:a.b")
    assert parse_metrics(None) is None


def test_a_run_beside_its_base(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", model)
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    documents = {}
    for name, flags in {"both": ["--beside-base"], "run": [], "base": []}.items():
        target, out = (model if name == "base" else run), tmp_path / f"{name}.json"
        words = ["eval", str(target), data, "--metrics", "loss", "--json", str(out), *flags]
        assert cli.main([*words, "--rows-out", str(out.with_suffix(".jsonl")), *HERE]) == 0
        documents[name] = json.loads(out.read_text(encoding="utf-8"))
    both = documents["both"]
    assert both["loss"] == documents["run"]["loss"]
    assert both["base_scores"]["loss"] == pytest.approx(documents["base"]["loss"], rel=1e-6)
    difference = both["loss"] - both["base_scores"]["loss"]
    assert difference != 0
    assert both["difference"]["loss"]["value"] == pytest.approx(difference)
    assert both["adapter"] == str(run / "adapter")
    assert "difference" in capsys.readouterr().out.splitlines()[0]
    lines = (tmp_path / "both.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["loss"] != row["base"]["loss"] for row in rows)


def test_a_runs_data_settings_hold_but_not_its_choice_of_rows(model: Path, tmp_path: Path) -> None:
    settings = "data: {source: t.jsonl, columns: {prompt: ask}, max_rows: 1, val_fraction: 0.5}\n"
    run = save_run(tmp_path / "run", model, settings=settings)
    data = jsonl(tmp_path / "d.jsonl", [{"ask": "a", "completion": b} for b in "xyz"])
    words = ["eval", str(run), data, "--metrics", "loss", "--force", *HERE]
    counts = []
    for flags in ([], ["--set", "data.max_rows=2"], ["--limit", "1"]):
        out = tmp_path / "o.json"
        assert cli.main([*words, "--json", str(out), *flags]) == 0
        counts.append(json.loads(out.read_text(encoding="utf-8"))["n"])
    assert counts == [3, 2, 1]


def test_json_on_the_standard_output_is_alone_there(
    yes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    assert cli.main(["eval", str(yes), data, "--json", "-", *HERE]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["exact_match"] == pytest.approx(2 / 3)
    assert "exact_match" in shown.err


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["MODEL", "nowhere.jsonl"], 3),
        (["nowhere/at/all", "DATA"], 4),
        (["MODEL", "DATA", "--set", "eval.batchrows=2"], 2),
        (["MODEL", "DATA", "--beside-base"], 2),
        (["MODEL", "DATA", "--json", "DATA"], 2),
        (["MODEL", "DATA", "--json", "DATA/x.json"], 2),
    ],
)
def test_mistakes_have_their_own_status(
    yes: Path, tmp_path: Path, words: list[str], status: int
) -> None:
    data = jsonl(tmp_path / "d.jsonl", ROWS)
    names = {"MODEL": str(yes), "DATA": data}
    assert (
        cli.main(
            ["eval", *(names.get(word, word.replace("DATA/", f"{data}/")) for word in words), *HERE]
        )
        == status
    )
