"""From a prompt, a text or the messages of a chat, to the ids that an answer begins with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from afina.errors import ConfigError, DataError, ModelError, nearest
from afina.types import ROLES

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]
"""A text to go on with, the messages of a chat, or the ids of a prompt rendered already."""


def encode(
    tokenizer: Any, prompt: Prompt, *, system: str | None = None, tools: Any = None
) -> list[int]:
    """The ids that a prompt begins an answer with.

    Args:
        tokenizer: with a chat template, when the prompt is messages.
        prompt: see `Prompt`; a text is taken as it is, without the template.
        system: put before messages that have no system message of their own.
        tools: descriptions of functions, handed to the template.

    Raises:
        ModelError: messages, and no chat template or one that refuses them.
        DataError: a prompt without text, or of a wrong type, a message that says nothing or is nobody's, or tools that
            the template does not write.
        ConfigError: a system prompt for what is no messages, where it would do nothing.
    """
    rendered = isinstance(prompt, str) or (isinstance(prompt, Sequence) and _are_ids(prompt))
    if system is not None and rendered:
        raise ConfigError(
            "a system prompt has no place before a text",
            got=f"system {system[:60]!r}",
            wanted="messages, which the chat template puts it before",
            cure="put it into the text itself, or send messages",
        )
    if isinstance(prompt, str):
        ids = _begin(tokenizer) + list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not _alike(prompt):
        raise DataError(
            "this is no prompt",
            got=f"{type(prompt).__name__} {str(prompt)[:60]}",
            wanted="a text, a list of messages {role: …, content: …}, or a list of ids",
            cure="put each conversation in a list of its own: [[{'role': 'user', …}], …]"
            if isinstance(prompt, Mapping)
            else None,
        )
    elif _are_ids(prompt):
        ids = [int(token) for token in cast("Sequence[int]", prompt)]
    else:
        ids = _encode_messages(tokenizer, list(prompt), system, tools)
    if not ids:
        raise DataError(
            "a prompt has no tokens", got=repr(prompt), cure="give it some text, or leave it out"
        )
    return ids


def _alike(prompt: Sequence[Any]) -> bool:
    """Whether all are ids, or all messages."""
    return any(all(isinstance(one, kind) for one in prompt) for kind in (int, Mapping))


def _are_ids(prompt: Sequence[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], int)


def check_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list.

    Raises:
        DataError: one text, whose letters would each be a prompt, or something else that is no list.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise DataError(
            "prompts are a list, with an entry for each",
            got=f"{type(prompts).__name__} {str(prompts)[:60]!r}",
            wanted="[prompt, …]",
            cure="put the one prompt in a list: generate(model, tokenizer, [prompt])",
        )
    return list(prompts)


def check_pair(model: Any, tokenizer: Any) -> None:
    """Raises for what is no model with a tokenizer, such as the two the wrong way round.

    Raises:
        ModelError: one of them is not.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "decode") or not hasattr(model, "config"):
        raise ModelError(
            "a model and its tokenizer are needed",
            got=f"{type(model).__name__} and {type(tokenizer).__name__}",
            wanted="both, in this order",
            cure="model, tokenizer = afina.load(NAME)",
        )


def _begin(tokenizer: Any) -> list[int]:
    """The begin-of-text token, where the tokenizer puts one before a text (what it puts after one is no prompt)."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []


def _encode_messages(
    tokenizer: Any, messages: list[Any], system: str | None, tools: Any
) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "this model has no chat template, so it cannot be sent messages",
            wanted="a tokenizer with a chat template, as instruction-tuned models have",
            cure="give the prompt as plain text, or tune with a model that has a template",
        )
    for number, message in enumerate(messages):
        _check_message(number, message)
    if system is not None and not any(m["role"] == "system" for m in messages):
        messages = [{"role": "system", "content": system}, *messages]
    try:
        text = _rendered(tokenizer, messages, tools)
        lost = bool(tools) and text == _rendered(tokenizer, messages, None)
    except Exception as error:  # a template is a program, and may fail as any does
        raise ModelError(
            "the chat template refuses these messages",
            got=f"roles {[m['role'] for m in messages]}; it says: {error}",
            cure="change the order or the roles of the messages",
        ) from error
    if lost:
        raise DataError(
            "the chat template does not write tools: the model would never see them",
            got=f"tools {str(tools)[:80]}",
            wanted="a template that writes them, or no tools",
            cure="write them into the system prompt, or use a model whose chat template writes tools",
        )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(tokenizer: Any, messages: list[Any], tools: Any) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    """Raises for what most templates would write down as it is, and the model never saw."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(
            f"message {number} has no role",
            got=f"keys {list(message)[:10]}" if role is None else f"role {role!r}"[:80],
            wanted="{'role': 'user', 'content': …}",
        )
    if role not in ROLES:
        near = nearest(role.lower(), ROLES, most=1)
        raise DataError(
            f"message {number} has an unknown role",
            got=repr(role[:60]),
            wanted=", ".join(ROLES),
            cure=f"did you mean {near[0]!r}?" if near else "say who speaks: user, or assistant?",
        )
    calls = content is None and message.get("tool_calls")
    if not calls and not isinstance(content, str | list | tuple):
        raise DataError(
            f"message {number} ({role}) has no content"
            if content is None
            else f"message {number} ({role}) has content that is not text",
            got=f"keys {list(message)[:10]}" if content is None else repr(content)[:80],
            wanted="a text",
        )
