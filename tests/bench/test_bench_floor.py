"""The floor of a step: which products are made, of how many tokens, into memory that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kit import floor
from bench.kit.floor import TIMES, Floor


def test_each_step_makes_its_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    places: set[int] = set()
    real = torch.mm

    def mm(a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        made.append((tuple(a.shape), tuple(b.shape)))
        places.add(out.data_ptr())
        return real(a, b, out=out)

    monkeypatch.setattr(floor.torch, "mm", mm)
    wide, tall, head = torch.randn(8, 4), torch.randn(6, 8), torch.randn(20, 4)
    times = Floor([wide, tall, wide], head, [(5, 2), (7, 3)])
    for step, (tokens, trained) in enumerate([(5, 2), (7, 3)]):
        made.clear()
        times.after_step(step)
        blocks = [
            ((tokens, 4), (4, 8)), ((tokens, 8), (8, 4)),
            ((tokens, 8), (8, 6)), ((tokens, 6), (6, 8)),
            ((tokens, 4), (4, 8)), ((tokens, 8), (8, 4)),
        ]  # fmt: skip
        assert made == [*blocks, ((trained, 4), (4, 20)), ((trained, 20), (20, 4))] * TIMES
    assert len(places) == 6  # two for each shape, from the beginning
    found = times.result()
    assert [len(found[key]) for key in ("step_s", "floor_s")] == [2, 2]
    assert all(seconds > 0 for seconds in found["floor_s"])
