"""`afina train` from the command line to a run folder, and how it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
    # What is of the run and of no adapter goes beside it.
    easy = ["--technique", "curriculum", "--set", "techniques.curriculum.start=0.5"]
    assert main([*trained, "-o", "easy", "--init-from", "long", *easy, "--steps", "1"]) == 0
    assert "curriculum:" in (place / "easy/config.yaml").read_text()
    assert (place / "easy/curriculum.jsonl").exists()
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
        (["train", "--resume", "-o", "run"], 7, "there is no run to resume"),
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
    said = f"{account['validation']} rows; {account['train']} to train on"
    assert said in capsys.readouterr().err
    twice = ["--val", "rows.jsonl", "--set", "data.val_fraction=0.4", "--overwrite"]
    assert main([*COMMON, *twice]) == 2


def test_a_run_goes_on_with_more_steps_when_changes_are_allowed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, "--steps", "2", "--rank", "2"]) == 0
    before = (place / "run/config.yaml").read_text().splitlines()
    capsys.readouterr()
    assert main(["train", "--resume", "-o", "run"]) == 0
    assert "this run is finished (2 steps), and nothing was changed" in capsys.readouterr().err
    assert main(["train", "--resume", "-o", "run", "--steps", "3"]) == 7
    said = capsys.readouterr().err
    assert "train.steps: 2 then, 3 now" in said
    assert "--allow-changes" in said
    assert main(["train", "--resume", "--allow-changes", "-o", "run", "--steps", "3"]) == 0
    assert [line["step"] for line in read_metrics(place / "run")] == [1, 2, 3]
    text = (place / "run/config.yaml").read_text()
    assert text.startswith("# step 2: resumed with train.steps: 2 then, 3 now\n")
    # The configuration is now the longer run's; every other value is where it was, from where it was.
    lines = text.splitlines()[1:]
    differing = [(a, b) for a, b in zip(before, lines, strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0][1].split() == ["steps:", "3", "#", "--steps"]
    assert main(["train", "--resume", "-o", "run"]) == 0
    assert main([*COMMON, "--steps", "2", "--allow-changes"]) == 2


def test_a_mistyped_run_names_the_one_that_is_there(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON[:3], "-o", "runs/calls-001", "--steps", "1"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "-o", "runs/call-001"]) == 7
    assert "did you mean runs/calls-001?" in capsys.readouterr().err
    assert not (place / "runs/call-001").exists()


def test_a_parent_folder_names_the_runs_in_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "runs/calls-001").mkdir(parents=True)
    (place / "runs/calls-001/config.yaml").write_text("model: tiny\n")
    (place / "ruins").mkdir()
    (place / "ruins/config.yaml").write_text("model: tiny\n")
    assert main(["train", "--resume", "-o", "runs"]) == 7
    assert "cure:   name a run in it: runs/calls-001\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run/tiny", "rows.jsonl"], "the model"),
        (["tiny", "run/rows.jsonl"], "the training data"),
        (["tiny", "rows.jsonl", "--val", "run/rows.jsonl"], "the validation data"),
        (["tiny", "rows.jsonl", "--init-from", "run"], "the adapter to start from"),
        (["tiny", "rows.jsonl", "-c", "run/run.yaml"], "the configuration"),
    ],
)
def test_a_run_does_not_take_the_place_of_what_it_is_made_from(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    """In folders that a run writes, which hold what somebody copied there."""
    run = place / "run"
    run.mkdir()
    shutil.copytree(place / "tiny", run / "nan")
    (run / "model").mkdir()
    (run / "model/rows.jsonl").write_bytes((place / "rows.jsonl").read_bytes())
    (run / "config.yaml").write_text("model: tiny\n")
    (run / "data.json").write_text('{"sources": []}')
    (run / "model/run.yaml").write_text("model: tiny\n")
    inside = {"run/tiny": "run/nan"} | {
        f"run/{n}": f"run/model/{n}" for n in ("rows.jsonl", "run.yaml")
    }
    before = sorted(path for path in run.rglob("*"))
    assert main(["train", *(inside.get(w, w) for w in words), "-o", "run", "--overwrite"]) == 7
    assert f"{named} lies in the folder of the run" in capsys.readouterr().err
    assert sorted(path for path in run.rglob("*")) == before


def test_a_score_that_the_rows_cannot_give_is_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMON, "--steps", "1", "--val", "rows.jsonl", "--set", "train.best=accuracy"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "train.best is accuracy, which this validation does not measure" in said
    assert "eval.choices" in said
    assert not (place / "run").exists()
    digits = ", ".join(f"'{i}'" for i in range(12))
    assert main([*words, "--set", f"eval.choices=[{digits}]", "--set", "eval.generate=false"]) == 0
    assert all("val_accuracy" in line for line in read_metrics(place / "run"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--technique", "full", "--rank", "4"], "--rank is a setting of lora, which is not among"),
        (["-c", "full.yaml", "--rank", "4"], "--rank is a setting of lora, which is not among"),
        (["-c", "empty.yaml"], "there is no technique"),
    ],
)
def test_an_option_of_a_technique_that_is_not_taken_and_none_at_all_are_told_as_that(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (place / "full.yaml").write_text("techniques: [full]\n")
    (place / "empty.yaml").write_text("techniques: []\n")
    assert main([*COMMON, *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "--technique lora" in shown
    assert "afina." not in shown
    # The control: an option adds to an empty list what it is of.
    assert main([*COMMON, "-c", "empty.yaml", "--rank", "4", "--print-config"]) == 0


def test_skipped_steps_are_told_at_the_end_and_in_the_result(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from afina.train import window

    found: list[int] = []

    def once(*given: Any) -> Any:
        losses = counted(*given)
        found.append(1)
        return losses * float("nan") if len(found) == 1 else losses

    counted = window.counted
    monkeypatch.setattr(window, "counted", once)
    words = ["--steps", "3", "--rows-per-step", "4", "--on-nan", "skip"]
    assert main([*COMMON, *words]) == 0
    assert "done: 3 steps (1 of 3 skipped), loss" in capsys.readouterr().err
    assert json.loads((place / "run/result.json").read_text())["skipped"] == 1


def test_a_damaged_checkpoint_names_the_one_before_it_and_nothing_is_touched(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, "--steps", "4", "--set", "train.save_every=1"]) == 0
    (place / "run/result.json").unlink()
    kept = (place / "run/adapter/adapter_model.safetensors").read_bytes()
    harmed = place / "run/checkpoints/step-000004/optimiser.safetensors"
    harmed.write_bytes(harmed.read_bytes()[:100])
    before = {p: p.read_bytes() for p in (place / "run").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", "-o", "run"]) == 7
    said = capsys.readouterr().err
    assert "optimiser.safetensors has 100 bytes" in said
    assert "afina train --resume-from step-000003 -o run" in said
    assert {p: p.read_bytes() for p in (place / "run").rglob("*") if p.is_file()} == before
    assert main(["train", "--resume-from", "step-000003", "-o", "run"]) == 0
    assert (place / "run/adapter/adapter_model.safetensors").read_bytes() == kept


def test_on_nan_is_a_setting_and_an_option(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose norm is NaN has no finite loss: skipped until it is clear that it is not the rows."""
    from safetensors.torch import load_file, save_file

    path = place / "tiny/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    words = [*COMMON, "--steps", "20", "--rows-per-step", "4"]
    assert main([*words, "--on-nan", "skip"]) == 7
    said = capsys.readouterr().err
    assert "10 steps in a row were not finite" in said
    assert said.count("skipped, the loss of micro-batch") == 9
    assert main([*words, "--overwrite"]) == 7
    said = capsys.readouterr().err
    assert "step 1: the loss or the gradient is not finite" in said
    assert "rows.jsonl:" in said
    assert main([*words, "--on-nan", "ignore", "--overwrite"]) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_answered_saved_and_told_by_the_status(
    place: Path, capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    """Sent when the first steps are written; however many more are made by then, the run goes on to the same end."""
    words = [*COMMON, "--steps", "200", "--rows-per-step", "4", "--set", "train.seed=3"]

    def press() -> None:
        while len(read_metrics(place / "run")) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    other = threading.Thread(target=press)
    other.start()
    assert main(words) == status
    other.join()
    said = capsys.readouterr().err
    done = len(read_metrics(place / "run"))
    assert 2 <= done < 200
    again = "press Ctrl-C again" if number == signal.SIGINT else "send the signal again"
    assert f"then saving; {again} to stop at once" in said
    assert f"stopped after step {done} of 200, saved; go on with: afina train --resume" in said
    assert (place / "run/checkpoints/latest").read_text() == f"step-{done:06d}"
    assert not (place / "run/adapter").exists()


@pytest.mark.slow
def test_a_real_process_is_killed_and_interrupted_and_goes_on_from_elsewhere(
    place: Path,
) -> None:
    """kill -9, then Ctrl-C, each resumed from another working directory: the end of an unbroken run."""
    words = ["train", "tiny", "rows.jsonl", "--val", "rows.jsonl", "--steps", "60"]
    for setting in (
        "train.rows_per_step=4",
        "train.save_every=5",
        "train.eval_every=20",
        "train.threads=1",
        "techniques.lora.dropout=0.2",
    ):
        words += ["--set", setting]
    assert main([*words, "-o", "whole"]) == 0

    def broken(start: list[str], cwd: Path, after: int, number: int) -> tuple[int, str]:
        """Starts a process and sends it a signal once it has done `after` steps; its status and what it said."""
        process = subprocess.Popen(
            [sys.executable, "-m", "afina.cli", *start], cwd=cwd, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and len(read_metrics(place / "run")) < after:
            time.sleep(0.02)
        process.send_signal(number)
        said = process.communicate()[1]
        return process.returncode, said

    other = place / "elsewhere/deeper"
    other.mkdir(parents=True)
    status, said = broken([*words, "-o", "run"], place, 12, signal.SIGKILL)
    assert status == -signal.SIGKILL, said
    there = ["train", "--resume", "-o", "../../run"]
    status, said = broken(there, other, 30, signal.SIGINT)
    assert status == 130, said
    assert "finishing step" in said
    assert "go on with: afina train --resume -o ../../run" in said
    assert "Traceback" not in said
    assert main(["train", "--resume", "-o", "run"]) == 0
    names = ("adapter/adapter_model.safetensors", "checkpoints/step-000060/optimiser.safetensors")
    for name in names:
        assert (place / "run" / name).read_bytes() == (place / "whole" / name).read_bytes(), name
    pairs = [
        [(x["step"], x["loss"], x.get("val_loss")) for x in read_metrics(place / name)]
        for name in ("run", "whole")
    ]
    assert pairs[0] == pairs[1]
    assert [step for step, *_ in pairs[0]] == list(range(1, 61))
