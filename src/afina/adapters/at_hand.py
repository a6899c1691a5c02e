"""The base of adapters that arithmetic is done with, where its files are at hand: what they are checked against.

Products can be added without it, so it is never downloaded for that alone. Where it is there, each adapter is fitted to
it as if it were loaded, and so is the result. Whole modules need it: they are added as changes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from afina import seams
from afina.adapters.base_files import reader
from afina.adapters.fingerprint import Read, base_fingerprint, same_base
from afina.adapters.fitting import KINDS, fit
from afina.adapters.kinds import refuse_settings
from afina.adapters.layout import CONFIG, PREFIX, read_tensors
from afina.adapters.merge_shards import read_shards
from afina.adapters.names import entries
from afina.adapters.placing import place
from afina.adapters.sources import Source
from afina.errors import AdapterError, ConfigError, ModelError
from afina.models import hub
from afina.models.locate import resolve
from afina.places import exists, local
from afina.tree.fold import tied_groups

OTHER_BASE = (
    "name the base that it was trained beside, {base!r}: --base MODEL (in Python base='MODEL')"
)
"""What helps against an adapter that does not fit."""


@dataclass(frozen=True)
class AtHand:
    """A model whose files are here; of its values only those are read that are looked at.

    Attributes:
        name: as users call it.
        folder: where it lies.
        skeleton: the model on the meta device.
        read: its values, by the model's names.
        complete: the files hold each of the model's tensors, whole or in pieces, but for the new ones.
        new: tensors of a classifier's head that the files have not.
    """

    name: str
    folder: Path
    skeleton: Any
    read: Read
    complete: bool
    new: frozenset[str] = frozenset()

    def fingerprint(self, without: Sequence[str] = ()) -> str | None:
        """The base's, some tensors left out; None where its files do not hold the model's tensors."""
        if not self.complete:
            return None
        return base_fingerprint(self.skeleton, without=without, read=self.read)

    def fitted(self, source: Source) -> tuple[Source, tuple[str, ...]]:
        """The adapter under this model's names, and how the two met; what is the base's own is taken out of it.

        Raises:
            AdapterError: listing what does not fit.
        """
        kind = refuse_settings(source.config, KINDS, source.folder / CONFIG)
        notes, tensors = self.check(source.folder)
        found = entries(read_tensors(source.folder), kind.ending, kind.part)
        placed = place(self.skeleton, source.config, kind, found)
        names = {placed.seen[name]: name for name in placed.parts}
        whole = {k.removeprefix(PREFIX): t for k, t in tensors.items() if not kind.ending.search(k)}
        return replace(source.renamed(names), whole=whole), notes

    def check(self, folder: Path) -> tuple[tuple[str, ...], Mapping[str, Tensor]]:
        """How the adapter in a folder meets this model, and its tensors.

        Raises:
            AdapterError: listing what does not fit.
        """
        fitted = fit(
            self.skeleton, folder, read=self.read, checks_base=self.complete, cure=OTHER_BASE
        )
        return fitted.notes, fitted.tensors


def open_model(name: str, folder: Path, head: Mapping[str, Any] | None = None) -> AtHand:
    """The model in a folder.

    Args:
        name: as users call it.
        folder: where it lies.
        head: that a classifier has and its files have not; see `card.head_of_base`.

    Raises:
        ModelError: its files are damaged, or no safetensors.
    """
    shards, skeleton = read_shards(folder), hub.skeleton(folder, **(head or {}))
    skeleton.config._name_or_path = str(folder)  # for errors
    read, located = reader(skeleton, shards)
    ties = {one: group for group in tied_groups(skeleton) for one in group}
    names = [one for one, _ in skeleton.named_parameters()]
    lost = {one for one in names if not located & {one, *ties.get(one, ())}}
    anew = tuple(f"{module}." for module in seams.task_head(skeleton))
    new = frozenset(one for one in lost if one.startswith(anew))
    return AtHand(name, folder, skeleton, read, lost == new, new)


def base_at_hand(
    source: Source,
    named: str | Path | None,
    *,
    token: str | None = None,
    offline: bool | None = None,
) -> AtHand | str:
    """The base, or why it is not at hand.

    Args:
        source: an adapter.
        named: the base that the user named, which must be found; None looks for the adapter's own, on this machine.
        token: of the Hub.
        offline: True downloads not even a named base.

    Raises:
        AfinaError: a named base is not found, or cannot be used.
    """
    target = source.target
    if named is not None:
        return open_model(str(named), resolve(named, token=token, offline=offline), source.head)
    try:
        folder = resolve(target.base, revision=target.revision, offline=True)
        return open_model(target.base, folder, source.head)
    except (ModelError, ConfigError) as error:
        return f"the base {target.base} is not at hand ({error.what})"


def refuse_other_bases(sources: Sequence[Source], *, named: bool) -> None:
    """Raises for adapters of different bases, as far as they themselves tell.

    Two fingerprints that leave out the same tensors decide; else the names of the bases must be one, unless the user
    named the base. A base and the same one quantised are two: a change was learnt beside the one or the other.

    Raises:
        AdapterError: naming the two.
    """
    first = sources[0]
    for other in sources[1:]:
        if first.rounded != other.rounded:
            raise AdapterError(
                "these adapters were trained beside different weights of one base",
                got=f"{_said(first)}; {_said(other)}",
                wanted="adapters of one base, quantised alike or not at all",
            )
        if _classes(first) != _classes(other):
            raise AdapterError(
                "these adapters are of models with other heads",
                got=f"{first.name}: {_head_said(first)}; {other.name}: {_head_said(other)}",
                wanted="adapters of one base, and of one task with the same classes",
            )
        one, two = first.record, other.record
        if one is not None and two is not None and set(one.trained) == set(two.trained):
            if same_base(one.fingerprint, two.fingerprint):
                continue
            told = f"{first.name}: {one.fingerprint}; {other.name}: {two.fingerprint}"
            cure = "adapters of one base can be combined, for a change is a change of its weights"
        elif named or _same_name(first.target.base, other.target.base):
            continue
        else:
            told = f"{first.name}: {first.target.base}; {other.name}: {other.target.base}"
            cure = "if these are one model, name it: --base MODEL (in Python base='MODEL')"
        raise AdapterError(
            "these adapters were made for different bases",
            got=told,
            wanted="adapters of one base",
            cure=cure,
        )


def _classes(source: Source) -> tuple[Any, ...] | None:
    """What must be the same of two classifiers; None for what is none."""
    head = source.head
    return (head["task"], head.get("labels") or head.get("num_labels")) if head else None


def _head_said(source: Source) -> str:
    head = source.head
    if not head:
        return "no classes"
    labels = head.get("labels")
    told = f"the classes {', '.join(labels[:4])}" if labels else f"{head.get('num_labels')} classes"
    return f"{head['task']}, {told}{', …' if labels and len(labels) > 4 else ''}"


def _said(source: Source) -> str:
    return f"{source.name}: {source.rounded or 'its weights as they are'}"


def _same_name(one: str, other: str) -> bool:
    places = (local(one), local(other))
    if all(map(exists, places)):
        return places[0].resolve() == places[1].resolve()
    return one == other
