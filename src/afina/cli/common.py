"""What several verbs need: which model and adapter a name means, prompts from a file, and plain tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afina.config.document import read_file
from afina.errors import AdapterError, DataError, ModelError, RunError

Messages = list[dict[str, Any]]
"""One conversation: {"role", "content"} turns, in the form of chat templates."""


@dataclass(frozen=True)
class Target:
    """What a verb works on.

    Attributes:
        base: the model, as `afina.load` takes it.
        adapter: a folder in PEFT's format; None is the model alone.
        run: the run folder, when one was given.
        revision: of a model on the hub.
    """

    base: str
    adapter: Path | None = None
    run: Path | None = None
    revision: str | None = None


def resolve_run(name: str) -> Target:
    """The model and adapter that a run folder, an adapter folder or a model's name means.

    Raises:
        RunError: a run folder without an adapter, or whose configuration names no model.
        AdapterError: an adapter that does not say what its base is.
        ModelError: a folder that is none of the three.
    """
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file():
        return _of_run(folder)
    if (folder / "adapter_config.json").is_file():
        return _of_adapter(folder)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            "The folder is neither a run, nor an adapter, nor a model",
            got=name,
            wanted="config.yaml (a run), adapter_config.json (an adapter) or config.json (a model)",
        )
    return Target(str(folder) if folder.exists() else name)


def _of_run(folder: Path) -> Target:
    settings = read_file(folder / "config.yaml").value
    base = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(base, str):
        raise RunError("The run's configuration names no model", got=folder / "config.yaml")
    if (folder / "model" / "config.json").is_file():  # full fine-tuning keeps the whole model
        return Target(str(folder / "model"), None, folder)
    adapter = folder / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        raise RunError(
            "The run has no adapter yet",
            got=folder,
            wanted=f"{adapter}/adapter_config.json",
            cure="let it train to its end, or go on with: afina train … --resume",
        )
    return Target(base, adapter, folder, settings.get("revision"))


def _of_adapter(folder: Path) -> Target:
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise AdapterError("adapter_config.json is not JSON", got=f"{folder}: {error}") from None
    base = settings.get("base_model_name_or_path")
    if not base:
        raise AdapterError(
            "The adapter does not say which model it belongs to",
            got=folder / "adapter_config.json",
            wanted="base_model_name_or_path",
        )
    return Target(str(base), folder, None, settings.get("revision"))


def read_prompts(path: str) -> list[Messages]:
    """The conversations of a file, each ending where the model is to speak; "-" is the standard input.

    A `.jsonl` or `.json` row is a text, or holds `messages`, `prompt` (with `system`, if any), `instruction` (with
    `input`) or `text`; assistant turns at its end are left out, since they are the answer. Of any other file each
    line that is not empty is a prompt.

    Raises:
        DataError: naming file and line of a row that cannot be read as a prompt, or an empty file.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("The prompts cannot be read", got=f"{path} ({error})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.endswith(".json"):
        rows = _json(text, path)
        if not isinstance(rows, list):
            raise DataError(f"{path}: not a list of prompts", got=type(rows).__name__)
        prompts = [_messages(row, f"{path}, row {n}") for n, row in enumerate(rows, 1)]
    elif path.endswith(".jsonl"):
        prompts = [
            _messages(_json(line, f"{path}:{number}"), f"{path}:{number}") for number, line in lines
        ]
    else:
        prompts = [_messages(line.strip(), path) for _, line in lines]
    if not prompts:
        raise DataError("There are no prompts", got=path)
    return prompts


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON", got=str(error)) from None


def _messages(row: Any, where: str) -> Messages:
    if isinstance(row, str):
        return [{"role": "user", "content": row}]
    columns = row if isinstance(row, dict) else {}
    messages = columns.get("messages")
    if isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages):
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if messages:
            return messages
    if isinstance(columns.get("prompt"), list):
        return _messages({"messages": columns["prompt"]}, where)
    extra = columns.get("input")
    for name in ("prompt", "instruction", "text"):
        if isinstance(columns.get(name), str):
            content = columns[name] + (f"\n\n{extra}" if name == "instruction" and extra else "")
            system = columns.get("system")
            first = [{"role": "system", "content": system}] if system else []
            return [*first, {"role": "user", "content": content}]
    raise DataError(
        f"{where}: no prompt in this row",
        got=", ".join(map(str, columns)) or type(row).__name__,
        wanted="messages that do not end with the assistant, prompt, instruction, or text",
    )


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Rows as aligned columns of plain text, without spaces at the ends of lines."""
    cells = [list(map(str, row)) for row in ([head, *rows] if head else rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def print_json(value: Any) -> None:
    """A value as JSON on the standard output, for other programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
