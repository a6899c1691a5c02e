"""What several verbs need: which model and adapter a name means, and plain tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from afina.adapters.target import Target, located, resolve_run

__all__ = ["Messages", "Target", "located", "print_json", "resolve_run", "table"]

Messages = list[dict[str, Any]]
"""One conversation: {"role", "content"} turns, in the form of chat templates."""


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
