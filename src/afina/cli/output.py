"""What verbs write: whole files or none, and progress for whoever watches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from afina.errors import ConfigError


def refuse_existing(path: str | None, *, force: bool) -> None:
    """Checks, before anything is loaded, that a file may be written.

    Raises:
        ConfigError: it exists and nobody said --force, or it is a folder.
    """
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ConfigError("the output is a folder", got=path, wanted="the name of a file")
    if Path(path).exists() and not force:
        raise ConfigError(
            "the output exists", got=path, cure="name another file, or say --force to replace it"
        )


def write_text(path: str, text: str) -> None:
    """Writes a file, and its folder if need be, whole or not at all; "-" is the standard output."""
    if path == "-":
        sys.stdout.write(text)
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str, value: Any) -> None:
    """Writes one JSON value, indented."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: str, rows: Iterable[Any]) -> None:
    """Writes one JSON value a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def note(text: str) -> None:
    """A line for people, beside the results."""
    print(text, file=sys.stderr, flush=True)


def progress() -> Callable[[str, int, int], None] | None:
    """Shows "answers 16/200" in place, or None where nobody watches."""
    if not sys.stderr.isatty():
        return None

    def show(what: str, done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{what} {done}/{total}\033[K", end=end, file=sys.stderr, flush=True)

    return show
