"""The merge bench on a tiny model: which figures there are, and that the three models take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import merge
from bench.kit import pieces
from tests.tiny import byte_tokenizer, save_model, tiny_llama


def test_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(merge, "QUICK", merge.Sizes(rows=1, tokens=16, answer=2, windows=1))
    model = save_model(tmp_path / "model", tiny_llama(), byte_tokenizer())
    file = tmp_path / "merge.json"
    threads = torch.get_num_threads()
    words = ["--quick", "--json", str(file), "--model", str(model), "--rank", "2"]
    assert merge.main([*words, "--threads", str(threads), "--work", str(tmp_path)]) == 0
    rows = json.loads(file.read_text())
    assert [(r["metric"], r["setting"], r["peer"], r["unit"]) for r in rows] == [
        (metric, setting, "base", "tokens/s")
        for metric in ("prefill", "decode")
        for setting in ("merged", "unmerged")
    ]
    assert all(r["bench"] == "merge" and r["work"] == "model" and r["ratio"] > 0 for r in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "merge.json", "lock"}


def test_the_models_take_turns() -> None:
    asked: list[str] = []
    models: dict[str, Any] = {"base": "b", "unmerged": "u", "merged": "m"}
    speeds = merge.of_each(models, asked.append, 10, windows=2)
    assert "".join(asked) == "bum" + "bum" + "umb"  # the first round warms up
    assert set(speeds) == set(models)
