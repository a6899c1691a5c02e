"""Repairs to tokenizers: a pad that is no stop token, and the pre-tokenizer that a GGUF file only names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from .. import seams
from ..errors import DataError, ModelError, counted
from ..types import Row

log = logging.getLogger(__name__)

PADS = ("<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<|end_of_text|>", "<unk>")
"""Tokens that may fill a row, best first; one that ends an answer is never taken."""

SPARE = re.compile("pad|reserved|unused", re.IGNORECASE)
"""What the name of a special token without another use says."""

CONTROL_BYTES = ("\u0114", "<0x00>")
"""A control byte that no text holds, as byte-level (0x14) and sentencepiece vocabularies (0x00) write it.

A pad becomes a special token when the tokenizer is saved: its spelling is then found in text, and it is left out of
decoded text. So byte-level 0x00 will not do: it is spelt as the letter U+0100, which Latvian uses; U+0114 is rare.
"""

DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Values of `tokenizer.ggml.pre` that cut numbers into single digits, then split as GPT-2 does (as llama.cpp does)."""

AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "roberta-bpe")
"""Values of `tokenizer.ggml.pre` that split as GPT-2 does, which is what transformers gives every unknown one."""


def repair_pad(model: Any, tokenizer: Any) -> None:
    """Give `tokenizer` a pad that ends no answer, and `model` the same pad. Both in place.

    With pad equal to an end token, code that masks pad by its id masks the end of every answer too, and the model never
    learns to stop. A free token of the vocabulary is named pad; none is added, since that would resize the embeddings.

    Raises:
        ModelError: every token of the vocabulary ends an answer.
    """
    from .stops import stop_ids

    # A pad added behind the last row of the embedding would end the first padded batch.
    taken = {*stop_ids(model, tokenizer), *outside(model, tokenizer.get_vocab().values())}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in taken:
        before, after = tokenizer.pad_token, spare_token(tokenizer, taken)
        tokenizer.pad_token = after
        log.info(
            "pad token: %r instead of %r, which must be in the model and no end token",
            after,
            before,
        )
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.pad_token_id = tokenizer.pad_token_id


def check_vocabulary(source: Any, model: Any, tokenizer: Any) -> None:
    """Raises when the tokenizer gives ids that the model has no embedding for.

    Some publishers name a token or two beyond the last row of the embedding, for a picture say, which no text holds:
    those are let be with a warning, and are refused where a row has one (`outside`).

    Raises:
        ModelError: ordinary tokens are outside.
    """
    rows = seams.vocabulary(model)
    if len(tokenizer) <= rows:
        return
    beyond = {name: id for name, id in tokenizer.get_vocab().items() if id >= rows}
    added = set(tokenizer.added_tokens_decoder)
    if all(id in added for id in beyond.values()):
        log.warning(
            "%s: the model has no embedding for %s of its tokenizer: %s",
            source,
            counted(len(beyond), "added token"),
            ", ".join(sorted(beyond)[:5]),
        )
        return
    raise ModelError(
        "the tokenizer knows more tokens than the model",
        got=f"{source}: ids up to {max(beyond.values())}, and {counted(rows, 'row')} of the embedding",
        wanted="the tokenizer that the model was trained with",
        cure="copy the tokenizer files of the original model into the folder",
    )


def outside(model: Any, ids: Iterable[int]) -> list[int]:
    """The ids that the model has no embedding for."""
    rows = seams.vocabulary(model)
    return sorted({id for id in ids if not 0 <= id < rows})


def refuse_outside(model: Any, tokenizer: Any, rows: Iterable[Row]) -> None:
    """Raises for a row with an id that the model has no embedding for, which would end its forward pass.

    Raises:
        DataError: naming the row and the token.
    """
    size = seams.vocabulary(model)
    for row in rows:
        if max(row.tokens, default=0) >= size:
            strange = outside(model, row.tokens)[0]
            name = "" if tokenizer is None else f"{tokenizer.decode([strange])!r}, "
            raise DataError(
                f"{row.source or row.id}: a token that the model has no embedding for",
                got=f"{name}id {strange}",
                wanted=f"ids below {size}",
                cure="take it out of the data, or use the tokenizer that the model was trained with",
            )


def spare_token(tokenizer: Any, taken: set[int]) -> str:
    """A token to name pad: a usual one, a special one without another use, a control byte, or else the last one.

    Raises:
        ModelError: all are in `taken`.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    idle = [token for token in special if token not in template and token != tokenizer.bos_token]
    spare = [token for token in idle if SPARE.search(token)]
    last = sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)
    for token in (*PADS, *spare, *CONTROL_BYTES, *idle, *last):
        if token in vocabulary and vocabulary[token] not in taken:
            return token
    raise ModelError(
        "no token is left to fill rows with",
        got=f"a vocabulary of {len(vocabulary)}, all of it end tokens",
        wanted="a pad token that ends no answer",
        cure="add a pad token to the tokenizer and resize the model's embeddings",
    )


def repair_pre(tokenizer: Any, pre: str | None) -> None:
    """Put back the pre-tokenizer that a GGUF file names in `tokenizer.ggml.pre`. In place.

    Transformers knows some names; for every other one it gives a byte-level tokenizer GPT-2's splitting. That is kept,
    with a warning unless it is right, for names that are not known here either.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or pre in AS_GPT2:
        return
    if pre in DIGIT_BY_DIGIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return
    log.warning(
        "the GGUF file's pre-tokenizer %r is not known: text is split as by GPT-2, and some of it may get other "
        "tokens than the model was trained on; where you can, load the model's own Hugging Face folder instead",
        pre,
    )
