"""`afina train` from the command line to a run folder, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from afina.cli import main
from afina.train.metrics import read_metrics
from tests.tiny import byte_tokenizer, tiny_llama


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and data, as the working directory."""
    model = tiny_llama(dtype=torch.float32, initializer_range=0.05)
    model.save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMON = ("train", "tiny", "rows.jsonl", "-o", "run", "--set", "train.micro_rows=4")


def test_a_run_leaves_its_folder_and_says_what_to_type_next(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMON, "--steps", "3", "--rows-per-step", "4", "--rank", "2", "--val", "rows.jsonl"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "rows     12 of 12 kept" in said
    assert "next: afina chat run" in said
    assert "validation loss" in said
    assert "step 3: val loss" in said
    assert [line["step"] for line in read_metrics(place / "run")] == [1, 2, 3]
    text = (place / "run" / "config.yaml").read_text()
    assert "rank: 2" in text
    assert "# --rank" in text
    saved = json.loads((place / "run/adapter/adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["r"]) == (
        str(place / "tiny"),
        2,
    )


def test_the_written_configuration_makes_the_same_run_again(place: Path) -> None:
    assert main([*COMMON, "--steps", "2"]) == 0
    assert main(["train", "-c", "run/config.yaml", "-o", "again"]) == 0
    losses = [[x["loss"] for x in read_metrics(place / name)] for name in ("run", "again")]
    assert losses[0] == losses[1]


def test_resume_and_init_from_and_overwrite(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, "--steps", "2"]) == 0
    assert main([*COMMON, "--steps", "2"]) == 7
    assert "in use" in capsys.readouterr().err
    assert main(["train", "--resume", "-o", "run"]) == 0
    assert len(read_metrics(place / "run")) == 2
    assert main([*COMMON, "--steps", "1", "--overwrite"]) == 0
    assert len(read_metrics(place / "run")) == 1
    # Starting from an adapter is a new run whose first loss is the adapter's, not the base's.
    trained = ["train", "tiny", "rows.jsonl", "--steps", "20", "--lr", "1e-2"]
    assert main([*trained, "-o", "long"]) == 0
    assert main([*trained, "-o", "more", "--init-from", "long", "--steps", "1"]) == 0
    base, more = (read_metrics(place / name)[0]["loss"] for name in ("long", "more"))
    assert more < base - 0.1
    assert "--init-from" in (place / "more/config.yaml").read_text()
    # The adapter's own rank and scale go with its weights; others are refused.
    other = ["-o", "other", "--init-from", "long", "--rank", "4"]
    assert main([*trained, *other]) == 2
    assert main(["train", "--resume", "--overwrite", "-o", "run"]) == 2


def test_full_fine_tuning_is_a_technique_like_others(place: Path) -> None:
    assert main([*COMMON, "--steps", "1", "--technique", "full", "--lr", "1e-4"]) == 0
    assert (place / "run/model/model.safetensors").exists()
    assert not (place / "run/adapter").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["train", "tiny", "rows.jsonl"], 2, "no folder for the run"),
        (["train", "tiny", "none.jsonl", "-o", "run"], 3, "none.jsonl"),
        (["train", "nowhere", "rows.jsonl", "-o", "run"], 4, "nowhere"),
        ([*COMMON, "--set", "train.learning_rat=1"], 2, "train.learning_rat"),
        ([*COMMON, "--set", "techniques.lora.target=[q_prj]"], 5, "q_proj"),
        ([*COMMON, "--technique", "full", "--technique", "lora"], 5, "cannot be combined"),
        (["train", "--resume", "-o", "run"], 2, "config.yaml"),
    ],
)
def test_what_cannot_be_is_refused_with_its_status_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    assert main(words) == status
    assert said in capsys.readouterr().err
    assert not (place / "run").exists()


def test_print_config_shows_every_setting_with_its_origin_and_runs_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, "--lr", "3e-4", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.0003" in shown
    assert "# --lr" in shown
    assert not (place / "run").exists()


def test_the_best_answers_choose_the_weights(place: Path) -> None:
    """`train.best` with generation and packing, as the defaults are."""
    words = [*COMMON, "--steps", "2", "--val", "rows.jsonl", "--set", "train.eval_every=1"]
    best = ["--set", "train.best=exact_match", "--set", "eval.answers.max_new_tokens=2"]
    assert main([*words, *best]) == 0
    assert all("val_exact_match" in line for line in read_metrics(place / "run"))


def test_held_out_rows_are_accounted_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--steps", "1", "--set", "data.val_fraction=0.4"]) == 0
    account = json.loads((place / "run/data.json").read_text())["rows"]
    assert account["train"] + account["validation"] == 12
    said = f"{account['validation']} rows; {account['train']} train"
    assert said in capsys.readouterr().err
    twice = ["--val", "rows.jsonl", "--set", "data.val_fraction=0.4", "--overwrite"]
    assert main([*COMMON, *twice]) == 2
