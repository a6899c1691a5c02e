"""A configuration written down: as YAML that loads back equal, and as a JSON schema for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from afina.config.document import write
from afina.config.load import Resolved, values_of
from afina.config.settings import EvalSettings, TrainSettings

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
    for name in ("train", "eval"):
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


def schema(
    *, techniques: Mapping[str, type[BaseModel]], data_settings: type[BaseModel]
) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a `run.yaml`, for editors that complete and check as one types."""
    kinds: list[type[BaseModel]] = [
        data_settings,
        TrainSettings,
        EvalSettings,
        *techniques.values(),
    ]
    refs, whole = models_json_schema([(kind, "validation") for kind in dict.fromkeys(kinds)])
    ref = {kind: refs[kind, "validation"] for kind in kinds}
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    one_technique = [{"enum": list(techniques)}] + [
        {
            "type": "object",
            "properties": {key: ref[kind]},
            "required": [key],
            "additionalProperties": False,
        }
        for key, kind in techniques.items()
    ]
    definitions = whole["$defs"]
    data = definitions[ref[data_settings]["$ref"].rsplit("/", 1)[-1]]
    data["properties"] = {"source": text, **data.get("properties", {})}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "afina run",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "model": text,
            "revision": maybe,
            "data": {"anyOf": [text, ref[data_settings]]},
            "val": maybe,
            "techniques": {"type": "array", "items": {"anyOf": one_technique}},
            "train": ref[TrainSettings],
            "eval": ref[EvalSettings],
        },
        "$defs": definitions,
    }
