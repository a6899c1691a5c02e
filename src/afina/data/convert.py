"""From the columns of each format to an `Example`, with every value's type checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from afina.data.example import Example, Message
from afina.data.sources import RawRow
from afina.errors import DataError, nearest
from afina.types import ROLES

CHAT_COLUMNS = ("messages", "conversations", "conversation")

_OTHER_NAMES = {
    "human": "user",
    "person": "user",
    "customer": "user",
    "prompter": "user",
    "question": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "answer": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names in the wild that can mean one thing only -> the role. An agent may be a clerk or a program: it is no entry."""

# The layout of the Alpaca paper's prompts, used only for tokenizers without a chat template.
_ALPACA = "### Instruction:\n{instruction}\n\n### Response:\n"
_ALPACA_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def chat_column(columns: Mapping[str, Any]) -> str:
    """The column that holds the turns, "" if there is none."""
    return next((name for name in CHAT_COLUMNS if columns.get(name) is not None), "")


def _wrong(row: RawRow, column: str, value: Any, wanted: str) -> DataError:
    return DataError(
        f"{row.source}: column {column!r} has the wrong type",
        got=f"{type(value).__name__} {_shown(value)!r}",
        wanted=wanted,
        cure="put it in quotes" if isinstance(value, (bool, int, float)) else None,
    )


def _shown(value: Any) -> str:
    """The beginning of a value as text."""
    try:
        return str(value)[:60]
    except ValueError:  # Python writes no integer of thousands of digits
        return "a very long number"


def _string(row: RawRow, column: str, default: str | None = None) -> str:
    value = row.columns.get(column)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _wrong(row, column, value, "text")
    try:
        return _whole(row, column, str(value))
    except ValueError as error:
        raise _wrong(row, column, value, "text") from error


def _whole(row: RawRow, where: str, text: str) -> str:
    """The text, refused if it holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{row.source}: {where} holds a broken character",
            got=f"{text[error.start]!r} after {text[: error.start][-20:]!r}",
            wanted="whole Unicode characters",
            cure=r"an emoji cut in two by an earlier tool? remove the lone \ud800-\udfff escape",
        ) from error
    return text


def _list_of(row: RawRow, column: str) -> list[Any] | None:
    """A column that holds a list, or a list written as JSON text (as in CSV)."""
    value = row.columns.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(row, column, value, "a list, or a list written as JSON") from error
    if not isinstance(value, (list, tuple)):
        raise _wrong(row, column, value, "a list")
    return list(value)


def _common(row: RawRow) -> dict[str, Any]:
    choices = _list_of(row, "choices") or []
    if not all(isinstance(choice, (str, int, float)) for choice in choices):
        raise _wrong(row, "choices", choices, "a list of texts")
    return {
        "id": row.id,
        "source": row.source,
        "tools": _list_of(row, "tools"),
        "choices": tuple(str(choice) for choice in choices),
    }


def _content(row: RawRow, number: int, value: Any) -> str | None:
    """A message's text: as given, or its text parts joined."""
    if value is None:
        return None
    if isinstance(value, str):
        return _whole(row, f"message {number}", value)
    if isinstance(value, list | tuple) and all(_is_text(part) for part in value):
        return _whole(row, f"message {number}", "".join(part["text"] for part in value))
    raise DataError(
        f"{row.source}: message {number} has content that is not text",
        got=f"{type(value).__name__} {str(value)[:80]!r}",
        wanted="a text, or a list of {type: text, text: …}",
        cure="put it in quotes"
        if isinstance(value, (bool, int, float))
        else "images and other media are not supported",
    )


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") in ("text", "input_text", "output_text")
        and isinstance(part.get("text"), str)
    )


def _role(row: RawRow, number: int, turn: Mapping[str, Any]) -> str:
    """The turn's role, under the name that templates know.

    Raises:
        DataError: it has none, or one that could mean several things.
    """
    name = turn.get("role") if turn.get("role") is not None else turn.get("from")
    if not isinstance(name, str):
        raise DataError(
            f"{row.source}: message {number} has no role",
            got=f"keys {list(turn)[:10]}" + ("" if name is None else f", role {str(name)[:40]!r}"),
            wanted="{role: user or assistant or system or tool, content: …}",
            cure=_cure_of_keys(turn),
        )
    plain = name.strip().lower()
    role = plain if plain in ROLES else _OTHER_NAMES.get(plain)
    if role is None:
        near = nearest(plain, (*ROLES, *_OTHER_NAMES), most=1, alike=0.75)
        meant = [_OTHER_NAMES.get(one, one) for one in near]
        raise DataError(
            f"{row.source}: message {number} has an unknown role",
            got=repr(name[:60]),
            wanted=f"{', '.join(ROLES)} (or {', '.join(_OTHER_NAMES)})",
            cure=f"did you mean {meant[0]!r}?" if meant else "say who speaks: user, or assistant?",
        )
    return role


def _cure_of_keys(turn: Mapping[str, Any]) -> str | None:
    """What the keys of a turn without a role may have been meant as."""
    for key in turn:
        if str(key).lower() in ("speaker", "author", "sender", "name", "type"):
            return f"rename the key {key!r} to 'role'"
    near = nearest("role", [str(key) for key in turn], most=1)
    return f"did you mean 'role' by {near[0]!r}?" if near else None


def _messages(row: RawRow, column: str, turns: Any) -> list[Message]:
    """Checked messages of the form {role, content, …}; keys without a value are left out."""
    if not isinstance(turns, (list, tuple)):
        raise _wrong(row, column, turns, "a list of {role: …, content: …}")
    if not turns:
        raise DataError(
            f"{row.source}: an empty conversation",
            got=f"no turn in column {column!r}",
            wanted="a user's turn and an assistant's",
            cure="remove that row",
        )
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise DataError(
                f"{row.source}: message {number} has no role",
                got=f"{type(turn).__name__} {str(turn)[:80]!r}",
                wanted="{role: user or assistant or system or tool, content: …}",
            )
        role = _role(row, number, turn)
        kept = {str(k): v for k, v in turn.items() if v is not None and k not in ("from", "value")}
        said = turn.get("content") if turn.get("content") is not None else turn.get("value")
        content = _content(row, number, said)
        if content is None and "tool_calls" not in kept:
            raise DataError(
                f"{row.source}: message {number} ({role}) has no content",
                got=f"keys {list(turn)[:10]}",
                wanted="content, or tool_calls",
                cure=next(
                    (
                        f"rename the key {k!r} to 'content'"
                        for k in ("text", "message")
                        if k in kept
                    ),
                    None,
                ),
            )
        messages.append({**kept, "role": role, "content": content or ""})
    return messages


def _with_system(row: RawRow, messages: list[Message]) -> list[Message]:
    system = _string(row, "system", "")
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def from_messages(row: RawRow) -> Example:
    """Turns of {role, content}, tool calls and results included."""
    column = chat_column(row.columns)
    messages = _with_system(row, _messages(row, column, _list_of(row, column)))
    return Example(messages=tuple(messages), **_common(row))


def from_sharegpt(row: RawRow) -> Example:
    """ShareGPT: [{from: human, value: …}, {from: gpt, value: …}]."""
    return from_messages(row)


def from_prompt_completion(row: RawRow) -> Example:
    """Texts, or lists of messages on either side."""
    prompt, completion = row.columns["prompt"], row.columns["completion"]
    if isinstance(prompt, (list, tuple)) or isinstance(completion, (list, tuple)):
        before = (
            _messages(row, "prompt", prompt)
            if isinstance(prompt, (list, tuple))
            else [{"role": "user", "content": _string(row, "prompt")}]
        )
        before = _with_system(row, before)
        after = (
            _messages(row, "completion", completion)
            if isinstance(completion, (list, tuple))
            else [{"role": "assistant", "content": _string(row, "completion")}]
        )
        return Example(messages=(*before, *after), first_trained=len(before), **_common(row))
    system = _string(row, "system", "")
    asked, answer = _string(row, "prompt"), _string(row, "completion")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    plain = f"{system}\n\n{asked}" if system else asked
    return Example(
        messages=tuple(_with_system(row, messages)), plain=(plain, answer), **_common(row)
    )


def from_alpaca(row: RawRow) -> Example:
    """Instruction, optional input and history ([[asked, answered], …]), output."""
    instruction, given = _string(row, "instruction"), _string(row, "input", "")
    answer, system = _string(row, "output"), _string(row, "system", "")
    messages: list[Message] = []
    for pair in _list_of(row, "history") or []:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _wrong(row, "history", pair, "pairs [asked, answered]")
        messages += [
            {"role": "user", "content": str(pair[0])},
            {"role": "assistant", "content": str(pair[1])},
        ]
    asked = f"{instruction}\n\n{given}" if given else instruction
    plain = (_ALPACA_INPUT if given else _ALPACA).format(instruction=instruction, input=given)
    plain = f"{system}\n\n{plain}" if system else plain
    alone = not messages
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Example(
        messages=tuple(_with_system(row, messages)),
        plain=(plain, answer) if alone else None,
        **_common(row),
    )


def from_text(row: RawRow) -> Example:
    """A text, every token of which is learnt."""
    return Example(text=_string(row, "text"), **_common(row))


def from_text_label(row: RawRow) -> Example:
    """A text and its class: a name or a whole number."""
    label = row.columns["label"]
    if not isinstance(label, (str, int)) or label == "":
        raise _wrong(row, "label", label, "a class: a name or a whole number")
    return Example(text=_string(row, "text"), label=label, **_common(row))


def from_tokens_tags(row: RawRow) -> Example:
    """Words and the class of each: names or whole numbers."""
    words, tags = _list_of(row, "tokens") or [], _list_of(row, "tags") or []
    if not words or not all(isinstance(word, str) and word for word in words):
        raise _wrong(row, "tokens", words, "a list of words")
    if not all(isinstance(tag, str | int) and tag != "" for tag in tags):
        raise _wrong(row, "tags", tags, "a list of classes: names or whole numbers")
    if len(words) != len(tags):
        raise DataError(
            f"{row.source}: every word needs one tag",
            got=f"{len(words)} tokens and {len(tags)} tags",
            cure="correct that row, or remove it",
        )
    words = [_whole(row, "tokens", word) for word in words]
    return Example(words=tuple(words), tags=tuple(map(str, tags)), **_common(row))


CONVERT: dict[str, Callable[[RawRow], Example]] = {
    "messages": from_messages,
    "sharegpt": from_sharegpt,
    "prompt_completion": from_prompt_completion,
    "alpaca": from_alpaca,
    "text_label": from_text_label,
    "tokens_tags": from_tokens_tags,
    "text": from_text,
}
