"""A configuration written down as YAML that loads back equal, with the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afina.config.document import write
from afina.config.load import Resolved, values_of

_COMMENT_COLUMN = 48


def dump(resolved: Resolved[Any]) -> str:
    """The configuration as YAML, every value with its origin as a comment; `load_config` gives back an equal one."""
    lines: list[str] = []
    values = values_of(resolved.config, resolved.keys)
    _lines(
        lines,
        {p: v for p, v in values.items() if p[0] in ("model", "revision", "val")},
        0,
        resolved,
        0,
    )
    _group(lines, "data", {p: v for p, v in values.items() if p[0] == "data"}, resolved)
    _techniques(lines, values, resolved)
    for name in ("train", "eval", "parallel"):
        _group(lines, name, {p: v for p, v in values.items() if p[0] == name}, resolved)
    return "\n".join(lines) + "\n"


def _group(
    lines: list[str], name: str, values: Mapping[tuple[str, ...], Any], resolved: Resolved[Any]
) -> None:
    lines.append(f"{name}:")
    _lines(lines, values, 1, resolved, 2)


def _techniques(
    lines: list[str], values: Mapping[tuple[str, ...], Any], resolved: Resolved[Any]
) -> None:
    if not resolved.keys:
        lines.append("techniques: []")
        return
    lines.append("techniques:")
    for key in resolved.keys:
        own = {path: value for path, value in values.items() if path[:2] == ("techniques", key)}
        origin = resolved.origins[f"techniques.{key}"]
        lines.append(_commented(f"  - {key}:" if own else f"  - {key}", origin))
        _lines(lines, own, 2, resolved, 6)


def _lines(
    lines: list[str],
    values: Mapping[tuple[str, ...], Any],
    depth: int,
    resolved: Resolved[Any],
    indent: int,
) -> None:
    """Values whose names begin at `depth` of their paths; a group opens when the path goes deeper."""
    opened: set[str] = set()
    for path, value in values.items():
        name = path[depth]
        if len(path) == depth + 1:
            origin = resolved.origins[".".join(path)]
            lines.append(_commented(f"{' ' * indent}{name}: {write(value)}", origin))
        elif name not in opened:
            opened.add(name)
            lines.append(f"{' ' * indent}{name}:")
            inside = {p: v for p, v in values.items() if len(p) > depth + 1 and p[depth] == name}
            _lines(lines, inside, depth + 1, resolved, indent + 2)


def _commented(text: str, origin: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}}  # {origin}"
