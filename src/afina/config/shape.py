"""What settings there are: the groups of a run's configuration, and the names in them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from afina.problems import Path

TOP = ("model", "revision", "val")
"""Settings of a run that stand alone."""


@dataclass(frozen=True)
class Shape:
    """What settings there are: groups by name, and techniques by key."""

    groups: Mapping[str, type[BaseModel]]
    techniques: Mapping[str, type[BaseModel]]

    def group(self, path: Path) -> type[BaseModel] | None:
        """The settings that stand under a path; None for a path that is a value or does not exist."""
        if path[:1] == ("techniques",):
            kind, rest = (self.techniques.get(path[1]), path[2:]) if len(path) > 1 else (None, ())
        else:
            kind, rest = (self.groups.get(path[0]), path[1:]) if path else (None, ())
        for name in rest:
            field_ = kind.model_fields.get(name) if kind else None
            kind = _model_of(field_.annotation) if field_ else None
        return kind

    def names(self, path: Path) -> list[str]:
        """The names that may follow a path."""
        if not path:
            return [*TOP, *self.groups, "techniques"]
        if path == ("techniques",):
            return list(self.techniques)
        kind = self.group(path)
        return [*(("source",) if path == ("data",) else ()), *(kind.model_fields if kind else ())]

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Every setting that holds a value, as a path."""
        for name in self.names(path):
            below = (*path, name)
            if self.names(below):
                yield from self.leaves(below)
            elif below != ("techniques",) and path != ("techniques",):
                yield below


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The settings class of an annotation, also when it is one of a union (`EvalSettings | None`)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [kind for kind in map(_model_of, typing.get_args(annotation)) if kind]
        return found[0] if len(found) == 1 else None
    return None
