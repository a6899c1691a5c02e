"""`afina merge`: what it prints, its exit status, and the model it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import afina
from afina import cli
from afina.adapters import merge_job, merge_plan
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

HERE = ["--device", "cpu", "--max-new-tokens", "2"]
ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_llama(initializer_range=0.2)
    return save_model(tmp_path_factory.mktemp("model"), made, byte_tokenizer())


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_a_run_becomes_a_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "train.jsonl")
    run = save_run(tmp_path / "run", model, settings=f"data: {{source: {data}}}\n")
    out = tmp_path / "out"
    assert cli.main(["merge", str(run), "-o", str(out), *HERE]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"adapter {run}/adapter: applied 28 of 28 tensors\n")
    assert "its base is this model, by fingerprint\n" in said
    assert "14 weights folded in fp32 and rounded once to F32\n" in said
    assert "compared on 8 training rows of the run" in said
    assert said.endswith(f"verified: {out}\n")
    for row in ("base -> base + adapter", "base + adapter -> merged", "base -> merged"):
        assert row in said
    merged, tokenizer = afina.load(out, device="cpu")
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert tokenizer.chat_template == byte_tokenizer().chat_template


def test_validation_rows_come_first(model: Path, tmp_path: Path) -> None:
    data, val = write_rows(tmp_path / "train.jsonl"), write_rows(tmp_path / "val.jsonl")
    settings = f"data: {{source: {data}}}\nval: {val}\n"
    run = save_run(tmp_path / "run", model, settings=settings)
    record = tmp_path / "record.json"
    words = ["merge", str(run), "-o", str(tmp_path / "out"), "--json", str(record), *HERE]
    assert cli.main(words) == 0
    told = json.loads(record.read_text())
    assert told["check"]["texts"] == "8 validation rows of the run"
    assert told["verified"] is True
    assert told == json.loads((tmp_path / "out/merge.json").read_text())


def test_held_out_rows_are_the_runs(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.jsonl")
    settings = f"data: {{source: {data}, val_fraction: 0.3}}\n"
    run = save_run(tmp_path / "run", model, settings=settings)
    assert cli.main(["merge", str(run), "-o", str(tmp_path / "out"), *HERE]) == 0
    told = json.loads((tmp_path / "out/merge.json").read_text())
    number, _, rest = told["check"]["texts"].partition(" ")
    assert rest == "validation rows of the run"
    assert 1 <= int(number) <= 8


def test_prompts_of_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n", encoding="utf-8")
    words = ["merge", str(run / "adapter"), "-o", str(tmp_path / "out"), "--prompts", str(prompts)]
    assert cli.main([*words, *HERE]) == 0
    assert "compared on 3 given prompts" in capsys.readouterr().out


def test_a_failed_check_has_its_exit_status(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merge_plan, "fold", lambda weight, change, **_: (weight, 0.0))
    run, out = save_run(tmp_path / "run", model), tmp_path / "out"
    assert cli.main(["merge", str(run), "-o", str(out), *HERE]) == 6
    shown = capsys.readouterr()
    assert "PROBLEM: it equals the base: the adapter is lost" in shown.out
    assert shown.out.endswith(f"NOT VERIFIED: {out}\n")
    assert "Traceback" not in shown.err
    assert (out / "UNVERIFIED.md").is_file()


def test_json_alone_on_the_standard_output(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run", model)
    words = ["merge", str(run), "-o", str(tmp_path / "out"), "--no-verify", "--json", "-"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verified"] is None
    assert "written, and not verified, as asked" in shown.err


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--dtype", "int4"], 2, "not merged into few bits"),
        (["--dtype", "fp23"], 2, "unknown dtype"),
        (["--tolerance", "-1"], 2, "tolerance"),
        (["--base", "nowhere/at.gguf"], 4, "no such file"),
        (["--prompts", "nowhere.txt"], 3, "nowhere.txt"),
    ],
)
def test_wrong_usage_writes_nothing(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    says: str,
) -> None:
    run = save_run(tmp_path / "run", model)
    out = tmp_path / "out"
    assert cli.main(["merge", str(run), "-o", str(out), *flags]) == status
    assert says in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_an_output_in_use(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("dear")
    assert cli.main(["merge", str(run), "-o", str(tmp_path / "out"), "--overwrite"]) == 2
    assert "it is not a merged model" in capsys.readouterr().err
    assert (tmp_path / "out/letter.txt").read_text() == "dear"


def test_the_record_goes_over_nothing_unasked_and_not_into_the_output(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, mine = save_run(tmp_path / "run", model), tmp_path / "out", tmp_path / "mine.json"
    mine.write_text("dear")
    words = ["merge", str(run), "-o", str(out), "--no-verify", "--json"]
    assert cli.main([*words, str(mine)]) == 2
    assert "say --overwrite to replace it" in capsys.readouterr().err
    for inside in (out, out / "scores.json"):
        assert cli.main([*words, str(inside)]) == 2
        assert "--json names a place in the output" in capsys.readouterr().err
    for read in (run / "config.yaml", model / "config.json"):
        assert cli.main([*words, str(read), "--overwrite"]) == 2
        assert "something that is read" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main([*words, str(mine), "--overwrite"]) == 0
    assert json.loads(mine.read_text())["verified"] is None


def test_an_interrupt_is_said_and_leaves_nothing(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = save_run(tmp_path / "run", model)
    capsys.readouterr()
    monkeypatch.setattr(merge_job, "look", interrupted)
    assert cli.main(["merge", str(run), "-o", str(tmp_path / "out"), *HERE]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
