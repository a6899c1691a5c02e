"""The slow truth, against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from afina.ops import reference
from afina.types import IGNORE


def test_visible_keeps_rows_apart() -> None:
    segments = torch.tensor([[0, 0, 1, 1, -1]])
    assert reference.visible(segments, causal=True)[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
    ]
    assert reference.visible(segments, causal=False)[0, 0].int().tolist() == [1, 1, 0, 0, 0]


def test_visible_in_a_window() -> None:
    segments = torch.zeros(1, 4, dtype=torch.long)
    assert reference.visible(segments, causal=True, window=2)[0, 3].int().tolist() == [0, 0, 1, 1]
    assert reference.visible(segments, causal=False, window=2)[0, 1].int().tolist() == [1, 1, 1, 0]


def test_token_losses() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0], [1.0, 2.0]])
    losses = reference.token_losses(logits, torch.tensor([1, 0, IGNORE]))
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log(2), 0.0])


def test_low_rank_linear() -> None:
    x = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    a, b = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [2.0], [0.0]])
    # B A x = 3 · (1, 2, 0), scaled by one half.
    assert reference.low_rank_linear(x, weight, a, b, 0.5).tolist() == [[2.5, 5.0, 3.0]]
