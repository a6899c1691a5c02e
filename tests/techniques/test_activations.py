"""What forward keeps for backward: LoRA keeps less than full fine-tuning does, and no wider copy of its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from tests import battery

WIDTH, INNER, RANK = 64, 96, 4
IDS = torch.arange(64).view(2, 32) % battery.VOCABULARY
INPUTS = ((2, 32, WIDTH), (2, 32, INNER))
"""Shapes of what the maps are given."""


@dataclass(frozen=True)
class Kept:
    """Bytes of all that is kept, each piece of memory once, and how many are fp32 of the shape of a map's input."""

    nbytes: int
    wide: int


def kept(model: Any) -> Kept:
    """Of one forward pass; the model's own tensors do not count, for they are there anyway."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t  # held, so that no other takes its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.requires_grad
    wide = sum(t.dtype == torch.float32 and tuple(t.shape) in INPUTS for t in found.values())
    return Kept(sum(t.untyped_storage().nbytes() for t in found.values()), wide)


def build() -> Any:
    torch.manual_seed(0)
    return battery.llama(hidden_size=WIDTH, intermediate_size=INNER).bfloat16().train()


def with_lora(dropout: float) -> Any:
    return apply(build(), [LoRA(rank=RANK, dropout=dropout)]).model


def with_peft(dropout: float) -> Any:
    settings: dict[str, Any] = {"target_modules": "all-linear", "lora_dropout": dropout}
    with battery.quiet():
        return get_peft_model(build(), LoraConfig(r=RANK, **settings)).train()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora_keeps_less_than_full_fine_tuning(dropout: float) -> None:
    full = kept(apply(build(), [Full()]).model)
    lora = kept(with_lora(dropout))
    assert lora.nbytes < 0.85 * full.nbytes
    assert lora.wide <= full.wide  # those of the norms, which compute in fp32


def test_dropout_costs_nothing() -> None:
    assert kept(with_lora(0.1)) == kept(with_lora(0.0))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_peft_keeps_more_than_full_fine_tuning(dropout: float) -> None:
    """The control: it is seen when inputs are kept twice, or wider than they are."""
    full, peer = kept(apply(build(), [Full()]).model), kept(with_peft(dropout))
    assert peer.nbytes > 1.3 * full.nbytes
    if dropout:
        assert peer.wide > full.wide
