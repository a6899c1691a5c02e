"""The bench of operations on tiny shapes: which figures there are, and that all ways compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import ops
from bench.kit import pieces


def test_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(ops, "QUICK", ops.Sizes((16,), 4, 1))
    monkeypatch.setattr(ops, "held_mib", lambda way, positions, dtype: {"afina": 1.0}.get(way, 4.0))
    file = tmp_path / "ops.json"
    threads = str(torch.get_num_threads())
    assert ops.main(["--quick", "--json", str(file), "--threads", threads]) == 0
    rows = json.loads(file.read_text())
    assert [(r["work"], r["metric"], r["peer"]) for r in rows] == [
        *(
            (f"attention, 16 tokens, {work}", "time", peer)
            for work in ("one row", "packed")
            for peer in ("sdpa", "eager")
        ),
        ("loss, 4 positions", "time", "logits"),
        ("loss, 4 positions", "memory", "logits"),
    ]  # fmt: skip
    assert rows[-1]["ratio"] == 0.25
    assert all(r["value"] > 0 and r["peer_value"] > 0 for r in rows)


def test_every_way_of_a_row_has_the_same_gradient() -> None:
    lengths = [6, 3, 1]
    found = {name: of(way) for name, way in ops.attention_ways(lengths, torch.float64).items()}
    parts = [found["sdpa"][row, :, :length] for row, length in enumerate(lengths)]
    torch.testing.assert_close(found["afina"][0], torch.cat(parts, dim=1))
    # Eager softmax is in fp32 whatever the tensors are.
    torch.testing.assert_close(found["eager"], found["sdpa"], rtol=1e-4, atol=2e-6)
    losses = [of(ops.loss_way(name, 5, torch.float64)) for name in ("afina", "logits")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-8)


def of(way: ops.Way) -> torch.Tensor:
    """The gradient that a way's pass leaves in its first tensor."""
    cells = (cell.cell_contents for cell in way.__closure__ or ())
    inside = dict(zip(way.__code__.co_freevars, cells, strict=True))
    tensor = next(inside[name] for name in ("hidden", "line", "padded") if name in inside)
    tensor = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
    tensor.grad = None  # two ways share their tensors
    way()
    assert tensor.grad is not None
    return tensor.grad
