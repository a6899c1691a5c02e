"""A batch with more padding has the losses and gradients of the batch: however rows lie, whatever they are for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from afina.models.forward import packing
from afina.models.head import head_of
from afina.train.passes import Passes
from afina.types import IGNORE, Batch, Row
from tests.tiny import tiny_gpt2, tiny_llama
from tests.train.kit import ragged_rows

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 257,
    "num_labels": 3,
}


def bert(kind: Any) -> Any:
    """A tiny encoder that classifies."""
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, hidden_dropout_prob=0.0)).double().eval()


def decoder() -> Any:
    """A tiny decoder that classifies rows by their last token."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES)).double().eval()


def rows_for(kind: str) -> list[Row]:
    """Five rows, with classes where the model gives some."""
    rows = ragged_rows(5)
    if kind == "rows":
        return [replace(row, label=row.id % 3) for row in rows]
    if kind == "tokens":
        return [
            replace(row, tags=tuple(n % 3 if n else IGNORE for n in range(len(row.tokens))))
            for row in rows
        ]
    return rows


CASES: dict[str, tuple[Any, str, bool, bool]] = {
    "packed": (tiny_llama, "", True, False),
    "shared": (tiny_llama, "", True, True),
    "padded": (tiny_llama, "", False, False),
    "learnt positions": (tiny_gpt2, "", False, False),
    "rows of an encoder": (lambda: bert(BertForSequenceClassification), "rows", False, False),
    "tokens of an encoder": (lambda: bert(BertForTokenClassification), "tokens", False, False),
    "rows of a decoder": (decoder, "rows", False, False),
}


def found(model: Any, passes: Passes, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses, and the gradients of their sum."""
    losses = passes.losses(batch)
    model.zero_grad()
    losses.sum().backward()
    return losses.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name: str) -> None:
    make, kind, packed, shared = CASES[name]
    model, rows = make(), rows_for(kind)
    if shared:
        rows = [
            replace(row, tokens=(7,) * 9 + row.tokens, trained=(False,) * 9 + row.trained)
            for row in rows
        ]
    with packing(model, packed):
        passes = Passes(model, packed, shared, 257, head_of(model))
        batch = passes.batch(rows)
        assert batch.trained_tokens
        assert bool(batch.runs) == shared
        lines, tokens = batch.tokens_BT.shape
        wide = passes.widened(batch, lines if packed else lines + 2, tokens + 5)
        assert wide.tokens_BT.shape == (lines if packed else lines + 2, tokens + 5)
        expected, got = found(model, passes, batch), found(model, passes, wide)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-9)
    assert len(got[1]) == len(expected[1])
    for mine, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)
    assert passes.widened(batch, lines, tokens) is batch
