"""How much is computed in a step: what is frozen gets no gradient, a third of all that full fine-tuning computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from afina import IA3, AdaLoRA, BitFit, Bottleneck, DoRA, Full, LoRA, apply
from tests.tiny import tiny_llama

TOKENS, RANK = 128, 4


def work(technique: Any, *, frozen: bool = True) -> int:
    """Floating-point operations of a forward and a backward pass."""
    model = tiny_llama(hidden_size=256, intermediate_size=512, dtype=torch.float32)
    apply(model, [technique], seed=0)
    if not frozen:
        model.requires_grad_(True)
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counted:
        model.train()(input_ids=ids, labels=ids).loss.backward()
    return counted.get_total_flops()


@pytest.mark.parametrize(
    ("technique", "most"),
    [
        (LoRA(rank=RANK), 0.67),
        (LoRA(rank=RANK, dropout=0.1), 0.67),
        (DoRA(rank=RANK), 0.67),
        (LoRA(rank=RANK, start="pissa"), 0.69),
        (AdaLoRA(), 0.71),
        (IA3(), 0.65),
        (BitFit(), 0.65),
        (Bottleneck(), 0.65),
    ],
    ids=lambda value: value.key if hasattr(value, "key") else str(value),
)
def test_a_step_does_less_than_that_of_full_fine_tuning(technique: Any, most: float) -> None:
    assert work(technique) < most * work(Full())


def test_what_is_left_out_are_the_gradients_of_the_weights() -> None:
    """Where the weights train beside it, a LoRA comes on top."""
    assert work(LoRA(rank=RANK), frozen=False) > work(Full())
