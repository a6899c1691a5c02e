"""What is wrong with settings, said so that it can be put right: all of it at once, each with its place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from afina.errors import AfinaError, ConfigError, nearest

Path = tuple[str, ...]
"""The place of a setting: ("train", "lr"), written "train.lr"."""

T = TypeVar("T", bound=BaseModel)


def as_json(value: Any) -> str:
    """A value for an error message: on one line, shortened, quoted as in JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def raise_all(problems: Sequence[AfinaError]) -> None:
    """Raise one ConfigError that says every problem; nothing when there is none."""
    if problems:
        raise together(problems)


def together(problems: Sequence[AfinaError]) -> ConfigError:
    """One error that says every problem; there is at least one."""
    if len(problems) > 1:
        return ConfigError(
            "\n".join([f"{len(problems)} settings cannot be used", *map(str, problems)])
        )
    (one,) = problems
    return ConfigError(one.what, got=one.got, wanted=one.wanted, cure=one.cure)


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
    return from_details(error.errors(include_url=False), prefix, origins)


def from_details(
    found: Iterable[Any], prefix: Path, origins: Mapping[Path, str]
) -> list[ConfigError]:
    """As `from_validation`, from pydantic's details."""
    by_path: dict[Path, list[Any]] = {}
    for detail in found:
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
    details = _of_its_kind([one for one in details if one["input"] is first["input"]])
    # Of a list that is too short, each place that is missing is a detail: the last tells its length.
    places = [place for place in details if place["type"] == "missing"]
    told = [*(one for one in details if one not in places), *places[-1:]]
    return ConfigError(
        at(origin, f"{name} cannot have this value"),
        got=as_json(first["input"]),
        wanted=" or ".join(dict.fromkeys(map(_wanted, told))),
        cure=_cure(details),
    )


def _of_its_kind(details: list[Any]) -> list[Any]:
    """Of a union's members only those that are of the value's own kind, where there are some: what bounds it broke."""
    near = [one for one in details if one["type"].startswith(_BOUNDS)]
    return near or details


_BOUNDS = ("greater_than", "less_than", "multiple_of", "string_too_")
"""How pydantic's names of broken bounds begin."""

_WANTED = {
    "String should have at least 1 character": "a text that is not empty",
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "a valid integer": "an integer",
    "a valid tuple": "a list",
}


def _wanted(detail: Any) -> str:
    if detail["type"] == "missing":
        place = detail["loc"][-1]
        return f"a list of {place + 1}" if isinstance(place, int) else f"one with {place}"
    if detail["type"] in ("too_long", "too_short"):
        bounds = {"max_length": "at most", "min_length": "at least"}
        return next(
            f"a list of {b} {detail['ctx'][n]}" for n, b in bounds.items() if n in detail["ctx"]
        )
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


class _Speaking(type(BaseModel)):
    """Makes `LoRA(rnk=1)` a ConfigError with the nearest name, where pydantic would show its own error.

    It acts on calls of the class alone: `model_validate` keeps raising what the configuration reads places from.
    """

    if not TYPE_CHECKING:  # a checker then still sees the fields of each class

        def __call__(cls, *given: Any, **values: Any) -> Any:
            if given:
                raise ConfigError(
                    f"{cls.__name__} takes its settings by name",
                    got=", ".join(as_json(each) for each in given),
                    wanted=", ".join(f"{name}=…" for name in list(cls.model_fields)[:3]),
                )
            try:
                made = super().__call__(**values)
            except ValidationError as error:
                raise _spoken(cls, values, error) from None
            raise_all(truths_as_numbers(made, values))
            return made


class Frozen(BaseModel, metaclass=_Speaking):
    """A frozen value that refuses settings it does not know, with the nearest name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _spoken(kind: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> AfinaError:
    """What pydantic refused of a call of `kind`, under the name of the class."""
    known = list(kind.model_fields)
    prefix = (kind.__name__,)
    problems: list[AfinaError] = [
        unknown("", (*prefix, name), known, ()) for name in values if name not in known
    ]
    if any(name in known for name in values) or not problems:
        details = [d for d in error.errors(include_url=False) if d["type"] != "extra_forbidden"]
        problems += from_details(details, prefix, {})
    return together(problems)


def truths_as_numbers(made: BaseModel, values: Mapping[str, Any]) -> list[ConfigError]:
    """Pydantic reads true as 1; `rank=True` is a slip, not a rank."""
    return [
        ConfigError(
            f"{type(made).__name__}.{name} cannot have this value", got=value, wanted="a number"
        )
        for name, value in values.items()
        if isinstance(value, bool)
        and isinstance(read := getattr(made, name), (int, float))
        and not isinstance(read, bool)
    ]


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


def refuse_uncallable(**given: Any) -> None:
    """Raises for a function, by the name of its argument, that is none; None is none asked for.

    Raises:
        ConfigError: see above.
    """
    for name, function in given.items():
        if function is not None and not callable(function):
            raise ConfigError(
                f"{name} is to be called, and cannot be",
                got=repr(function)[:80],
                wanted="a function, or None",
            )


def name_of(given: Any, what: str, wanted: str) -> str:
    """The name of a file, a folder or a model, as a text.

    Args:
        given: a text or a path.
        what: it is the name of.
        wanted: what it may be the name of.

    Raises:
        ConfigError: something else, or an empty text.
    """
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name.strip():
        shown = repr(given) if isinstance(given, (str, bytes, int, float)) else type(given).__name__
        raise ConfigError(f"{what} needs a name", got=shown[:80], wanted=wanted)
    return name
