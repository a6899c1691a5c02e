"""The bench of DoRA on narrow blocks: which figures there are, and that the four ways compute the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from bench import dora


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dora, "TIMES", 1)
    file = tmp_path / "dora.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dora.main(["--quick", "--json", str(file), "--width", "72"]) == 0
    rows = json.loads(file.read_text())
    assert [(row["setting"], row["peer"]) for row in rows] == [
        ("dora", "lora"),
        ("peft dora", "peft lora"),
        ("dora", "peft dora"),
        ("lora", "peft lora"),
    ]
    assert all(row["value"] > 0 and row["unit"] == "s a pass" for row in rows)
