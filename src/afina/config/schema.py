"""The JSON schema of a `run.yaml`: what an editor completes, explains, and underlines as one types.

It says what the loader says, and is made from the same settings. What it cannot say it lets pass, and the loader
refuses: limits between settings, and how a technique meets a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from afina.config.settings import EvalSettings, ParallelSettings, TrainSettings

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_MAYBE: Schema = {"type": ["string", "null"]}
_NOTHING: Schema = {"type": "null"}
"""A group whose lines are all comments is there, and empty."""


def schema(*, techniques: Mapping[str, type[BaseModel]], data_settings: type[BaseModel]) -> Schema:
    """The schema, in draft 2020-12.

    Args:
        techniques: key to settings, as the technique table has them.
        data_settings: the class of the `data` group.
    """
    kinds = [
        data_settings,
        TrainSettings,
        EvalSettings,
        ParallelSettings,
        *techniques.values(),
    ]
    refs, whole = models_json_schema([(k, "validation") for k in dict.fromkeys(kinds)])
    ref = {kind: refs[kind, "validation"] for kind in kinds}
    definitions: Schema = whole["$defs"]
    for one in definitions.values():
        _as_the_loader_reads(one)
    for kind in kinds:
        _at_most_one(definitions[_name(ref[kind])], getattr(kind, "ONE_OF", ()))
    data = definitions[_name(ref[data_settings])]
    source = _TEXT | {"description": "a file, a folder, or a data set of the hub"}
    data["properties"] = {"source": source, **data.get("properties", {})}
    model = _TEXT | {"description": "a folder, a hub id, a GGUF file, or a demo name"}
    val = _MAYBE | {"description": "validation data; null: see data.val_fraction"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "afina run",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "model": model,
            "revision": _MAYBE | {"description": "branch, tag or commit of a hub id"},
            "data": {"anyOf": [_TEXT, ref[data_settings], _NOTHING]},
            "val": val,
            "techniques": {
                "anyOf": [
                    {"type": "array", "items": {"anyOf": _one_technique(techniques, ref)}},
                    _NOTHING,
                ]
            },
            "train": {"anyOf": [ref[TrainSettings], _NOTHING]},
            "eval": {"anyOf": [ref[EvalSettings], _NOTHING]},
            "parallel": {"anyOf": [ref[ParallelSettings], _NOTHING]},
        },
        "$defs": definitions,
    }


def _one_technique(
    techniques: Mapping[str, type[BaseModel]], ref: Mapping[type[BaseModel], Schema]
) -> list[Schema]:
    """A technique's key alone, or with its settings."""
    return [
        {"enum": list(techniques)},
        *(
            {
                "type": "object",
                "properties": {key: {"anyOf": [ref[kind], _NOTHING]}},
                "required": [key],
                "additionalProperties": False,
            }
            for key, kind in techniques.items()
        ),
    ]


def _as_the_loader_reads(definition: Schema) -> None:
    """A single value where a list belongs is a list of one (`target: attention`)."""
    for name, one in definition.get("properties", {}).items():
        lists = [s for s in one.get("anyOf", [one]) if s.get("type") == "array" and "items" in s]
        more = [s["items"] for s in lists if s["items"] not in one.get("anyOf", [])]
        if more:
            about = {k: one[k] for k in ("default", "description", "title") if k in one}
            bare = {k: v for k, v in one.items() if k not in about}
            definition["properties"][name] = {
                "anyOf": [*bare.get("anyOf", [bare]), *more],
                **about,
            }


def _at_most_one(definition: Schema, pairs: tuple[tuple[str, ...], ...]) -> None:
    """Of settings that say the same thing in two ways, at most one is given and not null."""
    given = {"not": _NOTHING}
    both = [
        {"required": [a, b], "properties": {a: given, b: given}}
        for names in pairs
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    if both:
        definition["not"] = {"anyOf": both}


def _name(ref: Schema) -> str:
    return ref["$ref"].rsplit("/", 1)[-1]
