"""Prompts from files, read as training data is: the same readers, formats and mapped columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afina.cli.common import Messages
from afina.data.badrows import BadRows
from afina.data.convert import (
    chat_column,
    from_alpaca,
    from_messages,
    from_prompt_completion,
    from_sharegpt,
)
from afina.data.example import Example
from afina.data.formats import rename
from afina.data.readers import kind, read_lines
from afina.data.settings import DataSettings
from afina.data.sources import RawRow, read
from afina.errors import ConfigError, DataError
from afina.places import local

STDIN = "the standard input"


@dataclass(frozen=True)
class Asked:
    """One prompt.

    Attributes:
        messages: the conversation, ending where the model is to speak.
        plain: the same as one text, for when there is no chat template; None where that makes no sense.
        tools: JSON schemas of the functions the model may call.
        source: "file:line".
    """

    messages: Messages
    plain: str | None = None
    tools: list[dict[str, Any]] | None = None
    source: str = ""

    def as_prompt(self, *, plain: bool) -> Any:
        """What `models.prompts.encode` takes: the messages, or the text.

        Raises:
            DataError: the text is wanted, and a conversation cannot be joined into one.
        """
        if not plain:
            return self.messages
        if self.plain is None:
            raise DataError(
                f"{self.source}: without a chat template a prompt is one text",
                got=f"messages of {', '.join(str(m.get('role')) for m in self.messages)}",
                wanted="a single user message",
                cure="put all of it into one prompt",
            )
        return self.plain


def read_prompts(path: str, columns: Mapping[str, str] | None = None) -> list[Asked]:
    """The prompts of a file, folder or hub data set; "-" is the standard input.

    Of a `.txt` file, the standard input, and a file of no known kind each line that is not blank is a prompt. Rows of
    the other kinds hold `messages` or `conversations`, `prompt` (with `system`, if any), `instruction` (with `input`)
    or `text`; assistant turns at the end are left out, since they are the answer.

    Args:
        path: as the user names it.
        columns: our name -> the file's column, as `data.columns` of the run; those that a row lacks are not needed.

    Raises:
        DataError: naming file and line of a row that cannot be read as a prompt, or a source without rows.
    """
    file = local(path)
    if path == "-":
        lines = _typed(STDIN)
    elif file.is_file() and kind(file) in (None, ".txt"):
        lines = _lines(path, file)
    else:
        bad = BadRows()
        found = read(path, DataSettings(), "eval", bad)
        good = bad.good(
            found.rows, lambda row: _asked(_mapped(row, columns or {})), lambda row: row.source
        )
        bad.refuse(path, found.total, offer=None)
        return [asked for _, asked in good]
    asked = [_of_text(text.strip(), source) for source, text in lines]
    if not asked:
        raise DataError(
            "there are no prompts", got=STDIN if path == "-" else path, wanted="one prompt a line"
        )
    return asked


def _lines(path: str, file: Path) -> Iterator[tuple[str, str]]:
    for line, row in read_lines(file):
        if isinstance(row, DataError):
            raise row
        yield f"{path}:{line}", row["text"]


def columns_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The mapped columns in a run's settings (`data.columns`).

    Raises:
        ConfigError: they are no mapping of names.
    """
    data = settings.get("data")
    columns = data.get("columns") if isinstance(data, dict) else None
    if columns is None:
        return {}
    if not isinstance(columns, dict) or not all(isinstance(v, str) for v in columns.values()):
        raise ConfigError(
            "the run's data.columns cannot be used", got=columns, wanted="{prompt: question, …}"
        )
    return columns


def _typed(source: str) -> Iterator[tuple[str, str]]:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not text",
            got=f"byte 0x{error.object[error.start]:02x}",
            wanted="UTF-8 text, a prompt a line",
        ) from None
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            yield f"{source}:{number}", line


def _of_text(text: str, source: str) -> Asked:
    return Asked([{"role": "user", "content": text}], text, None, source)


def _mapped(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    """The row under our names; a mapped column that it lacks may be the answer, which no prompt needs."""
    there = {ours: theirs for ours, theirs in columns.items() if theirs in row.columns}
    return rename([row], there)[0]


def _asked(row: RawRow) -> Asked:
    example = _example(row)
    messages = list(example.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise _no_prompt(row)
    alone = len(messages) == 1 and messages[0]["role"] == "user"
    plain = messages[0]["content"] if alone else None
    return Asked(
        messages, example.plain[0] if example.plain else plain, example.tools, example.source
    )


def _example(row: RawRow) -> Example:
    """The row as its format makes it, with an empty answer where the format has one apart."""
    columns = {name: value for name, value in row.columns.items() if value is not None}
    chat = chat_column(columns)
    turns = columns.get(chat)
    if chat:
        first = turns[0] if isinstance(turns, (list, tuple)) and turns else None
        old = isinstance(first, Mapping) and "from" in first
        return (from_sharegpt if old else from_messages)(RawRow(row.id, row.source, columns))
    if "prompt" in columns:
        filled = {**columns, "completion": ""}
        return from_prompt_completion(RawRow(row.id, row.source, filled))
    if "instruction" in columns:
        return from_alpaca(RawRow(row.id, row.source, {**columns, "output": ""}))
    if "text" in columns:
        asked = {**columns, "prompt": columns["text"], "completion": ""}
        return from_prompt_completion(RawRow(row.id, row.source, asked))
    raise _no_prompt(row)


def _no_prompt(row: RawRow) -> DataError:
    return DataError(
        f"{row.source}: no prompt in this row",
        got=f"columns {', '.join(map(str, row.columns))}",
        wanted="messages that do not end with the assistant, prompt, instruction, or text",
        cure="rename the column; a run trained with data.columns reads the same names here",
    )
