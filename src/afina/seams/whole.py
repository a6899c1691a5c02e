"""What is asked of a whole model: whether it is one, what it is for, how it counts positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from afina.errors import ModelError


def require_model(model: Any) -> None:
    """Raises for what is no model, such as the pair that `afina.load` gives.

    Raises:
        ModelError: see above.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "this is no model",
            got=type(model).__name__,
            wanted="a model of Transformers",
            cure="take the pair apart: model, tokenizer = afina.load(NAME)"
            if isinstance(model, tuple)
            else "model, tokenizer = afina.load(NAME)",
        )


def holders(model: nn.Module) -> list[str]:
    """Names of the modules that hold parameters, themselves or further down; the model itself left out."""
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    return [name for name, module in named if name and any(True for _ in module.parameters())]


def classifies(model: nn.Module) -> Literal["rows", "tokens"] | None:
    """What a classifier of text gives classes to; None for any other model."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "rows"
    return "tokens" if name.endswith("ForTokenClassification") else None


def first_position(model: nn.Module) -> int:
    """The number that the model itself gives to a row's first position: 0, but behind the padding's in RoBERTa's kin.

    Those keep their padding's id as the position of padding, and count from the next number on.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.padding_idx + 1
    return 0


def positions(model: nn.Module) -> int | None:
    """How many places a row can have in a model; None where its configuration does not say."""
    config = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", lambda: config)()
    limit = getattr(of_text, "max_position_embeddings", None)
    return None if limit is None else limit - first_position(model)


def supports_rows(model: nn.Module) -> bool:
    """Whether attention can be told which row a token belongs to, which packing needs.

    True where the model takes its attention from Transformers' `AttentionInterface`; a model with recurrent or
    convolutional mixing beside it would still leak across rows, so those are refused. So are models that do not count
    positions from 0 (`first_position`), whose rows would lie elsewhere than where they were trained.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return False
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or first_position(model):
        return False
    mixers = ("mamba", "ssm", "conv1d", "rwkv", "recurrent", "deltanet", "linear_attn", "shortconv")
    return not any(
        any(mark in type(m).__name__.lower() for mark in mixers) and type(m).__name__ != "Conv1D"
        for m in model.modules()
    )
