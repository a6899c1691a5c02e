"""Real processes that are killed, run out of disk, or meet in one folder: nothing is lost, and the end is the same.

AFINA_KILLS says how many runs are killed (50), AFINA_FULL_DISKS how many run out of disk (18). `make soak` raises them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.train.stage import SAVE_EVERY, STEPS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KILLED, TOO_LARGE = 9, 25
"""SIGKILL, and the signal of a file that grows beyond its limit."""


def staged(what: str, number: int, folder: Path, *more: str) -> list[dict[str, Any]]:
    """The outcomes of a stage (see `tests/train/stage.py`), in a process of its own: it forks, and has no threads."""
    words = [sys.executable, "-m", "tests.train.stage", what, str(number), str(folder), *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "outcomes.json").read_text())


def test_a_run_killed_anywhere_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """Bitwise: weights, every file of the last checkpoint, the figures of each step once; and no leftovers."""
    number = int(os.environ.get("AFINA_KILLS", "50"))
    outcomes = staged("deaths", number, tmp_path)
    assert len(outcomes) == number
    for outcome in outcomes:
        assert outcome["finished"], outcome
        assert outcome["differs"] == [], outcome
        # Lost are at most the steps since the last checkpoint that was due; one due now may be half-written.
        due = SAVE_EVERY * ((outcome["told"] - 1) // SAVE_EVERY)
        assert outcome["saved"] >= due, outcome
    killed = [x for x in outcomes if x["signal"] in (KILLED, TOO_LARGE)]
    assert len(killed) >= number * 3 // 4  # a death by chance in time may come after the end
    assert {x["signal"] for x in killed if x["kind"] == "size"} == {TOO_LARGE}
    # The deaths are spread over the run: before its first step, between checkpoints, and after its last step.
    told = Counter(x["told"] for x in killed)
    assert told[0] > 0
    assert sum(told[step] for step in range(1, STEPS)) > 0
    assert told[STEPS] > 0
    assert any(x.get("again") == KILLED for x in outcomes)


def test_what_would_be_lost_without_the_order_of_writing_is_seen(tmp_path: Path) -> None:
    """The control: with the pointer switched before the checkpoint is whole, a death in between loses the run."""
    outcomes = staged("deaths", 8, tmp_path, "careless")
    assert any(not outcome["finished"] for outcome in outcomes)


def test_a_disk_that_becomes_full_anywhere_is_one_clear_error_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """At a file operation, or in the middle of a write (also one in Rust); then there is room, and the run goes on."""
    number = int(os.environ.get("AFINA_FULL_DISKS", "18"))
    outcomes = staged("full", number, tmp_path)
    assert len(outcomes) == number
    for outcome in outcomes:
        if outcome["status"]:
            assert "afina.errors.RunError" in outcome["said"], outcome
            assert "no room" in outcome["said"] or "cannot be made" in outcome["said"], outcome
            assert "During handling" not in outcome["said"], outcome
        assert outcome["left"] == [], outcome
        due = SAVE_EVERY * ((outcome["told"] - 1) // SAVE_EVERY)
        assert outcome["saved"] >= due, outcome
        assert outcome["finished"], outcome
        assert outcome["differs"] == [], outcome
    assert sum(outcome["status"] != 0 for outcome in outcomes) >= number * 3 // 4


def test_of_runs_started_into_one_folder_at_once_one_goes_on(tmp_path: Path) -> None:
    outcomes = staged("race", 4, tmp_path)
    statuses = sorted(outcome["status"] for outcome in outcomes)
    assert statuses[0] == 0
    assert all(status != 0 for status in statuses[1:])
    for outcome in outcomes:
        if outcome["status"]:
            assert "another process is at work" in outcome["said"] or "in use" in outcome["said"]
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, STEPS + 1))
