"""`afina techniques`: what can be done to a model, from the one table that training reads too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from afina.cli.common import print_json, table
from afina.config.document import write
from afina.errors import ConfigError, nearest
from afina.table import TECHNIQUES

EXAMPLES = ("afina techniques", "afina techniques lora", "afina techniques --json")


def describe(techniques: Mapping[str, type[BaseModel]]) -> list[dict[str, Any]]:
    """Each technique: key, class, what it does in one sentence, and its settings with their defaults."""
    return [
        {
            "key": key,
            "class": kind.__name__,
            "summary": inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
            "settings": _settings(kind),
        }
        for key, kind in techniques.items()
    ]


def _settings(kind: type[BaseModel]) -> list[dict[str, Any]]:
    types = kind.model_json_schema()["properties"]
    settings: list[dict[str, Any]] = []
    for name, field in kind.model_fields.items():
        one = {"name": name, "type": _type(types[name])}
        if not field.is_required():
            one["default"] = types[name].get("default")
        settings.append({**one, "description": field.description or ""})
    return settings


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", schema.get("const", "any")))


def command(
    key: Annotated[str | None, typer.Argument(help="one technique, with its settings")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
) -> None:
    """List the techniques, or the settings of one.

    A technique's settings go into the configuration (techniques: [lora: {rank: 8}]) or on the command line
    (--set techniques.lora.rank=8).
    """
    if key is not None and key not in TECHNIQUES:
        near = nearest(key, list(TECHNIQUES))
        raise ConfigError(
            f"there is no technique {key!r}",
            wanted=", ".join(TECHNIQUES),
            cure=f"did you mean {' or '.join(near)}?" if near else None,
        )
    found = describe({k: kind for k, kind in TECHNIQUES.items() if key in (None, k)})
    if as_json:
        print_json(found)
    elif key is None:
        print(table([(one["key"], one["summary"]) for one in found]))
    else:
        print(f"{key}: {found[0]['summary']}\n")
        print(table([_row(setting) for setting in found[0]["settings"]]))


def _row(setting: Mapping[str, Any]) -> tuple[str, str, str]:
    default = write(setting["default"]) if "default" in setting else "must be given"
    return setting["name"], default, setting["description"] or setting["type"]
