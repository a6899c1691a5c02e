"""The tensors of a base's files by the names that the model has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from afina.adapters.merge_shards import Stored
from afina.errors import ModelError
from afina.tree.fold import tied_groups

Shards = Mapping[str, list[Stored]]
"""What the headers of a base's files say, by file."""


@dataclass(frozen=True)
class Place:
    """Where a stored tensor belongs.

    Attributes:
        name: the model's, of the tensor that it is or is a piece of; one that the model has not, for what it has no
            place for.
        whole: it is one of the model's tensors as it stands.
        piece: it is a piece of one.
    """

    name: str
    whole: bool
    piece: bool


def places(skeleton: Any, shards: Shards) -> dict[str, Place]:
    """The place of each stored tensor.

    Files may call tensors otherwise than the model does, or keep in pieces what is one tensor in the model (experts):
    Transformers' own table says which.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    table = get_model_conversion_mapping(skeleton)
    names = [each for each in table if isinstance(each, WeightRenaming)]
    pieces = [each for each in table if isinstance(each, WeightConverter)]
    own: dict[str, Any] = dict(skeleton.named_parameters(remove_duplicate=False))
    found: dict[str, Place] = {}
    for stored in (one for file in shards.values() for one in file):
        name, piece = rename_source_key(stored.name, names, pieces, skeleton.base_model_prefix, own)
        fits = name in own and tuple(own[name].shape) == stored.shape
        found[stored.name] = Place(name, piece is None and fits, piece is not None)
    return found


def locate(skeleton: Any, shards: Shards) -> dict[str, str]:
    """The skeleton's name for each stored tensor that is one of its tensors as it stands."""
    return {s: place.name for s, place in places(skeleton, shards).items() if place.whole}


ReadTensor = Callable[[str], Tensor]
"""The base's tensor of that name, read from its file."""


def reader(skeleton: Any, shards: Shards) -> ReadTensor:
    """Finds the base's tensors by the model's names; of each only what is looked at is read."""
    names = locate(skeleton, shards)
    where = {names[one.name]: one for file in shards.values() for one in file if one.name in names}
    ties = {name: group for group in tied_groups(skeleton) for name in group}

    def read(name: str) -> Tensor:
        stored = next((where[n] for n in (name, *ties.get(name, ())) if n in where), None)
        if stored is None:
            raise ModelError("the base's files keep this tensor in another form", got=name)
        return stored.mapped()

    return read
