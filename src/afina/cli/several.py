"""Adapters by name and strength, several on one model: `runs/a:0.7`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afina.cli.common import Target, resolve_run
from afina.cli.output import note
from afina.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Further = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="ADAPTER[:SCALE]",
        help="a further adapter of the same base that acts too, so many times (1 if none is given)",
    ),
]

Scaled = tuple[str, float]
"""A name, and how many times its change counts."""


def weighted(word: str) -> Scaled:
    """A name and its weight: "runs/a:0.7" is 0.7 times runs/a, and "runs/a" once.

    Raises:
        ConfigError: what follows the last colon is no number, and no place has the whole name.
    """
    name, weight = split(word)
    if weight is None and ":" in word and not _there(word):
        raise ConfigError(
            "the weight of an adapter is no number",
            got=word,
            wanted="NAME:WEIGHT, such as runs/a:0.7",
        )
    return name, 1.0 if weight is None else weight


def split(word: str) -> tuple[str, float | None]:
    """The same for a name that may have a colon of its own: without a number behind it, it is the whole name."""
    name, colon, weight = word.rpartition(":")
    if not colon or not name or _there(word):
        return word, None
    try:
        return name, float(weight)
    except ValueError:
        return word, None


def _there(word: str) -> bool:
    from afina.places import exists, local

    return exists(local(word))


def targets(name: str, further: Sequence[str]) -> list[tuple[Target, float]]:
    """The model with its first adapter, if there is one, and the further adapters; with how often each counts.

    A model alone takes the first of the further ones as its own.

    Raises:
        ConfigError: a strength that is no number.
        AfinaError: a name that means no adapter, where it must.
    """
    from afina.adapters.sources import adapter_of

    word, scale = split(name)
    first = resolve_run(word) if scale is None else adapter_of(word)
    found = [(first, 1.0 if scale is None else scale)]
    found += [(adapter_of(one), times) for one, times in map(weighted, further)]
    for target, times in found:
        if not math.isfinite(times):
            raise ConfigError(
                "an adapter counts a number of times", got=f"{target.adapter}: {times}"
            )
    if first.adapter is None and first.run is None and further:
        (own, times), *others = found[1:]
        return [(replace(first, adapter=own.adapter, run=own.run), times), *others]
    return found


def put_all(
    model: Any, every: Sequence[tuple[Path, float]], *, allow_partial: bool
) -> tuple[Any, ...]:
    """Puts adapters onto a model, each as often as it counts, and notes how they met it.

    Returns:
        Their edits.

    Raises:
        AfinaError: one does not fit the model, or cannot act beside the others.
    """
    from afina.adapters import files

    edits: list[Any] = []
    for folder, times in every:
        fitted = files.fit(model, folder, allow_partial=allow_partial)
        edits.append(files.put(model, fitted))
        for line in fitted.notes:
            note(line)
        if times != 1:
            edits[-1].scale(times)
            note(f"{folder} counts {times:g} times")
    return tuple(edits)
