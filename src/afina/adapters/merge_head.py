"""A classifier's adapter and a base that has no such head: the merged model is the classifier, head and all.

The adapter brings the head whole. What the base's files have for another task (a head that predicts tokens) goes, for
the merged model has no place for it, and its configuration says what it is and what its classes are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afina import seams
from afina.adapters.base_files import Shards, places
from afina.adapters.card import head_of_base
from afina.errors import AdapterError, ModelError
from afina.models import hub
from afina.tree.fold import tied_groups


@dataclass(frozen=True)
class NewHead:
    """What a classifier has and its base has not.

    Attributes:
        names: of the head's tensors, which the adapter must bring.
        left: names, in the base's files, of what the classifier has no place for.
    """

    names: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()

    def shards(self, shards: Shards) -> Shards:
        """The base's files without what is left out; a file of which nothing stays goes."""
        kept = {f: [one for one in s if one.name not in self.left] for f, s in shards.items()}
        return {file: stored for file, stored in kept.items() if stored}

    def refuse_missing(self, whole: Mapping[str, Any]) -> None:
        """Raises unless the adapter brings the head.

        Raises:
            AdapterError: see above.
        """
        missing = [name for name in self.names if name not in whole]
        if missing:
            raise AdapterError(
                "neither the adapter nor its base has the classifier's head",
                got=", ".join(missing),
                wanted="an adapter that was saved with its head",
                cure="merge into the classifier that it was trained beside: --base MODEL (in Python base='MODEL')",
            )


def skeleton_of(base: Path, adapter: Path) -> Any:
    """The base on the meta device, with the head that the adapter was trained with."""
    return hub.skeleton(base, **head_of_base(adapter))


def new_head(skeleton: Any, shards: Shards) -> NewHead:
    """The head that a base's files do not have.

    Args:
        skeleton: the classifier on the meta device, without an adapter; any other model has no new head.
        shards: the headers of the base's files.

    Raises:
        ModelError: the files lack more than the head.
    """
    heads = [
        f"{module}.{name}"
        for module in seams.task_head(skeleton)
        for name, _ in skeleton.get_submodule(module).named_parameters()
    ]
    found = places(skeleton, shards)
    there = {place.name for place in found.values() if place.whole or place.piece}
    names = tuple(name for name in heads if name not in there)
    if not names:
        return NewHead()
    ties = {name: group for group in tied_groups(skeleton) for name in group}
    every = [name for name, _ in skeleton.named_parameters() if name not in names]
    lost = [name for name in every if not there & {name, *ties.get(name, ())}]
    if lost:
        raise ModelError(
            "the base's files lack tensors of the classifier beside its head: these were drawn when it was loaded",
            got=", ".join(lost[:4]),
            wanted="a base that has all but the head",
            cure="merge in memory: edit.merge(), edit.keep(), model.save_pretrained(folder)",
        )
    own = {*skeleton.state_dict(), *skeleton.all_tied_weights_keys} - set(names)
    left = {s for s, p in found.items() if not (p.whole or p.piece) and p.name not in own}
    return NewHead(names, frozenset(left))


def configure(settings: dict[str, Any], skeleton: Any, tokenizer: Path) -> None:
    """Writes into a base's settings that it is this classifier, and what Transformers must know to run it.

    Args:
        settings: of `config.json`; changed.
        skeleton: the classifier; it learns of the padding.
        tokenizer: the folder of its tokenizer.
    """
    hub.load_tokenizer(tokenizer, skeleton)  # says what pads
    of_text = settings.get("text_config")
    for part in (settings, of_text if isinstance(of_text, dict) else settings):
        part["pad_token_id"] = skeleton.config.pad_token_id
    settings["architectures"] = [type(skeleton).__name__]
    names = skeleton.config.id2label
    settings["id2label"] = {str(number): name for number, name in sorted(names.items())}
    settings["label2id"] = {name: number for number, name in sorted(names.items())}
