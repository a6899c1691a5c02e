"""What a merged model needs of its settings: biases that the base has not, and a tied weight that becomes two.

A model has either by a setting of its configuration, or not at all: then merging is refused.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from afina.errors import AdapterError, TechniqueError
from afina.tree import Delta
from afina.tree.biases import settings_for
from afina.tree.fold import fold_bias, refuse_other_ties, stays_tied


@dataclass(frozen=True)
class NewBiases:
    """Biases that the merged model has and the base has not.

    Attributes:
        settings: see `Plan`.
        values: the children that make each, by the bias's name; none make zero.
    """

    settings: Mapping[str, bool]
    values: Mapping[str, Sequence[Delta]]


def new_biases(skeleton: Any, deltas: Mapping[str, Sequence[Delta]]) -> NewBiases:
    """What the children add to maps that have no bias.

    Raises:
        AdapterError: the model has no setting that gives these maps one.
    """
    found = {
        f"{target}.bias": each
        for target, each in deltas.items()
        if getattr(skeleton.get_submodule(target), "bias", None) is None
        and fold_bias(None, each, torch.float32) is not None
    }
    with _unmergeable():
        made = settings_for(skeleton, found)
    return NewBiases(made.settings, {**found, **dict.fromkeys(made.zero, ())})


@contextmanager
def _unmergeable() -> Generator[None, None, None]:
    """What is said of a technique inside the block is said of the adapter."""
    try:
        yield
    except TechniqueError as error:
        raise AdapterError(
            f"the adapter cannot be merged: {error.what}",
            got=error.got,
            wanted=error.wanted,
            cure=error.cure,
        ) from None


def parted(
    skeleton: Any, group: Mapping[str, list[str]], deltas: Mapping[str, Sequence[Delta]]
) -> list[str]:
    """Names of a tied tensor that differ after the merge, all of them; empty when none do.

    Raises:
        AdapterError: where the model has no setting that parts them.
    """
    tied = (f"{name}.weight" for name in deltas if f"{name}.weight" in group)
    touched = next((name for name in tied if not stays_tied(group[name], deltas)), None)
    if touched is None:
        return []
    with _unmergeable():
        refuse_other_ties(skeleton, touched)
    return list(group[touched])
