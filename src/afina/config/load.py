"""A run's configuration: defaults, under a YAML file, under flags, under `--set`; and where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from afina.config.document import read_file, write
from afina.config.layers import Given
from afina.config.settings import EvalSettings, ParallelSettings, TrainSettings
from afina.config.shape import TOP, Shape
from afina.errors import AfinaError, ConfigError
from afina.problems import Path, at, from_validation, raise_all

D = TypeVar("D", bound=BaseModel)


@dataclass(frozen=True)
class RunConfig(Generic[D]):
    """All that decides a run.

    Attributes:
        model: folder, hub id, GGUF file or demo name.
        source: the training data, as `data.source` in YAML, or `data` alone.
        val: the validation data; None splits it from the training data, as the data settings say.
        revision: of a model on the hub.
        data: how data is read.
        techniques: as given; their order of work is the table's.
        train: how it trains.
        eval: how it is measured.
        parallel: how it is spread over processes.
    """

    model: str
    source: str
    val: str | None
    revision: str | None
    data: D
    techniques: tuple[BaseModel, ...]
    train: TrainSettings
    eval: EvalSettings
    parallel: ParallelSettings = field(default_factory=ParallelSettings)


@dataclass(frozen=True)
class Resolved(Generic[D]):
    """A configuration with the origin of each value: "default", "run.yaml:12", "--lr", "--set", "MODEL".

    Attributes:
        config: the values.
        keys: of the techniques, in their order.
        origins: by dotted path ("train.lr", "techniques.lora.rank", "data.source").
    """

    config: RunConfig[D]
    keys: tuple[str, ...]
    origins: Mapping[str, str]


def load_config(
    *,
    techniques: Mapping[str, type[BaseModel]],
    data_settings: type[D],
    yaml_path: FilePath | str | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Iterable[str] = (),
    default_techniques: Sequence[str] = (),
) -> Resolved[D]:
    """The configuration that a YAML file, flags and `--set` make together; each overrules the ones before it.

    Args:
        techniques: key to settings, as the technique table has them.
        data_settings: the class of the `data` group.
        yaml_path: a file as in `run.yaml`, or a run's `config.yaml`.
        flags: dotted path to value; None means that the flag was not used. `techniques` takes a list of keys.
        sets: texts like `train.steps=100`, `techniques.lora.rank=8` (adds the technique if it is not listed),
            `techniques.lora.rank_pattern.q_proj=4`.
        default_techniques: the list when neither file nor flags give one.

    Raises:
        ConfigError: every problem, each with its place and the nearest name or the values allowed.
    """
    groups = {
        "data": data_settings,
        "train": TrainSettings,
        "eval": EvalSettings,
        "parallel": ParallelSettings,
    }
    shape = Shape(groups, techniques)
    given = Given(shape)
    if yaml_path is not None:
        given.read_yaml(read_file(FilePath(yaml_path)), str(yaml_path))
    if given.techniques is None:
        given.techniques = list(default_techniques)
    given.read_flags(flags or {})
    given.read_sets(sets)
    return _resolve(given, data_settings)


def as_given(config: RunConfig[D], keys: Sequence[str], origin: str) -> Resolved[D]:
    """A configuration that was made in code: every value that was given has this origin, and the others "default"."""
    origins = {".".join(("techniques", key)): origin for key in keys}
    groups: list[tuple[Path, BaseModel | None]] = [
        (("data",), config.data),
        (("train",), config.train),
        (("eval",), config.eval),
        (("parallel",), config.parallel),
        *((("techniques", key), t) for key, t in zip(keys, config.techniques, strict=True)),
    ]
    for path in values_of(config, keys):
        prefix, group = next(
            ((p, g) for p, g in groups if path[: len(p)] == p and path != ("data", "source")),
            ((), None),
        )
        given = group is None or _is_given(group, path[len(prefix) :])
        origins[".".join(path)] = origin if given else "default"
    return Resolved(config, tuple(keys), origins)


def _is_given(group: BaseModel, path: Path) -> bool:
    """Whether a setting was given, and not left at its default."""
    name, rest = path[0], path[1:]
    if name not in group.model_fields_set:
        return False
    if rest:
        return _is_given(getattr(group, name), rest)
    # Of two ways to say the same, the settings themselves fill in the default of one.
    filled = any(name in names for names in getattr(group, "ONE_OF", ()))
    return not filled or getattr(group, name) != getattr(type(group)(), name)


def _resolve(given: Given, data_settings: type[D]) -> Resolved[D]:
    problems = list(given.problems)
    keys = tuple(given.techniques or ())
    data = _build(data_settings, ("data",), given, problems)
    train = _build(TrainSettings, ("train",), given, problems)
    eval_ = _build(EvalSettings, ("eval",), given, problems)
    parallel = _build(ParallelSettings, ("parallel",), given, problems)
    made = [
        _build(given.shape.techniques[key], ("techniques", key), given, problems) for key in keys
    ]
    source = _text(("data", "source"), given, problems, needed=True)
    model, revision, val = (_text((name,), given, problems, needed=name == "model") for name in TOP)
    raise_all(problems)
    if None in (model, source, data, train, eval_, parallel):
        raise AssertionError("a group that could not be built left no problem")
    config: RunConfig[D] = RunConfig(
        *cast("tuple[str, str]", (model, source)),
        val,
        revision,
        cast("D", data),
        tuple(t for t in made if t),
        cast("TrainSettings", train),
        cast("EvalSettings", eval_),
        cast("ParallelSettings", parallel),
    )
    paths = [*(("techniques", key) for key in keys), *values_of(config, keys)]
    return Resolved(config, keys, {".".join(p): given.origins.get(p, "default") for p in paths})


def _build(kind: type[D], prefix: Path, given: Given, problems: list[AfinaError]) -> D | None:
    """The settings of one group, or None with its problems added."""
    own = {
        path[len(prefix) :]: value
        for path, value in given.values.items()
        if path[: len(prefix)] == prefix and path != ("data", "source")
    }
    try:
        made = _validate(kind, own)
    except ValidationError as error:
        problems += from_validation(error, prefix, given.origins)
        return None
    except AfinaError as error:  # a technique's own check
        what = at(given.origins.get(prefix, ""), f"{'.'.join(prefix)}: {error.what}")
        problems.append(ConfigError(what, got=error.got, wanted=error.wanted, cure=error.cure))
        return None
    problems += _truths_as_numbers(made, prefix, given)
    return made


def _validate(kind: type[D], values: Mapping[Path, Any]) -> D:
    """The settings; a single value where only a list would do is a list of one (`target: attention`)."""
    try:
        return kind.model_validate(_nested(values))
    except ValidationError as error:
        no_lists = [
            detail["loc"]
            for detail in error.errors()
            if detail["type"] in ("tuple_type", "list_type")
        ]
    alone = {
        path
        for path, value in values.items()
        if isinstance(value, (str, int, float))
        and any(loc[: len(path)] == path for loc in no_lists)
    }
    return kind.model_validate(
        _nested({path: [value] if path in alone else value for path, value in values.items()})
    )


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (*groups, name), value in values.items():
        group = nested
        for above in groups:
            group = group.setdefault(above, {})
        group[name] = value
    return nested


def _truths_as_numbers(made: BaseModel, prefix: Path, given: Given) -> list[ConfigError]:
    """Pydantic reads true as 1; `rank: true` is a slip, not a rank."""
    problems: list[ConfigError] = []
    for path, value in given.values.items():
        if isinstance(value, bool) and path[: len(prefix)] == prefix:
            read: Any = made
            for name in path[len(prefix) :]:
                read = getattr(read, name, value)
            if isinstance(read, (int, float)) and not isinstance(read, bool):
                problems.append(
                    ConfigError(
                        at(given.origins[path], f"{'.'.join(path)} cannot have this value"),
                        got=write(value),
                        wanted="a number",
                    )
                )
    return problems


def _text(path: Path, given: Given, problems: list[AfinaError], *, needed: bool) -> str | None:
    value, name = given.values.get(path), path[0]
    if value is None and needed:
        problems.append(
            ConfigError(
                f"there is no {name}",
                cure=f"give it: {name}: … in YAML, or {name.upper()} on the command line",
            )
        )
    if value is None or isinstance(value, (str, FilePath)):
        return None if value is None else str(value)
    problems.append(
        ConfigError(
            at(given.origins[path], f"{'.'.join(path)} cannot have this value"),
            got=write(value),
            wanted="a text",
            cure="put it in quotes",
        )
    )
    return None


def values_of(config: RunConfig[D], keys: Sequence[str]) -> dict[Path, Any]:
    """Every value of a configuration by its path, in the order a file has them; tuples as lists."""
    values: dict[Path, Any] = {
        ("model",): config.model,
        ("revision",): config.revision,
        ("data", "source"): config.source,
        ("val",): config.val,
    }
    for prefix, group in [
        (("data",), config.data),
        *((("techniques", key), value) for key, value in zip(keys, config.techniques, strict=True)),
        (("train",), config.train),
        (("eval",), config.eval),
        (("parallel",), config.parallel),
    ]:
        _add(values, prefix, group)
    return values


def _add(values: dict[Path, Any], prefix: Path, group: BaseModel) -> None:
    plain = group.model_dump(mode="json")
    for name in type(group).model_fields:
        below = getattr(group, name)
        if isinstance(below, BaseModel):
            _add(values, (*prefix, name), below)
        else:
            values[*prefix, name] = plain[name]
