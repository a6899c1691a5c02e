"""`afina check`: what it says, how it exits, and that it takes the command line of `afina train`."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from afina.cli import main
from afina.cli.check import command
from afina.cli.train import command as train_command
from tests.reports.kit import POINTS, STOPS, asked
from tests.tiny import byte_tokenizer, save_run, tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_llama(dtype=torch.float32, initializer_range=0.05)
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data, and a model as `tiny`."""
    (tmp_path / "tiny").symlink_to(tiny)
    jsonl(tmp_path / "rows.jsonl", asked(24))
    jsonl(tmp_path / "val.jsonl", asked(4, first=50))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOUND = ("check", "tiny", "rows.jsonl", "--val", "val.jsonl", "-o", "run", "--rank", "4")


def statuses(path: Path) -> dict[str, str]:
    found = json.loads(path.read_text(encoding="utf-8"))["findings"]
    return {finding["name"]: finding["status"] for finding in found}


def test_a_sound_run_exits_with_0_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in place.iterdir())
    assert main([*SOUND, "--strict"]) == 0
    said = capsys.readouterr().out
    lines = {
        line[9:].split("  ")[0]: line.split()[0] for line in said.splitlines() if line[0] != " "
    }
    assert {name: lines[name] for name in POINTS} == dict.fromkeys(POINTS, "ok")
    assert f"{len(POINTS)} ok" in said
    assert "every trained turn (24) ends with <|im_end|>, and generation stops on it" in said
    assert sorted(path.name for path in place.iterdir()) == before


def test_warnings_fail_under_strict_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(place / "rows.jsonl", [*asked(24), asked(1)[0]])
    assert main([*SOUND, "--quick"]) == 0
    said = capsys.readouterr().out
    assert "warning  duplicates" in said
    assert "rows.jsonl:25 is rows.jsonl:1" in said
    assert "1 warning, 17 ok, 4 skipped" in said
    assert main([*SOUND, "--quick", "--strict"]) == 1
    assert "--strict" in capsys.readouterr().err


def test_notes_are_clean(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tiny", "rows.jsonl", "--quick", "--strict"]) == 0
    said = capsys.readouterr().out
    assert "note     validation" in said
    assert "skipped  folder" in said


def test_unreadable_data_is_a_finding_and_the_rest_is_looked_at(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"\n')
    assert main([*SOUND, "--json", "out.json"]) == 2
    said = capsys.readouterr().out
    assert "error    format" in said
    assert "rows.jsonl:2" in said
    found = statuses(place / "out.json")
    assert [found[name] for name in ("model", "technique", "folder")] == ["ok"] * 3
    assert [found[name] for name in ("rows", "stop token", "packing")] == ["skipped"] * 3


def test_without_a_model_the_format_is_recognised_all_the_same(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "no/such/model", "rows.jsonl", "--json", "out.json"]) == 2
    said = capsys.readouterr().out
    assert "prompt_completion: all 24 rows have prompt and completion" in said
    found = statuses(place / "out.json")
    assert (found["model"], found["format"], found["technique"]) == ("error", "ok", "skipped")
    assert main(["check", "no/such/model", "none.jsonl", "--json", "out.json", "--force"]) == 2
    assert statuses(place / "out.json")["format"] == "error"


def test_a_model_that_cannot_train_yet_has_a_cure(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    BertModel(BertConfig(vocab_size=260, num_attention_heads=4, **sizes)).save_pretrained("bert")
    byte_tokenizer().save_pretrained("bert")
    assert main(["check", "bert", "rows.jsonl", "--quick"]) == 2
    said = capsys.readouterr().out
    assert (
        "error    model          only causal language models and classifiers can be trained" in said
    )
    assert "do: choose a decoder with its language-model head" in said


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["train.best=accuracy"],
            "error",
            "train.best is accuracy, which this validation does not",
        ),
        (
            ["train.best=accuracy", "eval.choices=[é7, é14]"],
            "error",
            "the right answer is not among the choices",
        ),
        (["train.best=exact_match"], "ok", "each has an effect"),
        (["train.best=exact_match", "eval.generate=false"], "error", "train.best is exact_match"),
        (["train.best=exact_match", "eval.fields=[a]"], "ok", "each has an effect"),
        (
            ["eval.choices=[a, b]"],
            "note",
            "eval.choices has its when `afina eval` measures the run",
        ),
        (["eval.choices=[a, b]", "eval.fields=[a]"], "note", "eval.choices and eval.fields have "),
        (["data.subset=en"], "error", "data.subset would do nothing"),
    ],
)
def test_settings_of_scores_and_of_data_are_asked_for_their_effect(
    place: Path, words: list[str], status: str, said: str
) -> None:
    sets = [part for word in words for part in ("--set", word)]
    main([*SOUND, "--quick", *sets, "--json", "out.json"])
    findings = json.loads((place / "out.json").read_text(encoding="utf-8"))["findings"]
    finding = next(one for one in findings if one["name"] == "settings")
    assert finding["status"] == status, finding
    assert said in " ".join([finding["seen"], *finding["details"]])


def test_a_device_that_is_not_there_is_a_finding(place: Path) -> None:
    assert main([*SOUND, "--set", "train.device=tpu", "--json", "out.json"]) == 2
    found = statuses(place / "out.json")
    assert (found["model"], found["format"], found["folder"]) == ("error", "ok", "ok")


def test_a_technique_that_does_not_fit_is_a_finding(place: Path) -> None:
    words = ["--set", "techniques.lora.target=[q_prj]", "--json", "out.json"]
    assert main([*SOUND, *words]) == 2
    found = statuses(place / "out.json")
    assert (found["technique"], found["stop token"], found["first step"]) == (
        "error",
        "ok",
        "skipped",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "tiny", "rows.jsonl", "--set", "train.learning_rat=1"], "train.learning_rat"),
        (["check", "tiny", "rows.jsonl", "--rank", "0"], "rank"),
        (["check", "run.yaml", "-c", "run.yaml"], "given twice"),
        (["check", "none.yaml"], "none.yaml"),
        (["check", "tiny", "rows.jsonl", "--json", "rows.jsonl"], "the output exists"),
        (["check", "tiny", "rows.jsonl", "--print-config"], "check prints no configuration"),
        ([*SOUND, "--resume", "--overwrite"], "--resume goes on with a run as it is"),
        ([*SOUND, "--allow-partial"], "--allow-partial is about an adapter"),
    ],
)
def test_wrong_settings_exit_with_2(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (place / "run.yaml").write_text("model: tiny\ndata: rows.jsonl\n")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_configuration_or_a_run_stands_in_the_place_of_the_model(place: Path, tiny: Path) -> None:
    (place / "run.yaml").write_text(
        "model: tiny\ndata: rows.jsonl\nval: val.jsonl\ntrain: {rows_per_step: 40}\n"
    )
    for number, words in enumerate((["run.yaml"], ["-c", "run.yaml"])):
        out = place / f"{number}.json"
        assert main(["check", *words, "--quick", "--json", str(out)]) == 0
        findings = json.loads(out.read_text())["findings"]
        batch = next(one for one in findings if one["name"] == "batch")
        assert batch["values"]["rows_per_step"] == 24
    # A run's settings, with its own data and model; a flag overrules as in `train`.
    save_run(place / "done", tiny, settings="data: {source: rows.jsonl}\ntrain: {lr: 1.0}\n")
    assert main(["check", "done", "--quick", "--json", "run.json"]) == 0
    assert statuses(place / "run.json")["learning rate"] == "warning"
    assert main(["check", "done", "--quick", "--lr", "5e-4", "--json", "b.json"]) == 0
    assert statuses(place / "b.json")["learning rate"] == "ok"


def test_quick_reads_no_weights_and_says_what_the_whole_check_says(place: Path, tiny: Path) -> None:
    assert main([*SOUND, "--json", "whole.json"]) == 0
    assert main([*SOUND, "--quick", "--json", "quick.json"]) == 0
    whole, quick = (json.loads((place / f"{name}.json").read_text()) for name in ("whole", "quick"))
    for one, other in zip(whole["findings"], quick["findings"], strict=True):
        if other["status"] == "skipped":
            assert other["name"] in ("packing", "start", "first step", "pace")
        elif one["name"] == "disk":  # others write there too
            assert one["values"]["need_bytes"] == other["values"]["need_bytes"]
        elif one["name"] != "model":
            assert one == other


def test_a_model_without_some_of_its_weights_is_told_and_the_data_looked_at(
    place: Path, tiny: Path
) -> None:
    broken = place / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    words = ["check", str(broken), "rows.jsonl", "--val", "rows.jsonl", "--json", "out.json"]
    assert main(words) == 2
    found = statuses(place / "out.json")
    assert found["model"] == "error"
    assert [found[n] for n in ("technique", "stop token", "template", "disk")] == ["ok"] * 4
    assert found["overlap"] == "warning"
    assert [found[n] for n in ("packing", "start", "first step")] == ["skipped"] * 3
    # Quick reads no weights, and says so by not looking.
    assert main([*words, "--quick", "--force"]) == 0
    assert statuses(place / "out.json")["model"] == "ok"


def test_the_command_line_of_train_is_taken_whole() -> None:
    """Whatever option `train` gets, `check` has."""
    taken = inspect.signature(command).parameters
    assert set(inspect.signature(train_command).parameters) < set(taken)
    assert {"show", "quick", "strict", "json_file", "force"} < set(taken)


def test_rows_are_shown_with_marks_where_there_is_no_colour(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SOUND, "--quick", "--show", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("tokens trained\n") == 2
    assert "<|im_start|>user\nsay 1<|im_end|>\n<|im_start|>assistant\n[[é7<|im_end|>]]" in said
    assert "\033[" not in said


def test_where_there_are_no_rows_no_marks_are_explained(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "tiny", "none.jsonl", "--quick", "--show", "2"]) == 2
    said = capsys.readouterr().out
    assert said.endswith("there are no rows to show\n")
    assert "[[" not in said
    assert main([*SOUND, "--quick", "--show", "-1"]) == 2


def test_rows_are_shown_in_colour_in_a_terminal(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([*SOUND, "--quick", "--show", "1"]) == 0
    said = capsys.readouterr().out
    assert "\033[" in said
    assert "[[" not in said


def test_skipped_rows_are_counted_and_listed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (place / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "a"}\n')
    assert main([*SOUND, "--quick", "--strict", "--on-bad-row", "skip"]) == 1
    said = capsys.readouterr().out
    assert "24 of 25 rows kept, for validation 4 of 4\n" in said
    assert "rows.jsonl:25" in said
    assert "do: correct the rows that cannot be used\n" in said
    assert main([*SOUND, "--quick"]) == 2


def test_json_on_the_standard_output_is_alone_there(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SOUND, "--quick", "--json", "-"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [finding["name"] for finding in document["findings"]] == list(POINTS)
    assert (document["exit_code"], document["exit_code_strict"]) == (0, 0)
    assert "stop token" in shown.err


def test_full_fine_tuning_is_checked_too(place: Path) -> None:
    words = [word for word in SOUND if word not in ("--rank", "4")]
    full = ["--technique", "full", "--lr", "5e-5", "--strict", "--json", "out.json"]
    assert main([*words, *full]) == 0
    assert statuses(place / "out.json") == dict.fromkeys(POINTS, "ok")


def test_an_adapter_to_start_from_is_checked_as_it_is(place: Path, tiny: Path) -> None:
    save_run(place / "noise", tiny)
    words = ["check", "tiny", "rows.jsonl", "--init-from", "noise", "--json", "out.json"]
    assert main(words) == 0
    findings = json.loads((place / "out.json").read_text())["findings"]
    start = next(one for one in findings if one["name"] == "start")["values"]
    assert start["loss"] != pytest.approx(start["base_loss"], abs=1e-3)
    # How it fits is worth a note, and no reason to be strict.
    technique = next(one for one in findings if one["name"] == "technique")
    assert (technique["status"], technique["details"][0]) == (
        "note",
        "adapter noise/adapter: applied 28 of 28 tensors",
    )
