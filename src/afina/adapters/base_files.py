"""The tensors of a base's files by the names that the model has for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
    from transformers.core_model_loading import rename_source_key

    names, pieces = _table(skeleton)
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


def reader(skeleton: Any, shards: Shards) -> tuple[ReadTensor, set[str]]:
    """Finds the base's tensors by the model's names; of each only what is looked at is read.

    What files keep in pieces is read whole, and put together as Transformers does when it loads the model.

    Returns:
        What reads, and the names that it finds; of tied ones those in the files.
    """
    found = places(skeleton, shards)
    every = [one for file in shards.values() for one in file]
    where = {found[one.name].name: one for one in every if found[one.name].whole}
    pieces: dict[str, list[Stored]] = {}
    for one in every:
        if found[one.name].piece:
            pieces.setdefault(found[one.name].name, []).append(one)
    ties = {name: group for group in tied_groups(skeleton) for name in group}

    def read(name: str) -> Tensor:
        stored = next((where[n] for n in (name, *ties.get(name, ())) if n in where), None)
        if stored is not None:
            return stored.mapped()
        if name in pieces:
            return put_together(skeleton, name, pieces[name])
        raise ModelError("the base's files keep this tensor in another form", got=name)

    return read, {*where, *pieces}


def put_together(skeleton: Any, name: str, pieces: Sequence[Stored]) -> Tensor:
    """One tensor of the model from its pieces in the files.

    Args:
        skeleton: the base on the meta device.
        name: the model's, of the tensor.
        pieces: all that the files have of it.

    Raises:
        ModelError: they do not make that tensor.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    names, converters = _table(skeleton)
    own: dict[str, Any] = dict(skeleton.named_parameters(remove_duplicate=False))
    converter: Any = None
    for stored in sorted(pieces, key=lambda one: dot_natural_key(one.name)):
        target, pattern = rename_source_key(
            stored.name, names, converters, skeleton.base_model_prefix, own
        )
        if converter is None:
            converter = copy.deepcopy(next(c for c in converters if pattern in c.source_patterns))
        converter.add_tensor(target, stored.name, pattern, stored.mapped)
    try:
        made = converter.convert(name, model=skeleton, config=skeleton.config).get(name)
    except RuntimeError:  # of torch, where they do not fit each other
        made = None
    made = made[0] if isinstance(made, list) else made
    if made is None or made.shape != own[name].shape:
        together = "" if made is None else f", together {tuple(made.shape)}"
        raise ModelError(
            "the pieces in the base's files do not make the model's tensor",
            got=f"{name}: {len(pieces)} pieces{together}",
            wanted=tuple(own[name].shape),
            cure="fetch the model's files again: one of them may lack tensors",
        )
    return made


def _table(skeleton: Any) -> tuple[list[Any], list[Any]]:
    """Transformers' own table for a model: new names, and what is put together of pieces."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    table = get_model_conversion_mapping(skeleton)
    return (
        [each for each in table if isinstance(each, WeightRenaming)],
        [each for each in table if isinstance(each, WeightConverter)],
    )
