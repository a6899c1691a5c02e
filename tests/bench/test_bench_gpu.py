"""The bench of operations on a GPU, on the CPU and on tiny shapes: which figures there are, and that ways agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afina.errors import ConfigError
from afina.ops import attention
from bench import ops
from bench.kit import on_gpu


def test_the_figures() -> None:
    found = list(on_gpu.figures("cpu", torch.float32, ops.Sizes((16,), 4, 1), tokens=5))
    rows = [(each.work, each.metric, each.peer) for each in found]
    wanted = [
        *(
            (f"attention, 16 tokens, {work}", "time", peer)
            for work in ("one row", "packed")
            for peer in ("sdpa", "eager")
        ),
        ("loss, 4 positions", "time", "logits"),
        ("a map with a path, 5 tokens", "time", "peft"),
    ]
    assert [row for row in rows if row[2] in ("sdpa", "eager", "logits", "peft")] == wanted
    assert all(each.value and each.peer_value for each in found)


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(way: str, device: Any) -> None:
        raise ConfigError(f"no {way}")

    monkeypatch.setattr(attention, "refuse_missing", refuse)
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: None)
    assert [line.partition(" ")[0] for line in on_gpu.left_out("cpu")] == [
        "triton",
        "flash",
        "liger",
    ]
    assert set(on_gpu.attention_ways([4], torch.float32, "cpu")) == {"afina", "sdpa", "eager"}
    assert set(on_gpu.loss_ways(4, torch.float32, "cpu")) == {"afina", "logits"}


def test_what_is_there_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "refuse_missing", lambda way, device: None)
    ways = on_gpu.attention_ways([4], torch.float32, "cpu")
    assert set(ways) == {"afina", "sdpa", "eager", "triton", "flash"}
    seen: list[str] = []
    monkeypatch.setattr(attention, "_in_kernels", lambda *a: seen.append("triton") or a[0])
    monkeypatch.setattr(attention.flash, "FORMATS", (torch.float32,))
    monkeypatch.setattr(attention, "_in_flash", lambda *a: seen.append("flash") or a[0])
    for name in ("triton", "flash"):
        ways[name]()
    assert seen == ["triton", "flash"]
    assert attention.backend(torch.device("cpu"), torch.float32).startswith("PyTorch")


def test_both_maps_are_one() -> None:
    ways = on_gpu.map_ways(7, torch.float64, "cpu")
    slopes: dict[str, list[torch.Tensor]] = {}
    for name, way in ways.items():
        model: Any = way.args[0]  # type: ignore[attr-defined]
        way()
        slopes[name] = [p.grad for p in on_gpu._path(model)]
    for own, other in zip(slopes["afina"], slopes["peft"], strict=True):
        torch.testing.assert_close(own.double(), other.double(), rtol=1e-4, atol=1e-9)
