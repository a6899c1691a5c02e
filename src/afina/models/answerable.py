"""Whether a model can answer at all, and a prompt be answered by it: asked before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afina import seams
from afina.config import GenerateSettings
from afina.errors import ModelError, counted
from afina.models.forward import context_of
from afina.models.tokenizer import outside


def check_generates(model: Any) -> None:
    """Raises for a model that does not answer.

    Raises:
        ModelError: a classifier, an encoder, or one whose positions transformers gets wrong.
    """
    can = getattr(model, "can_generate", None)
    if can is None or not can() or model.config.is_encoder_decoder:
        raise ModelError(
            "this model does not generate text from left to right",
            got=type(model).__name__,
            wanted="a causal language model",
            cure="measure a classifier: `afina eval` (in Python afina.evaluate)",
        )
    first = seams.first_position(model)
    if first:
        raise ModelError(
            "transformers gives this model wrong positions when it generates",
            got=f"{type(model).__name__}, whose rows begin at position {first}; generation begins them at 0",
            wanted="a model that counts its positions from 0",
            cure="measure its loss: afina eval … --metrics loss (in Python EvalSettings(generate=False))",
        )


class ContextFull(ModelError):
    """A prompt leaves no room for an answer."""


def refuse_unanswerable(model: Any, tokenizer: Any, ids: Sequence[int], named: str) -> None:
    """Raises for a prompt that the model cannot read, or that leaves no room for an answer.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        ids: the prompt.
        named: what it is called, such as its file and line.

    Raises:
        ModelError: see above.
    """
    strange = outside(model, ids)
    if strange:
        text = f"{tokenizer.decode(strange[:1])!r}, " if strange[0] >= 0 else ""
        raise ModelError(
            f"{named} has a token that the model has no embedding for",
            got=f"{text}id {strange[0]}",
            wanted=f"ids from 0 to {seams.vocabulary(model) - 1}",
            cure="take it out of the prompt, or use the tokenizer that the model was trained with",
        )
    limit = context_of(model)
    if limit is not None and len(ids) >= limit:
        raise ContextFull(
            f"{named} fills the model's whole context",
            got=counted(len(ids), "token"),
            wanted=f"fewer than {limit}",
            cure="shorten the prompt",
        )


def most_tokens(model: Any, ids: Sequence[int], settings: GenerateSettings) -> int:
    """The most tokens this prompt's answer may have: as set, or what the context leaves."""
    limit = context_of(model)
    most = settings.max_new_tokens
    return most if limit is None else min(most, limit - len(ids))
