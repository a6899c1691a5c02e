"""What several verbs need: which model and adapter a name means, and plain tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afina.config.document import read_file
from afina.errors import AdapterError, ModelError, RunError

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
