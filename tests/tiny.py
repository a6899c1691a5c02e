"""Tiny models and a byte tokenizer for tests of generation, evaluation and their verbs: built in memory, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from afina.types import Row

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> Any:
    """One token a byte, and four special ones: end of text 256, pad 257, the turn's marks 258 and 259."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if chat:
        tokenizer.chat_template = CHATML
    return tokenizer


def tiny_llama(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random Llama of two blocks over the byte tokenizer's 260 ids."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(dtype).eval()


def tiny_gpt2(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random GPT-2 of two blocks: learnt positions, `Conv1D` maps."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 48,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes))).to(dtype).eval()


def tiny_gemma2(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random Gemma 2 of two blocks: scaled embeddings, also the head; capped logits; a window in every other one."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Gemma2ForCausalLM(Gemma2Config(**(sizes | changes))).to(dtype).eval()


def tiny_qwen2(*, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random Qwen 2 of two blocks, the second of which sees a window of four tokens."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(sizes | changes))).to(dtype).eval()


def follow(model: Any, successors: dict[int, int], *, default: int = 256) -> Any:
    """Rigs a tiny Llama: after token t it says `successors[t]`, whatever came before, else `default`.

    The blocks are silenced, so that the final state is the last token's own embedding; embeddings are one-hot
    directions and the head's row of a token points at the tokens it follows.
    """
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    if width < vocabulary:
        raise ValueError(f"needs a width of {vocabulary}, has {width}")
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        head = torch.zeros(vocabulary, width)
        for token in range(vocabulary):
            head[successors.get(token, default), token] = 1.0
        model.lm_head.weight.copy_(head)
    return model


def says(tokenizer: Any, text: str) -> Any:
    """A model that says `text`, whose characters must differ, after a newline, and then ends the turn."""
    ids = tokenizer("\n" + text, add_special_tokens=False)["input_ids"]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{text!r} says a character twice")
    model = tiny_llama(hidden_size=320, intermediate_size=16)
    return follow(model, dict(zip(ids, [*ids[1:], 259], strict=True)))


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """A model's folder, in fp32."""
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_run(folder: Path, base: Path, *, seed: int = 0, settings: str = "") -> Path:
    """A finished run's folder: a LoRA of random values on the model in `base`.

    `settings` are lines of YAML beside `model` and `data`.
    """
    import afina
    from afina.adapters import files

    model, tokenizer = afina.load(base, dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=4, alpha=64)])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    folder.mkdir(parents=True)
    files.save(edit, folder / "adapter", base=str(base), tokenizer=tokenizer)
    lines = (
        f"model: {base}\ndata: {{source: train.jsonl}}\n"
        if "data:" not in settings
        else f"model: {base}\n"
    )
    (folder / "config.yaml").write_text(lines + settings, encoding="utf-8")
    return folder


def row(tokenizer: Any, prompt: str, answer: str, *, number: int = 0, **meta: Any) -> Row:
    """A prepared chat row: trained on the answer and its end of turn."""
    before = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    head = tokenizer(before, add_special_tokens=False)["input_ids"]
    tail = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return Row(
        tokens=(*head, *tail, *newline),
        trained=(False,) * len(head) + (True,) * len(tail) + (False,),
        id=number,
        source=f"rows.jsonl:{number + 1}",
        prompt_tokens=len(head),
        meta=meta,
    )
