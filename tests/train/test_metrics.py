"""The figures' file and the micro-batch's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from afina.train import micro
from afina.train.metrics import MetricsFile, plot_loss, read_metrics, smooth
from afina.train.passes import Passes
from tests.train.kit import ragged_rows


def test_resuming_drops_the_lines_of_later_steps_and_a_torn_one(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        file.add({"step": step, "loss": 1.0 / step})
    with file.path.open("a") as torn:
        torn.write('{"step": 4, "lo')
    MetricsFile(tmp_path, keep_below=2).add({"step": 3, "loss": 9.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 9.0},
    ]


def test_smoothing_is_a_weighted_mean_from_the_first_value_on() -> None:
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([1.0, 3.0], weight=0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    assert plot_loss(tmp_path) is None
    MetricsFile(tmp_path).add({"step": 1, "loss": 1.0, "val_loss": 2.0})
    path = plot_loss(tmp_path)
    assert path is not None
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def passes() -> Passes:
    """The way of packed rows through a small module."""
    return Passes(torch.nn.Linear(1, 1), True, False, 0, None)


def test_a_step_is_cut_by_rows_or_by_tokens_and_loses_none() -> None:
    rows = ragged_rows(7)
    way = passes()
    assert [len(m) for m in way.cut(rows, rows_each=3, tokens_each=None)] == [3, 3, 1]
    assert way.cut(rows, rows_each=None, tokens_each=None) == [rows]
    by_tokens = way.cut(rows, rows_each=None, tokens_each=20)
    assert all(sum(len(r.tokens) for r in m) <= 20 for m in by_tokens)
    assert sorted(r.id for m in by_tokens for r in m) == list(range(7))


def test_the_size_found_holds_the_longest_row_and_no_more_than_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass that takes 1 MB a token, with 100 MB free, of which 60 % may be used."""
    rows = ragged_rows(8)
    longest = max(len(row.tokens) for row in rows)
    tried: list[int] = []
    memory = {"peak": 0, "loaded": 0, "free": 100 * 10**6}

    def run(part: Any) -> None:
        tried.append(sum(len(row.tokens) for row in part))
        memory["peak"] = max(memory["peak"], tried[-1] * 10**6)

    way = passes()
    monkeypatch.setattr(micro, "used_bytes", lambda device: 0)
    monkeypatch.setattr(micro, "peak_bytes", lambda device: memory["peak"])
    monkeypatch.setattr(micro, "free_bytes", lambda device: memory["free"])
    assert micro.find_tokens(rows, run, way)[0] == 60
    assert tried == [longest]
    memory.update(peak=0, free=10**12)
    assert micro.find_tokens(rows, run, way)[0] == micro.MOST_TOKENS
    memory.update(peak=0, free=10**6)
    assert micro.find_tokens(rows, run, way)[0] == longest
    # Where loading took more than one row does, rows are doubled until a pass takes more than loading did.
    tried.clear()
    memory.update(peak=3 * longest * 10**6, free=100 * 10**6)
    assert micro.find_tokens(rows, run, way)[0] == 60
    assert len(tried) > 1
    assert tried == sorted(tried)
    monkeypatch.setattr(micro, "peak_bytes", lambda device: None)
    assert micro.find_tokens(rows, run, way) == (
        micro.MOST_TOKENS,
        "this system does not tell memory use",
    )
