"""YAML in and out, with the line of every value.

Scalars follow the core schema of YAML 1.2 (section 10.3.2), where `1e-3` is a number and `no` is a word; PyYAML alone
follows YAML 1.1, where they are a text and a boolean, and `12:30` is 750. Only `compose` of PyYAML is used: it builds
nodes that know their line, and no object is ever made from a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from afina.errors import ConfigError

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan"),
}  # fmt: skip
_TAGS = {"null", "bool", "int", "float", "str", "seq", "map", "timestamp", "merge", "value"}
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+@-]*( [A-Za-z0-9_./+@-]+)*")


@dataclass(frozen=True)
class Node:
    """A value of a YAML document, the line it stands on (from 1), and for a mapping its children by key.

    `value` is plain Python (None, bool, int, float, str, list, dict) with nothing left to look up.
    """

    value: Any
    line: int
    children: Mapping[str, Node] | None = None
    items: Sequence[Node] | None = None


def read_file(path: Path) -> Node:
    """The document of a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or says a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the configuration file cannot be read",
            got=f"{path} ({error})",
            wanted="a YAML file in UTF-8",
        ) from None
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Node:
    """The document of a YAML text; `name` stands for it in errors.

    Raises:
        ConfigError: the text is not YAML, or says a key twice.
    """
    try:
        root = cast("yaml.Node | None", yaml.compose(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: not YAML: {error.problem}", cure=_cure(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML", got=str(error)) from None
    if root is None:
        return Node({}, 1, {})
    return _node(root, name, ())


def scalar(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def write(value: Any) -> str:
    """A value on one line of YAML, such that `read_text` gives it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        return special.get(repr(value), repr(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{_key(key)}: {write(item)}" for key, item in pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(write, cast("Sequence[Any]", value))) + "]"
    return _text(str(value))


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and isinstance(scalar(text), str):
        return text
    return yaml.dump(
        text, default_style='"', allow_unicode=True, width=float("inf"), Dumper=yaml.SafeDumper
    ).rstrip("\n")


def _key(key: Any) -> str:
    return _text(key) if isinstance(key, str) else write(key)


def _node(node: yaml.Node, name: str, above: tuple[yaml.Node, ...]) -> Node:
    line = node.start_mark.line + 1
    if any(node is other for other in above):
        raise ConfigError(f"{name}:{line}: an alias inside its own anchor has no end")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
        raise ConfigError(
            f"{name}:{line}: a configuration holds plain values only", got=f"the tag {node.tag}"
        )
    if isinstance(node, yaml.MappingNode):
        children = dict(_pairs(node, name, (*above, node)))
        return Node({key: child.value for key, child in children.items()}, line, children)
    if isinstance(node, yaml.SequenceNode):
        items = [_node(item, name, (*above, node)) for item in node.value]
        return Node([item.value for item in items], line, items=items)
    # A quoted scalar or a block of text has a style; only a bare word can be a number.
    quoted = cast("yaml.ScalarNode", node).style
    return Node(node.value if quoted else scalar(node.value), line)


def _pairs(
    mapping: yaml.MappingNode, name: str, above: tuple[yaml.Node, ...]
) -> Iterator[tuple[str, Node]]:
    lines: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{line}: a key must be a word")
        key = key_node.value
        if mapping.flow_style and ":" in key and not (key_node.style or value_node.value):
            raise ConfigError(
                f"{name}:{line}: a colon without a space after it is a part of the word",
                got=f"{{{key}}}",
                wanted=f"{{{key.replace(':', ': ', 1)}}}",
            )
        if key in lines:
            raise ConfigError(
                f"{name}:{line}: {key!r} is given twice",
                got=f"lines {lines[key]} and {line}",
                cure="keep one of them",
            )
        lines[key] = line
        child = _node(value_node, name, above)
        # The line of a setting is the line of its name, even when its value begins below.
        yield key, Node(child.value, line, child.children, child.items)


def _cure(error: yaml.MarkedYAMLError) -> str | None:
    if "mapping values are not allowed" in str(error.problem):
        return "check the indentation, and put texts that hold ': ' in quotes"
    if "cannot start any token" in str(error.problem):
        return "indent with spaces, and put texts that begin with @, ` or % in quotes"
    return None
