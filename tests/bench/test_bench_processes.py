"""The bench of several processes: rows that would show a wrong denominator, and the figure that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import processes


def test_rows_are_all_different_and_uneven() -> None:
    found = [row["prompt"] for row in processes.rows()]
    assert len(set(found)) == processes.ROWS
    assert len({len(text.split()) for text in found}) > 2


def test_the_largest_difference_of_a_step_is_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(model: str, out: Path, steps: int, words: list[str]) -> list[float]:
        assert (out.parent / "rows.jsonl").exists()
        return [2.0, 1.0, 0.5] if not words else [2.0, 1.0 + 1e-6, 0.5]

    monkeypatch.setattr(processes, "run", run)
    file = tmp_path / "found.json"
    assert processes.main(["--model", "m", "--steps", "3", "--json", str(file)]) == 0
    assert (
        "2 processes, parallel.zero=0: losses differ by at most 1.0e-06" in capsys.readouterr().out
    )
    told = json.loads(file.read_text())
    assert told["largest_relative_difference"]["parallel.zero=0"] == pytest.approx(1e-6, rel=1e-3)
    assert told["one_process"] == [2.0, 1.0, 0.5]
