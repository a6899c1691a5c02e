"""The bench of quantised bases on a tiny model: which figures there are, and what memory is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import quantize
from bench.kit import pieces
from tests.tiny import byte_tokenizer, save_model, tiny_llama


@pytest.mark.slow
def test_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: each way is a process of its own."""
    monkeypatch.setattr(pieces, "LOCK", tmp_path / "lock")
    model = save_model(tmp_path / "model", tiny_llama(hidden_size=64), byte_tokenizer())
    file = tmp_path / "quantize.json"
    words = ["--quick", "--json", str(file), "--model", str(model), "--rank", "2"]
    assert quantize.main([*words, "--threads", "1", "--only", "whole,nf4"]) == 0
    rows = {row["metric"]: row for row in json.loads(file.read_text())}
    assert list(rows) == ["weights", "loaded", "training", "speed", "loss"]
    assert {(r["setting"], r["peer"], r["work"]) for r in rows.values()} == {
        ("nf4", "afina fp32", "model")
    }
    assert 0 < rows["weights"]["ratio"] < 1
    assert rows["speed"]["value"] > 0


def test_a_way_trains_and_says_what_it_took(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tiny_llama(), byte_tokenizer())
    work = quantize.Work(str(model), 2, 8, 3, 2, torch.get_num_threads(), "fp32")
    found = {way: quantize.run(way, work) for way in quantize.OURS}
    assert found["nf4"]["weights"] < found["int8"]["weights"] < found["whole"]["weights"]
    # The linears of the blocks, two embeddings of 260 tokens, five norms.
    assert found["whole"]["weights"] * 2**20 == 4 * (15360 + 2 * 260 * 32 + 5 * 32)
    assert all(way["speed"] > 0 and way["loss"] > 0 for way in found.values())


@pytest.mark.slow
def test_a_way_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="nf4 failed"):
        quantize.apart("nf4", quantize.Work("/no/such/model", 1, 8, 2, 2, 1, "fp32"))


def test_of_several_rounds_the_median_counts() -> None:
    rounds = [{"speed": s, "loss": 1.0} for s in (3.0, 1.0, 9.0)]
    assert quantize.middle(rounds) == {"speed": 3.0, "loss": 1.0}


def test_the_most_memory_is_seen() -> None:
    with quantize.highest(every_s=0.001) as most:
        before = most()
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        for _ in range(1000):
            if most() >= before + 50 * 2**20:
                break
            block.add_(1)
    assert most() >= before + 50 * 2**20


def test_the_peer_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    assert quantize.ways("") == ["whole", "nf4", "int8"]
    monkeypatch.setattr(quantize, "find_spec", lambda name: object())
    assert quantize.ways("") == ["whole", "nf4", "int8", "peft-nf4", "peft-int8"]
    assert quantize.ways("nf4, whole") == ["nf4", "whole"]
