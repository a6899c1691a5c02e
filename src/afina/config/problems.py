"""What is wrong with settings, said so that it can be put right: all of it at once, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from afina.config.document import as_json
from afina.errors import AfinaError, ConfigError, nearest

Path = tuple[str, ...]
"""The place of a setting: ("train", "lr"), written "train.lr"."""

T = TypeVar("T", bound=BaseModel)


def raise_all(problems: Sequence[AfinaError]) -> None:
    """Raise one ConfigError that says every problem; nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(
            problems[0].what,
            got=problems[0].got,
            wanted=problems[0].wanted,
            cure=problems[0].cure,
        )
    if problems:
        raise ConfigError(
            "\n".join([f"{len(problems)} settings cannot be used", *map(str, problems)])
        )


def at(origin: str, sentence: str) -> str:
    """A sentence with the place it speaks of before it, when that is known."""
    return f"{origin}: {sentence}" if origin and origin != "default" else sentence


def unknown(
    origin: str, path: Path, known: Iterable[str], everywhere: Iterable[Path]
) -> ConfigError:
    """The problem of a name that is no setting: the nearest names of its group, or its namesakes elsewhere."""
    group, word = path[:-1], path[-1]
    names = sorted(known)
    near = [".".join((*group, name)) for name in nearest(word, names)]
    homes = [".".join(other) for other in everywhere if other[-1] == word and other[:-1] != group]
    guesses = (homes or near)[:3]
    return ConfigError(
        at(origin, f"unknown setting {'.'.join(path)!r}"),
        wanted=None if guesses else ", ".join(names),
        cure=f"did you mean {' or '.join(guesses)}?" if guesses else None,
    )


def from_validation(
    error: ValidationError, prefix: Path, origins: Mapping[Path, str]
) -> list[ConfigError]:
    """One problem for each setting that pydantic refused.

    A union (a number or a word) is refused once for each of its members: they become one problem, with all that was
    wanted.
    """
    by_path: dict[Path, list[Any]] = {}
    for detail in error.errors(include_url=False):
        path = (*prefix, *map(str, detail["loc"]))
        while path not in origins and len(path) > len(prefix) + 1:
            path = path[:-1]
        by_path.setdefault(path, []).append(detail)
    return [_problem(path, details, prefix, origins) for path, details in by_path.items()]


def _problem(
    path: Path, details: list[Any], prefix: Path, origins: Mapping[Path, str]
) -> ConfigError:
    first, name = details[0], ".".join(path)
    if first["type"] == "missing" and path not in origins:
        return ConfigError(f"{name} must be given")
    sentence = first["msg"].removeprefix("Value error, ")
    if path == prefix:
        return ConfigError(at(_origin_of_mentioned(sentence, prefix, origins), sentence))
    origin = origins.get(path, "")
    if first["type"] in ("value_error", "assertion_error"):
        return ConfigError(at(origin, f"{name}: {sentence}"), got=as_json(first["input"]))
    wanted = [_wanted(detail) for detail in details]
    return ConfigError(
        at(origin, f"{name} cannot have this value"),
        got=as_json(first["input"]),
        wanted=" or ".join(dict.fromkeys(wanted)),
        cure=_cure(details),
    )


_WANTED = {
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "a valid integer": "an integer",
    "a valid tuple": "a list",
}


def _wanted(detail: Any) -> str:
    if detail["type"] == "missing":
        return "a longer list"
    wanted: str = detail["msg"].removeprefix("Input should be ").split(", unable to ")[0]
    return _WANTED.get(wanted, wanted.replace("a valid ", "a "))


def _cure(details: list[Any]) -> str | None:
    for detail in details:
        if detail["type"] == "string_type" and isinstance(detail["input"], (int, float)):
            return "put it in quotes"
        if detail["type"] == "literal_error":
            words = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
            near = nearest(str(detail["input"]), words, most=1)
            if near:
                return f"did you mean {near[0]}?"
    return None


def _origin_of_mentioned(sentence: str, prefix: Path, origins: Mapping[Path, str]) -> str:
    """Where the settings that a sentence names were given; the sentence is about several at once."""
    words = set(re.findall(r"\w+", sentence))
    said = [
        origin
        for path, origin in origins.items()
        if path[: len(prefix)] == prefix and path[-1] in words and origin != "default"
    ]
    return " and ".join(dict.fromkeys(said))


def build(
    kind: type[T],
    values: Mapping[str, Any],
    prefix: Path = (),
    origins: Mapping[Path, str] | None = None,
) -> T:
    """The settings that the values make; for values from Python, where no file is to be named.

    Raises:
        ConfigError: naming every value that is unknown, of the wrong type or out of range.
    """
    origins = origins or {}
    known = list(kind.model_fields)
    problems: list[AfinaError] = [
        unknown("", (*prefix, name), known, ()) for name in values if name not in known
    ]
    try:
        made = kind.model_validate({name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        raise_all([*problems, *from_validation(error, prefix, origins)])
        raise
    raise_all(problems)
    return made


def of_kind(kind: type[T], given: T | None) -> T:
    """The settings given, or the defaults for None.

    Raises:
        ConfigError: something that is no `kind`, such as a dictionary.
    """
    if given is None:
        return kind()
    if not isinstance(given, kind):
        cure = f"{kind.__name__}(**settings)" if isinstance(given, dict) else None
        raise ConfigError(
            f"these are no {kind.__name__}", got=repr(given)[:80], wanted=kind.__name__, cure=cure
        )
    return given
