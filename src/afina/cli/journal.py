"""Answers on disk as they come: an interrupt, a crash or a full disk loses none, and the same command goes on.

Beside the output lies `OUTPUT.part` while the verb works: a line that says which command it is of, then one line an
answer, in the order in which they were made. When all are there the output is written whole, and the part goes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afina.cli.output import note, unwritable
from afina.errors import ConfigError, counted

SUFFIX = ".part"

HEAD = "answers of"
"""The key of a part's first line."""


def key_of(*parts: Any) -> str:
    """What a command depends on, as a short text: equal for equal commands only."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Journal:
    """The part of one output.

    Args:
        out: the output, as the user names it.
        key: of the command, from `key_of`.
        force: a part of another command may be replaced.

    Attributes:
        file: the part.
        done: the answers found in it, by number.

    Raises:
        ConfigError: the part is another command's, or no part at all, or cannot be written.
    """

    def __init__(self, out: str, key: str, *, force: bool) -> None:
        file = Path(out)
        self.out, self.file = out, file.with_name(file.name + SUFFIX)
        self.done: dict[int, dict[str, Any]] = {}
        try:
            found = self._read(key)
            if found is None and not force:
                raise ConfigError(
                    "unfinished answers of another command are in the way",
                    got=self.file,
                    cure="repeat that command, which goes on with them; or name another output; or "
                    "say --force to drop them",
                )
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if found:
                os.truncate(self.file, found)
            else:
                self.file.write_text(json.dumps({HEAD: key}) + "\n", encoding="utf-8")
        except OSError as error:
            raise unwritable(self.file, error, "name a file elsewhere") from None

    def _read(self, key: str) -> int | None:
        """Takes what is there; the bytes that are whole lines of this command, 0 for no file, None for another's."""
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return 0
        begins = f'{{"{HEAD}"'.encode()
        if content[: len(begins)] != begins[: len(content)]:
            raise ConfigError(
                "a file that is no unfinished answers has the name that they would have",
                got=self.file,
                cure="move it away, or name another output",
            )
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        size = 0
        try:
            for number, line in enumerate(lines):
                value = json.loads(line)
                if number == 0 and value != {HEAD: key}:
                    return None
                if number:
                    self.done[int(value.pop("id"))] = value
                size += len(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            return size or None  # damaged: what comes before still counts
        return size or None

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes some answers, each a row without its `id`.

        Raises:
            ConfigError: it cannot be written; what was written before is there.
        """
        text = "".join(
            json.dumps({"id": number, **row}, ensure_ascii=False) + "\n"
            for number, row in answers.items()
        )
        try:
            with self.file.open("a", encoding="utf-8") as part:
                part.write(text)
        except OSError as error:
            raise unwritable(self.file, error, "make room; the same command then goes on") from None
        self.done.update({number: dict(row) for number, row in answers.items()})

    def remove(self) -> None:
        """The output is written: the part goes."""
        self.file.unlink(missing_ok=True)

    def leave(self, total: int) -> None:
        """The verb ends before its time: says what is kept, of how many; nothing is left of nothing."""
        if not self.done:
            self.remove()
            return
        note(
            f"{len(self.done)} of {counted(total, 'answer')} are kept in {self.file}: "
            "the same command goes on from there"
        )
