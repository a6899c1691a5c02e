"""What a technique must say to have its adapters in PEFT's layout; `fitting` and `files` do the rest.

A technique's `Kind` is a table of plain values and functions. To add one: write it beside `peft_lora.LORA` and put it
into `fitting.KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from afina.errors import AdapterError, nearest
from afina.tree import Delta, Technique

Config = Mapping[str, Any]
Parts = Mapping[str, Tensor]
"""The tensors of one place, by the ending of their keys: `lora_A.weight`."""


@dataclass(frozen=True)
class Allowed:
    """What may stand in a configuration file.

    Attributes:
        needed: keys that must be there, for what is left out is never guessed.
        types: of the keys whose values are used.
        items: types of what is in their lists.
        neutral: keys with the values that say nothing; any other value is a variant, which would load as something it
            is not.
        free: keys whose values do not matter, or are judged where they are used.
        cures: what to do about a variant.
    """

    needed: tuple[str, ...]
    types: Mapping[str, tuple[type, ...]]
    items: Mapping[str, type]
    neutral: Mapping[str, tuple[object, ...]]
    free: frozenset[str]
    cures: Mapping[str, str]


@dataclass(frozen=True)
class Part:
    """What one technique has in a changed model.

    Attributes:
        model: the changed model.
        technique: whose part this is.
        deltas: its children, by the name of the module that each acts on.
        in_place: the base tensors that it trains, by name.
        rows: the rows of tokens are among the children, as PEFT has them in a LoRA's folder; see `beside_lora`.
    """

    model: nn.Module
    technique: Technique
    deltas: Mapping[str, Delta]
    in_place: Mapping[str, nn.Parameter]
    rows: bool = False


@dataclass(frozen=True)
class Found:
    """What a file that does not go by places holds, as its kind read it.

    Attributes:
        technique: makes the places that the tensors are for.
        tensors: as `Kind.stored` gives them.
        problems: (tensor, why) of each that does not fit.
    """

    technique: Technique
    tensors: Mapping[str, Tensor]
    problems: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Kind:
    """How one technique lies in an adapter's folder; in PEFT's layout, where PEFT has it.

    Most techniques add tensors to places of a model, and their files go by the names of these. What lies in a file
    otherwise (one tensor for all layers; a product of what trains) says how by `stored`, `fill` and `read`; the fields
    between `ending` and `technique_of` are then left out.

    Attributes:
        technique: the class of its settings.
        peft_type: what PEFT calls it; another word where PEFT has nothing of the kind.
        allowed: what its configuration may hold.
        config: the technique's own lines of `adapter_config.json`.
        ending: the end of a key that belongs to a place; group `part` is the ending without an adapter's name, group
            `adapter` that name, if there is one.
        part: the canonical ending that a match of `ending` stands for.
        tensors: the tensors of a delta by the ending of their keys; writing into them writes into the model, unless
            there is `put`.
        put: gives a delta the values of such tensors.
        sites: the places of a model where it can act, by name, each with whatever `misfit` must know of it.
        named: the names of the sites that a configuration names, given how it calls each module of the model; None when
            it does not say.
        misfit: what is wrong with the tensors for one site, by ending; empty when nothing is.
        once: takes out of the places what says the same as another place; raises where the two differ.
        technique_of: the technique that makes exactly the places of a file.
        stored: all tensors of the file by their keys, for a part; None goes by `tensors`.
        fill: gives a part the values of such tensors; None copies each into the one of its key.
        read: (base, configuration, tensors) -> what they are; None goes by places.
        variant: whether a configuration with this `peft_type` is of this kind, where several kinds share the word.
        computed: the file's tensors are made of those that train, so that they cannot be put back into them.
        exact: the file has all that a run needs of the tensors that train, to go on from.
    """

    technique: type[Technique]
    peft_type: str
    allowed: Allowed
    config: Callable[[Part], dict[str, Any]]
    ending: re.Pattern[str] = re.compile(r"(?!)")
    part: Callable[[re.Match[str]], str] = lambda match: match["part"]
    tensors: Callable[[Delta], dict[str, Tensor]] = lambda delta: dict(delta.named_parameters())
    put: Callable[[Delta, Parts], None] | None = None
    sites: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {}
    named: Callable[[nn.Module, Config, Mapping[str, str]], set[str] | None] = lambda *_: None
    misfit: Callable[[Any, Parts], dict[str, str]] = lambda site, parts: {}
    once: Callable[[nn.Module, dict[str, dict[str, Tensor]]], None] = lambda model, parts: None
    technique_of: Callable[[nn.Module, Config, Places], Technique] | None = None
    stored: Callable[[Part], dict[str, Tensor]] | None = None
    fill: Callable[[Part, Mapping[str, Tensor]], None] | None = None
    read: Callable[[nn.Module, Config, Mapping[str, Tensor]], Found] | None = None
    variant: Callable[[Config], bool] = lambda config: True
    computed: Callable[[Part], bool] = lambda part: False
    exact: Callable[[Part], bool] = lambda part: True


@dataclass(frozen=True)
class Places:
    """What an adapter's file holds, under the model's own names.

    Attributes:
        parts: the tensors of each place.
        whole: modules that are saved whole.
        seen: how the file calls each place.
    """

    parts: Mapping[str, Parts]
    whole: Sequence[str]
    seen: Mapping[str, str]


def kind_of(config: Config, kinds: Mapping[str, Kind]) -> Kind | None:
    """The kind of a configuration; None where its `peft_type` is of none."""
    named = [kind for kind in kinds.values() if kind.peft_type == config.get("peft_type")]
    return next((kind for kind in named if kind.variant(config)), None)


def refuse_settings(config: Config, kinds: Mapping[str, Kind], where: object) -> Kind:
    """The kind of a configuration, which must hold nothing that this version does not know.

    Raises:
        AdapterError: naming every key that is missing, unknown, of a wrong type, or says a variant.
    """
    kind = kind_of(config, kinds)
    if kind is None:
        raise AdapterError(
            f"cannot load {where}",
            got=f"peft_type {config.get('peft_type')!r}",
            wanted=" or ".join(kinds),
        )
    allowed = kind.allowed
    problems = [
        f"{key} is missing (it is never guessed)" for key in allowed.needed if key not in config
    ]
    problems += [
        f"{key} = {config[key]!r}: not {' or '.join(k.__name__ for k in types)}"
        for key, types in allowed.types.items()
        if key in config
        and (config[key] is not None or key in allowed.needed)
        and type(config[key]) not in types  # true is no number
    ]
    problems += [
        f"{key} = {config[key]!r}: not a list of {item.__name__}"
        for key, item in allowed.items.items()
        if isinstance(config.get(key), list) and not all(type(x) is item for x in config[key])
    ]
    variants = [
        key
        for key, neutral in allowed.neutral.items()
        if key in config and not any(config[key] is n or config[key] == n for n in neutral)
    ]
    problems += [
        f"{key} = {config[key]!r}: a variant this version does not know" for key in variants
    ]
    known = {*allowed.needed, *allowed.types, *allowed.neutral, *allowed.free, "peft_type"}
    for key, value in config.items():
        if key not in known and value not in (None, False, {}, []):
            near = nearest(key, sorted(known), 1)
            hint = f" (near: {near[0]})" if near else ""
            problems.append(f"{key} = {value!r}: an unknown setting{hint}")
    if problems:
        cures = [allowed.cures[key] for key in variants if key in allowed.cures]
        if any("an unknown setting" in problem for problem in problems):
            version = config.get("peft_version", "that wrote it")
            cures.append(
                f"an unknown setting at its default in PEFT {version} can be taken out of the file"
            )
        raise AdapterError(
            f"cannot load {where}",
            got="; ".join(problems),
            wanted=f"plain {kind.technique.__name__}",
            cure="; ".join(cures) or None,
        )
    return kind


def named(patterns: list[str] | str | None, name: str) -> bool:
    """PEFT's rule: text is a regular expression of the whole name, a list holds names or their ends."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == p or name.endswith(f".{p}") for p in patterns or ())
