"""Repairs to tokenizers: a pad that is no stop token, and what a GGUF file loses of the pre-tokenizer."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PADS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens whose name says that they may fill a row, best first; one that stops generation is never taken."""

NUL = ("\u0100", "<0x00>")
"""The byte 0, which no text holds, in byte-level vocabularies and in sentencepiece's."""


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation: Any = None) -> set[int]:
    """Ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    eos: Any = getattr(generation, "eos_token_id", None)
    named = eos if isinstance(eos, (list, tuple)) else [eos]
    return {int(each) for each in [*named, tokenizer.eos_token_id] if each is not None}


def repair_pad(tokenizer: PreTrainedTokenizerBase, generation: Any = None) -> None:
    """Give `tokenizer` a pad token that is in its vocabulary and is no stop token. In place.

    With pad equal to the end token, code that masks pad by its id masks the end of every answer too, and the
    model never learns to stop.
    """
    stops = stop_ids(tokenizer, generation)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in stops:
        return
    before = tokenizer.pad_token
    vocabulary = tokenizer.get_vocab()
    unknown = [tokenizer.unk_token] if tokenizer.unk_token else []
    for token in (*PADS, *unknown, *NUL):
        if token in vocabulary and vocabulary[token] not in stops:
            tokenizer.pad_token = token
            log.info("pad token %r is now %r", before, token)
            return
    spare = next((token for token, id in sorted(vocabulary.items(), key=lambda pair: -pair[1]) if id not in stops), None)
    if spare is not None:
        tokenizer.pad_token = spare
        log.warning("pad token %r is now %r, for want of a better one", before, spare)


def repair_pre(tokenizer: PreTrainedTokenizerBase, pre: str | None) -> None:
    """Put back the pre-tokenizer that a GGUF file names in `tokenizer.ggml.pre`. In place."""
    from tokenizers import pre_tokenizers

    if pre == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
