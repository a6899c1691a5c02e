"""A tokenizer written into a GGUF file: vocabulary, merges, special tokens, template, and how text is split.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the ways to split text are those of the tokenizers
that GGUF names them after (GPT-2, SmolLM, Llama 3, Qwen2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gguf

from afina.errors import ModelError

_BYTES = {"type": "ByteLevel", "add_prefix_space": False}


def _words(digits: str) -> tuple[Mapping[str, Any], ...]:
    """Words as GPT-4 splits them, and numbers in pieces of so many digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return ({**split, "invert": False}, {**_BYTES, "use_regex": False})


PRE: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "gpt-2": ({**_BYTES, "use_regex": True},),
    "smollm": ({"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}),
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}
"""`tokenizer.ggml.pre` -> the steps of the pre-tokenizer that it means."""


def backend_of(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer as its JSON file has it.

    Raises:
        ModelError: it has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _uncovered(type(tokenizer).__name__)
    return json.loads(backend.to_str())


def _uncovered(got: str) -> ModelError:
    return ModelError(
        "this tokenizer cannot be written as GGUF",
        got=got,
        wanted=f"byte-level BPE that splits text as {', '.join(PRE)} do",
        cure="merge into a folder, and convert that with llama.cpp's convert_hf_to_gguf.py",
    )


def pre_of(backend: Mapping[str, Any]) -> str:
    """GGUF's name of the way in which text is split into words.

    Raises:
        ModelError: none of those that are covered.
    """
    model, pre = backend["model"], backend.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _uncovered(f"a {model.get('type')} tokenizer with bytes as tokens of their own")
    steps = pre.get("pretokenizers", [pre])
    for name, wanted in PRE.items():
        if len(steps) == len(wanted) and all(
            all(step.get(key) == value for key, value in each.items())
            for step, each in zip(steps, wanted, strict=True)
        ):
            return name
    raise _uncovered(json.dumps(pre)[:200])


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, rows: int) -> None:
    """The vocabulary, merges and special tokens; ids without a token, up to the embedding's rows, are marked unused."""
    backend = backend_of(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_of(backend))
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [gguf.TokenType.UNUSED] * rows
    for token, number in backend["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in backend["added_tokens"]:
        special = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], special
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    pairs = backend["model"]["merges"]
    writer.add_token_merges([p if isinstance(p, str) else " ".join(p) for p in pairs])
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and tokenizer("")["input_ids"][:1] == [bos])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
