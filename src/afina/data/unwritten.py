"""What a row says and its rendered text does not: the chat template writes some fields, and drops others in silence.

No template is asked what it knows. A row that has a field is rendered once more without it: where the text stays the
same, the field would have taught nothing. Rows without such fields are rendered no second time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from afina.data.example import Example, Message
from afina.data.templates import render
from afina.errors import DataError

SPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that say something beside its content; others (name, id, tool_call_id) tell who and which."""

SHARES = ("weight", "training", "loss")
"""Fields by which other programs choose the messages that train: OpenAI's and Mistral's weight, Axolotl's training,
ms-swift's loss."""


def refuse_unwritten(tokenizer: Any, example: Example, text: str) -> None:
    """Raises for a row of which something is not in its text.

    Args:
        tokenizer: with a chat template.
        example: the row.
        text: its messages, rendered.

    Raises:
        DataError: naming the first field, or message, that the chat template does not write.
    """
    if example.tools and _same(tokenizer, replace(example, tools=None), text):
        raise _unwritten(example, "tools", example.tools, "leave that column out of the rows")
    for field in SPOKEN:
        holder = next((one for one in example.messages if one.get(field)), None)
        if holder is not None and _same(tokenizer, _without(example, field), text):
            cure = f"write what it says into the message's content and leave {field} out"
            raise _unwritten(example, field, holder[field], cure)
    for number, message in enumerate(example.messages):
        content = message["content"].strip()
        # A text that is not there as given was changed, or is gone: only a second rendering tells.
        if content and content not in text:
            others = example.messages[:number] + example.messages[number + 1 :]
            if others and _same(tokenizer, replace(example, messages=others), text):
                what = f"a message of the role {message['role']}"
                cure = "put what it says into a message of the user or the assistant"
                raise _unwritten(example, what, message["content"], cure)


def refuse_shares(example: Example, trained: Collection[int], *, every_token: bool = False) -> None:
    """Raises for a message that is to train less or more than the others, which it would not.

    Args:
        example: the row.
        trained: the numbers of the messages that train.
        every_token: all messages train.

    Raises:
        DataError: naming the first such message.
    """
    for number, message in enumerate(example.messages):
        for field in SHARES:
            share = message.get(field)
            if share is not None and share != 1 and (every_token or number in trained):
                raise DataError(
                    f"{example.source}: the {field} of a message would do nothing",
                    got=f"{field} {str(share)[:40]} of message {number}",
                    wanted="1, or none: every trained message trains alike",
                    cure=f"leave {field} out; data.train_on=last trains the last answer alone",
                )


def refuse_tools_without_template(example: Example) -> None:
    """Raises for a row with tools that no chat template is there to write.

    Raises:
        DataError: see above.
    """
    if example.tools:
        raise DataError(
            f"{example.source}: tools would do nothing: no chat template is used, and nothing else writes them",
            got=f"tools {str(example.tools)[:80]}",
            wanted="what the prompt says, and nothing else",
            cure="write them into the prompt and leave that column out, or use a model whose chat template "
            "writes tools",
        )


def _without(example: Example, field: str) -> Example:
    """The row with a field taken from every message: templates may write it for the last turns alone.

    With it goes what says the same under another of these names, since either may be what is written.
    """

    def bare(message: Message) -> Message:
        said = message.get(field)
        alike = {k for k in SPOKEN if said and message.get(k) == said}
        return {k: v for k, v in message.items() if k != field and k not in alike}

    return replace(example, messages=tuple(map(bare, example.messages)))


def _same(tokenizer: Any, changed: Example, text: str) -> bool:
    """Whether the changed row has the same text; one that the template refuses has not."""
    try:
        return render(tokenizer, changed.messages, changed.tools, source=changed.source) == text
    except DataError:
        return False


def _unwritten(example: Example, what: str, value: Any, cure: str) -> DataError:
    return DataError(
        f"{example.source}: the chat template does not write {what}: the model would never see it",
        got=f"{what} {str(value)[:80]!r}",
        wanted="a row all of which the template writes",
        cure=f"use a model whose chat template writes it, or {cure}",
    )
