"""Where settings are given, one after the other: a YAML file, flags, `--set`. Each layer overrules those before it.

A layer is read into assignments of a value to a path, with its origin; nothing is judged here but whether the path
exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from afina.config.document import Node, read_text, scalar
from afina.config.shape import Shape
from afina.errors import AfinaError, ConfigError
from afina.problems import Path, as_json, at, unknown

Layer = dict[Path, tuple[Any, str]]
"""What one layer gives: a value and its origin, by path."""

FLAG_NAMES = {
    "model": "MODEL",
    "data.source": "DATA",
    "techniques": "--technique",
    "eval.max_rows": "--limit",
    "eval.fields": "--metrics",
    "eval.generate": "--metrics",
}
"""How the command line calls the settings that its flags name otherwise."""


@dataclass
class Given:
    """All that the layers read so far have given. Techniques keep their order."""

    shape: Shape
    values: dict[Path, Any] = field(default_factory=dict[Path, Any])
    origins: dict[Path, str] = field(default_factory=dict[Path, str])
    techniques: list[str] | None = None
    problems: list[AfinaError] = field(default_factory=list[AfinaError])

    def read_yaml(self, root: Node, name: str) -> None:
        """Take every value of a YAML document."""
        if root.children is None:
            self.problems.append(
                ConfigError(
                    f"{name}: not a configuration",
                    got=as_json(root.value),
                    wanted="model: …, data: …",
                )
            )
            return
        layer: Layer = {}
        for key, node in root.children.items():
            if key == "techniques":
                self._read_techniques(node, name, layer)
            elif key == "data" and isinstance(node.value, str):
                layer["data", "source"] = (node.value, f"{name}:{node.line}")
            else:
                self._walk((key,), node, name, layer)
        self._take(layer)

    def read_flags(self, flags: Mapping[str, Any]) -> None:
        """Take the flags that were used (those that are not None), by dotted path."""
        layer: Layer = {}
        for dotted, value in flags.items():
            if value is None:
                continue
            last = dotted.rsplit(".", 1)[-1].replace("_", "-")
            origin = FLAG_NAMES.get(dotted, f"--{last}")
            if dotted == "techniques":
                self._list_techniques([(str(key), origin) for key in value])
            else:
                self._assign(tuple(dotted.split(".")), value, origin, layer)
        self._take(layer)

    def read_sets(self, sets: Iterable[str]) -> None:
        """Take the `a.b=value` of each `--set`; the last of two that name one setting counts."""
        layer: Layer = {}
        for text in sets:
            dotted, equals, value = text.partition("=")
            if not equals or not dotted.strip():
                self.problems.append(
                    ConfigError(
                        "--set needs a setting and a value", got=text, wanted="train.steps=100"
                    )
                )
                continue
            path = tuple(dotted.strip().split("."))
            try:
                self._assign(path, _value_of(value.strip()), "--set", layer)
            except ConfigError as problem:
                self.problems.append(problem)
        self._take(layer)

    def _walk(self, path: Path, node: Node, name: str, layer: Layer) -> None:
        origin = f"{name}:{node.line}"
        if path[-1] not in self.shape.names(path[:-1]):
            self._unknown(origin, path)
        elif not self._is_group(path):
            layer[path] = (node.value, origin)
        elif node.children is not None:
            for key, child in node.children.items():
                self._walk((*path, key), child, name, layer)
        elif node.value is not None:
            self._not_a_group(origin, path, node.value)

    def _assign(self, path: Path, value: Any, origin: str, layer: Layer) -> None:
        """Give one value by its path; what is left of a path beyond a setting is a key of its mapping."""
        here: Path = ()
        for name in path:
            here = (*here, name)
            if name not in self.shape.names(here[:-1]):
                return self._unknown(origin, here, path[len(here) :])
            if here[:-1] == ("techniques",) and name not in (self.techniques or []):
                self.techniques = [*(self.techniques or []), name]
                self.origins[here] = origin
            if not self.shape.names(here):
                break
        rest = ".".join(path[len(here) :])
        if rest:
            before = layer.get(here, (self.values.get(here), ""))[0]
            table = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
            layer[here] = ({**table, rest: value}, origin)
        elif here == ("data",) and isinstance(value, str):
            layer["data", "source"] = (value, origin)
        elif here == ("techniques",) and isinstance(value, list):
            self._list_techniques([(str(key), origin) for key in cast("list[Any]", value)])
        elif self._is_group(here):
            self._assign_group(here, value, origin, layer)
        else:
            layer[here] = (value, origin)
        return None

    def _assign_group(self, path: Path, value: Any, origin: str, layer: Layer) -> None:
        """Give each setting of a group; None gives none, which lists a technique with its defaults."""
        if isinstance(value, dict):
            for name, item in cast("dict[str, Any]", value).items():
                self._assign((*path, name), item, origin, layer)
        elif value is not None:
            self._not_a_group(origin, path, value)

    def _is_group(self, path: Path) -> bool:
        return path == ("techniques",) or self.shape.group(path) is not None

    def _take(self, layer: Layer) -> None:
        """Put a layer over the ones before; what it says in one way is forgotten in the other."""
        taken: dict[Path, str] = {}
        for path, (value, origin) in layer.items():
            others = self._other_ways(path) if value is not None else []
            twice = [other for other in others if other in taken]
            if twice:
                self._said_twice(twice[0], taken[twice[0]], path, origin)
                continue
            for other in others:
                self.values.pop(other, None)
                self.origins.pop(other, None)
            self.values[path], self.origins[path] = value, origin
            if value is not None:
                taken[path] = origin

    def _other_ways(self, path: Path) -> list[Path]:
        *group, own = path
        pairs = getattr(self.shape.group(tuple(group)), "ONE_OF", ())
        return [(*group, name) for names in pairs if own in names for name in names if name != own]

    def _said_twice(self, first: Path, first_origin: str, path: Path, origin: str) -> None:
        self.problems.append(
            ConfigError(
                at(
                    " and ".join(dict.fromkeys([first_origin, origin])),
                    "two settings say the same thing",
                ),
                got=f"{'.'.join(first)} and {'.'.join(path)}",
                cure="keep one of them",
            )
        )

    def _read_techniques(self, node: Node, name: str, layer: Layer) -> None:
        if node.value is None:
            return
        if node.items is None:
            self.problems.append(
                ConfigError(
                    f"{name}:{node.line}: techniques are a list",
                    got=as_json(node.value),
                    cure="begin each with a dash: - lora: {rank: 16}",
                )
            )
            return
        keys: list[tuple[str, str]] = []
        for item in node.items:
            origin = f"{name}:{item.line}"
            if isinstance(item.value, str):
                keys.append((item.value, origin))
            elif item.children is not None and len(item.children) == 1:
                (key, child), *_ = item.children.items()
                keys.append((key, origin))
                if key in self.shape.techniques:
                    self._walk(("techniques", key), child, name, layer)
            else:
                self.problems.append(
                    ConfigError(
                        f"{origin}: one technique, with its settings",
                        got=as_json(item.value),
                        wanted="- lora: {rank: 16}, or - lora",
                    )
                )
        self._list_techniques(keys)

    def _list_techniques(self, keys: list[tuple[str, str]]) -> None:
        """Set the whole list; techniques named before, and their settings, are gone."""
        for path in [path for path in self.origins if path[0] == "techniques"]:
            self.values.pop(path, None)
            self.origins.pop(path)
        self.techniques = []
        for key, origin in keys:
            path = ("techniques", key)
            if key not in self.shape.techniques:
                self._unknown(origin, path)
            elif key in self.techniques:
                self.problems.append(
                    ConfigError(
                        at(
                            " and ".join(dict.fromkeys([self.origins[path], origin])),
                            f"{key} is listed twice",
                        ),
                        cure="keep one of them, with all its settings",
                    )
                )
            else:
                self.techniques.append(key)
                self.origins[path] = origin

    def _unknown(self, origin: str, path: Path, rest: Path = ()) -> None:
        """Notes a name that is no setting; `rest` is what was written after it."""
        if len(path) == 1 and path[0] in self.shape.techniques:
            dotted = ".".join((*path, *rest))
            listed = "" if rest else f" In YAML it is listed: techniques: [{dotted}: {{…}}]"
            self.problems.append(
                ConfigError(
                    at(origin, f"unknown setting {dotted!r}"),
                    cure=f"did you mean techniques.{dotted}?{listed}",
                )
            )
            return
        names = self.shape.names(path[:-1])
        self.problems.append(unknown(origin, path, names, self.shape.leaves()))

    def _not_a_group(self, origin: str, path: Path, value: Any) -> None:
        self.problems.append(
            ConfigError(
                at(origin, f"{'.'.join(path)} is a group of settings"),
                got=as_json(value),
                wanted=", ".join(self.shape.names(path)),
            )
        )


def _value_of(text: str) -> Any:
    """The value of a `--set`: a list, mapping or quoted text as in YAML, or a bare word or number."""
    if text[:1] in ("[", "{", '"', "'"):
        return read_text(text, "--set").value
    return scalar(text)
