"""Tiny tokenizers with chat templates of the common families, and masks written as text."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from afina.types import Row

_CORPUS = [
    "Question: what is the capital of France? Answer: Paris, of course.",
    "Translate to Portuguese: good morning. Bom dia, tudo bem?",
    "one two three four five six seven eight nine ten",
    '{"intent": "PlayMusic", "slots": {"year": "1959"}}',
    "user assistant system You are a helpful assistant. Hello! Hi there.",
] * 4

# ChatML with a default system prompt and a line end after every turn, as SmolLM2's.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "You help.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begin-of-text once, a header of special tokens, content trimmed, nothing after the stop, as Llama 3's.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# No generation prompt at all: [/INST] ends the question, eos the answer, as Mistral's; roles must alternate.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The assistant is called model, there is no system role, and the stop is not the eos, as Gemma's.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Thoughts are written for the last answer only and dropped from earlier ones: rewrites what came before.
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt opens a thought which no written answer has.
OPENS_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Plain words, and nothing that ends a turn.
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# The next turn's opening is what ends an answer, as GLM's.
OPENING_STOPS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Tools are listed first; a call is written as JSON between marks.
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPECIAL = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|start|>", "<|end|>", "<|eot|>"),
    MISTRAL: (),
    GEMMA: ("<start_of_turn>", "<end_of_turn>"),
    OPENING_STOPS: ("<|user|>", "<|assistant|>"),
    ENDLESS: (),
}


@cache
def _backend(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # "\n\n" is one token, as in most vocabularies: an answer that begins with a line end then merges with its prompt.
    tokenizer.train_from_iterator([*_CORPUS, *["a\n\nb\n\n"] * 9], trainer)
    return tokenizer.to_str()


def tokenizer_of(template: str | None, *, pad: str | None = None, bos: bool = True) -> Any:
    """A trained byte-level BPE of 420 tokens with the special tokens that a template writes."""
    special = _SPECIAL.get(template or "", ("<|im_start|>", "<|im_end|>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(special)),
        eos_token="</s>",
        bos_token="<s>" if bos else None,
        pad_token=pad,
        additional_special_tokens=list(special),
    )
    tokenizer.chat_template = template
    return tokenizer


class _Slow(PreTrainedTokenizerFast):
    """Says that it gives no offsets, as tokenizers written in Python."""

    @property
    def is_fast(self) -> bool:
        return False


def metaspace_tokenizer(*, slow: bool = False) -> Any:
    """Whole words with a mark for the space before them, as SentencePiece's; no chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["one two Paris one two Par is ."] * 9, trainer)
    kind = _Slow if slow else PreTrainedTokenizerFast
    return kind(tokenizer_object=tokenizer, eos_token="</s>")


def marked(row: Row, tokenizer: Any) -> str:
    """The row as text with its labels between « and »."""
    out, inside = "", False
    for at, label in enumerate((*row.trained, False)):
        if label != inside:
            out, inside = out + ("«" if label else "»"), label
        if at < len(row.tokens):
            out += tokenizer.decode([row.tokens[at]], clean_up_tokenization_spaces=False)
    return out


def turns(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A row of messages: user, assistant, user, …"""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, *messages]}
