"""Conversations to text by the tokenizer's own chat template, and where in that text the assistant speaks.

A turn is found by rendering prefixes of the conversation, as generation would see them:

    render(messages before the turn, add_generation_prompt=True)   must begin the whole text: the turn starts there
    render(messages up to the turn)                                must begin the whole text: the turn ends there

Nothing is asked of the template: no {% generation %} markers and no list of known models. A template that rewrites
earlier turns when later ones are added cannot pass, and is refused rather than masked wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from afina.data.example import Example, Message
from afina.errors import DataError


@dataclass(frozen=True)
class Turn:
    """Where one assistant turn lies in the rendered text, in characters: [start, end).

    `exact` says that text[:start] is what generation would be given; otherwise the turn was found by its content,
    because the template's generation prompt is not how it writes an answer.
    """

    message: int
    start: int
    end: int
    exact: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with its assistant turns in order."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Stop:
    """How a chat template ends the assistant's turn.

    Attributes:
        ids: tokens that end a turn; the first is the template's own, if it has one.
        own: the template writes one itself (otherwise the end-of-text token is added to the last turn).
    """

    ids: tuple[int, ...]
    own: bool


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
    source: str = "a conversation",
) -> str:
    """The text of a conversation by the tokenizer's chat template; "" for no messages.

    Raises:
        DataError: the template refuses the conversation (its own words are passed on).
    """
    if not messages:
        return ""
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # a template is a program, and may fail as any does
        raise DataError(
            f"{source}: the chat template refuses this conversation",
            got=f"{_said(error)}; roles {[message['role'] for message in messages]}",
            wanted="a sequence of roles the template knows",
            cure="merge or remove messages (a system text can open the first user message), "
            "or set data.template=none",
        ) from error


def _said(error: Exception) -> str:
    """What a template says when it refuses; with the kind of error where it says nothing on purpose."""
    kind = type(error).__name__
    return str(error) if kind == "TemplateError" else f"{kind}: {error}"


def render_turns(tokenizer: Any, example: Example, which: Sequence[int]) -> Rendered:
    """The whole text of a conversation and the place of the turns `which` (indices of its messages).

    Raises:
        DataError: the template refuses the conversation, or rewrites a turn when later ones follow.
    """
    text = render(tokenizer, example.messages, example.tools, source=example.source)
    turns = tuple(_turn(tokenizer, example, text, number) for number in which)
    return Rendered(text, turns)


def _turn(tokenizer: Any, example: Example, text: str, number: int) -> Turn:
    messages, tools, source = example.messages, example.tools, example.source
    end = len(text)
    if number + 1 < len(messages):
        until = render(tokenizer, messages[: number + 1], tools, source=source)
        if not text.startswith(until):
            raise _rewritten(source, number, text, until)
        end = len(until)
    prompt = _try_render(tokenizer, example, number, generation_prompt=True)
    if prompt and len(prompt) <= end and text.startswith(prompt):
        return Turn(number, len(prompt), end, exact=True)
    before = _try_render(tokenizer, example, number, generation_prompt=False) or ""
    if not text.startswith(before):
        raise _rewritten(source, number, text, before)
    content = messages[number]["content"]
    for shown in (content, content.strip()):
        start = text.rfind(shown, len(before), end) if shown else -1
        if start >= 0:
            return Turn(number, start, end, exact=False)
    raise DataError(
        f"{source}: the answer of message {number} cannot be found in the rendered conversation",
        got=f"content {content[:60]!r} in {text[len(before) : end][:120]!r}",
        wanted="a chat template that writes its generation prompt before an answer, or the answer as given",
        cure="use another chat template, or data.train_on=text",
    )


def _try_render(
    tokenizer: Any, example: Example, number: int, *, generation_prompt: bool
) -> str | None:
    """The messages before `number` rendered, or None where the template does not take that prefix alone."""
    try:
        return render(
            tokenizer,
            example.messages[:number],
            example.tools,
            generation_prompt=generation_prompt,
            source=example.source,
        )
    except DataError:
        return None


def _rewritten(source: str, number: int, text: str, prefix: str) -> DataError:
    pairs = enumerate(zip(text, prefix, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(prefix)))
    near = slice(max(0, at - 20), at + 40)
    return DataError(
        f"{source}: the chat template rewrites the conversation around message {number} when later messages follow",
        got=f"{text[near]!r} in the whole, {prefix[near]!r} when it ends earlier",
        wanted="a template whose text for a beginning is the beginning of its text for the whole",
        cure="data.train_on=last trains the final turn only; or use another chat template",
    )


def stop_of(tokenizer: Any, stop_ids: Sequence[int] = ()) -> Stop:
    """How the tokenizer's chat template ends the assistant's turn, found by rendering a short exchange.

    Args:
        tokenizer: with a chat template.
        stop_ids: tokens that generation stops on, if known; accepted besides the template's own.
    """
    answer = "Answer."
    exchange = [
        {"role": "user", "content": "Question?"},
        {"role": "assistant", "content": answer},
    ]
    text = render(tokenizer, exchange, source="a trial exchange")
    tail = text[text.rfind(answer) + len(answer) :]
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {*tokenizer.all_special_ids, *stop_ids}
    tail_ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
    found = [id for id in tail_ids if id in special][:1]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Stop(tuple(dict.fromkeys([*found, *eos, *stop_ids])), own=bool(found))
