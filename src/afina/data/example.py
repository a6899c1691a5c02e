"""The one form that every format comes down to before it is rendered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One row: a conversation, a plain text, or a text with a class.

    Attributes:
        id, source: as in `RawRow`.
        messages: the conversation; empty for text.
        first_trained: turns before this one are context, never labels.
        tools: JSON schemas of the functions the assistant may call.
        plain: (prompt, completion) to be used when there is no chat template; None where that makes no sense.
        text: of a text row, or of a row with a class.
        label: the class as given.
        choices: the answers an evaluation may choose from.
        words, tags: words and the class of each, of a row whose words have classes.
    """

    id: int
    source: str
    messages: tuple[Message, ...] = ()
    first_trained: int = 0
    tools: list[dict[str, Any]] | None = None
    plain: tuple[str, str] | None = None
    text: str | None = None
    label: str | int | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """sha256 of the content alone: equal for duplicates, whatever their place, format or other columns."""
        content = [self.messages, self.tools, self.text, self.label]
        content += [self.words, self.tags] if self.words else []
        data = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()
