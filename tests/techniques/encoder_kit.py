"""Tiny encoders, and their token pruning done slowly: one row after the other, with loops and whole matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

BLOCKS, T = 4, 12
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "num_labels": 3,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_MODERN = {
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
_DISTIL = {
    "vocab_size": 60,
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": BLOCKS,
    "n_heads": 2,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "num_labels": 3,
    "pad_token_id": 0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertForSequenceClassification, BertConfig, SIZES),
    "tags": (BertForTokenClassification, BertConfig, SIZES),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, SIZES),
    "distilbert": (DistilBertForTokenClassification, DistilBertConfig, _DISTIL),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig, SIZES | _MODERN),
}
COUNTS = (12, 7, 3)


def build(kind: str, **changes: Any) -> Any:
    """A model in fp64, without dropout, in evaluation mode."""
    torch.manual_seed(0)
    made, config, sizes = KINDS[kind]
    return made(config(**(sizes | changes))).double().eval()


def inputs(*, left: bool = False) -> dict[str, Tensor]:
    """Rows of 12, 7 and 3 tokens, padded on the right or the left."""
    ids = torch.randint(1, 60, (len(COUNTS), T), generator=torch.Generator().manual_seed(1))
    steps = torch.arange(T).expand(len(COUNTS), T)
    counts = torch.tensor(COUNTS)[:, None]
    real = steps >= T - counts if left else steps < counts
    return {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}


# --- slowly --------------------------------------------------------------------------------------------------------


def slow_states(model: Any, ids: Tensor, way: str, keep: float, entered: list[int]) -> Tensor:
    """The last states of one row of BERT (1, T, D): `way` is fuse, cut or merge.

    Args:
        model: BERT with any head.
        ids: of the row, without padding.
        way: what becomes of the tokens that leave.
        keep: share that is left in the end.
        entered: blocks that are given fewer tokens.
    """
    x = model.bert.embeddings(input_ids=ids[None])
    tokens = len(ids)
    final: dict[int, Tensor] = {}
    groups, extra = [[t] for t in range(tokens)], False
    for number, block in enumerate(model.bert.encoder.layer):
        sizes = torch.tensor([float(len(group)) for group in groups]).double()
        mask = sizes.log()[None, None, None] if way == "merge" else None
        before, x = x, block(x, mask)
        if number + 1 not in entered:
            continue
        stage = entered.index(number + 1) + 1
        if way == "merge":
            share = 1 - (1 - keep) * stage / len(entered)
            x, groups = _merged(block, before, x, groups, math.ceil(tokens * share - 1e-6))
            continue
        left = max(1, math.ceil(tokens * keep ** (stage / len(entered)) - 1e-6))
        mass = _mass(block, before)
        own = list(range(x.shape[1] - extra))
        order = [0, *sorted(own[1:], key=lambda c: -float(mass[c]))]
        stay = sorted(order[:left])
        gone = [c for c in range(x.shape[1]) if c not in stay]
        final |= {groups[c][0]: x[:, c] for c in gone if c in own}
        made = [x[:, stay]]
        if way == "fuse" and gone:
            weight = mass[gone]
            made.append((weight[:, None] * x[0, gone]).sum(0, keepdim=True)[None] / weight.sum())
            extra = True
        x, groups = torch.cat(made, 1), [groups[c] for c in stay] + ([[-1]] if extra else [])
    for column, group in enumerate(groups):
        final |= dict.fromkeys(group, x[:, column])
    return torch.stack([final[t] for t in range(tokens)], 1)


def _heads(block: Any, x: Tensor, name: str) -> Tensor:
    return getattr(block.attention.self, name)(x).view(1, x.shape[1], 2, -1).transpose(1, 2)


def _mass(block: Any, x: Tensor) -> Tensor:
    q, k = _heads(block, x, "query"), _heads(block, x, "key")
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1)[0].mean(0).sum(0).detach()


def _merged(
    block: Any, before: Tensor, x: Tensor, groups: list[list[int]], left: int
) -> tuple[Tensor, list[list[int]]]:
    keys = _heads(block, before, "key")[0].mean(0).detach()
    unit = keys / keys.norm(dim=-1, keepdim=True)
    columns = range(1, x.shape[1])
    givers, takers = [c for c in columns if c % 2 == 0], [c for c in columns if c % 2 == 1]
    best = {g: max(takers, key=lambda t: float(unit[g] @ unit[t])) for g in givers if takers}
    order = sorted(best, key=lambda g: -float(unit[g] @ unit[best[g]]))
    going = order[: max(0, x.shape[1] - left)]
    made: list[Tensor] = []
    new: list[list[int]] = []
    for column in range(x.shape[1]):
        if column in going:
            continue
        members = [column, *(g for g in going if best[g] == column)]
        total = sum(len(groups[m]) for m in members)
        made.append(sum(x[:, m] * len(groups[m]) for m in members) / total)
        new.append([t for m in members for t in groups[m]])
    return torch.stack(made, 1), new


def slow_logits(model: Any, ids: Tensor, way: str, keep: float, entered: list[int]) -> Tensor:
    """The head's answer to one row."""
    states = slow_states(model, ids, way, keep, entered)
    if "Token" in type(model).__name__:
        return model.classifier(states)
    return model.classifier(model.bert.pooler(states))
