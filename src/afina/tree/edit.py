"""Changing a model: children attached, tensors trained in place or replaced; and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import chain, count

import torch
from torch import nn

from afina.counts import format_counts, parameter_counts
from afina.errors import TechniqueError, counted
from afina.tree.attached import Attached
from afina.tree.folded import Folded
from afina.tree.standing import edits_on, enter, heir_of, lifted, merged_on, stands_on
from afina.tree.technique import Delta, Technique
from afina.tree.timing import Seams


class Edit(Folded):
    """What was changed in a model, what will train, and how to undo it.

    `Changes` has what can be asked, `Switched` what acts and how much, `Folded` merging.
    """

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]) -> None:
        super().__init__(model, techniques)
        self._replaced: dict[str, Callable[[], None]] = {}
        self._given_up: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._home = self  # the edit that absorbed this one

    def stand(self) -> None:
        """Freezes the model, and takes a place among the edits that stand on it."""
        beside = len(stands_on(self.model))
        if beside:
            self.notes.append(
                f"{counted(beside, 'edit')} from before {'acts' if beside == 1 else 'act'} on this model too: answers "
                "are those of all together, and what trains now learns beside what is there"
            )
        self._undo.append(enter(self))

    def attach(self, target: str, technique: Technique, delta: Delta) -> None:
        """Makes `delta` a child of the module `target`, where it acts, beside others of its kind if they add up.

        Raises:
            TechniqueError: what is there already cannot act beside it.
        """
        module = self.model.get_submodule(target)
        child = _name_beside(module, target, technique.key, delta)
        delta.train(module.training)
        module.add_module(child, delta)
        attached = Attached(module, child)
        attached.hook()
        self._attached.append(attached)
        name = f"{target}.{child}"
        self.deltas[name] = delta
        self._maker[name] = technique
        for own, _ in delta.named_parameters():
            self._owner[f"{name}.{own}"] = technique

        def undo() -> None:
            attached.unhook()
            delattr(module, child)

        self._undo.append(undo)

    def train_in_place(self, name: str, technique: Technique, *, undoable: bool) -> None:
        """Lets the base tensor `name` train where it is."""
        parameter = self.model.get_parameter(name)
        if not parameter.is_floating_point():
            raise TechniqueError(
                f"{name} cannot be trained in place",
                got=parameter.dtype,
                wanted="a floating-point tensor",
                cure="load the model unquantised, or leave this module out",
            )
        if any(edit.folded_to(parameter) for edit in edits_on(self.model)):
            raise TechniqueError(
                f"{name} has an earlier edit's change folded in: it would train only until that is taken out",
                cure="unmerge the earlier edit first",
            )
        if undoable and not parameter.is_meta:
            self._snapshots[name] = parameter.detach().clone()
        self.in_place[name] = parameter
        self._owner[name] = technique
        parameter.requires_grad_(True)
        self._undo.append(lambda: self._restore(name, parameter, undoable))

    @torch.no_grad()
    def _restore(self, name: str, parameter: nn.Parameter, undoable: bool) -> None:
        parameter.grad = None
        if not undoable or parameter.is_meta:
            return
        home = self._home
        original, heir = home._snapshots.pop(name, None), heir_of(home, name)
        if original is None:  # exchanged since; see `renew`
            return
        if heir is None:
            parameter.copy_(original)
        else:
            heir.inherit(name, original)

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Puts another tensor in the place of the base's `name`; the original is kept until `give_up_originals`."""
        target, _, own = name.rpartition(".")
        module, original = self.model.get_submodule(target), self.model.get_parameter(name)
        setattr(module, own, parameter)

        def undo() -> None:
            setattr(module, own, original)

        self._replaced[name] = undo
        self._undo.append(undo)

    def give_up_originals(self) -> None:
        """Lets go of the tensors in whose place others were put: their memory is free, and there is no `undo`."""
        steps = list(self._replaced.values())
        self._undo = [step for step in self._undo if step not in steps]
        self._given_up.extend(self._replaced)
        self._replaced.clear()

    def renew(self) -> None:
        """See `Changes.renew`; what was exchanged cannot be put back, so nothing is kept for that."""
        before = self.in_place
        super().renew()
        for name, parameter in self.in_place.items():
            if parameter is not before[name]:
                self._snapshots.pop(name, None)

    def keep(self) -> None:
        """Makes the merged weights the model's own: what was attached goes, and there is no way back.

        Afterwards the model is a plain one, to be saved with its own `save_pretrained`.

        Raises:
            TechniqueError: not merged, or an edit that was merged before it still is.
        """
        if self._folds is None:
            raise TechniqueError("the edit is not merged", cure="edit.merge() first")
        if any(other.merged_at < self.merged_at for other in merged_on(self.model)):
            raise TechniqueError(
                "another edit was merged before this one: what it folded in could not be taken out any more",
                cure="keep or unmerge the other one first",
            )
        with torch.no_grad():
            for name, kept in self._snapshots.items():
                kept.copy_(self.in_place[name])
        self._folds = None
        self._reverse()

    def undo(self) -> None:
        """The base model again, bit for bit, merged or not. A second call does nothing.

        Raises:
            TechniqueError: when a tensor was trained in place, or replaced, without keeping its original.
        """
        if self._undone:
            return
        lost = [n for n, p in self.in_place.items() if n not in self._snapshots and not p.is_meta]
        lost += self._given_up
        if lost:
            raise TechniqueError(
                "cannot undo: base tensors were changed without keeping the originals",
                got=", ".join(lost[:3]),
                cure="apply with undoable=True, or load the base model again",
            )
        if self.merged:
            self.unmerge()
        with lifted(merged_on(self.model) if self.in_place or self._replaced else []):
            self._reverse()

    def _reverse(self) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()
        self._undone = True

    @contextmanager
    def whole(self) -> Generator[Edit, None, None]:
        """All of the block's changes or, when it raises, none of them: nothing has trained yet, so all can go back."""
        try:
            yield self
        except BaseException:
            self._reverse()
            raise

    def on_undo(self, step: Callable[[], None]) -> None:
        """Adds a step to undo; the last added runs first."""
        self._undo.append(step)

    def absorb(self, other: Edit) -> None:
        """Takes over everything `other` did, so that one undo reverses both."""
        other._home = self
        self._attached.extend(other._attached)
        self.deltas.update(other.deltas)
        self.in_place.update(other.in_place)
        self.warnings.extend(other.warnings)
        self.notes.extend(other.notes)
        self._owner.update(other._owner)
        self._maker.update(other._maker)
        self._snapshots.update(other._snapshots)
        self._replaced.update(other._replaced)
        self._given_up.extend(other._given_up)
        self._undo.extend(other._undo)

    def seams(self, total_steps: int) -> Seams:
        """What the techniques do in the training loop."""
        found = Seams()
        for technique in self.techniques:
            found = found.and_then(technique.seams(self, total_steps))
        return found

    def columns(self) -> tuple[str, ...]:
        """Columns of the user's training rows that the techniques read, beside what rows are made from."""
        return tuple(name for technique in self.techniques for name in technique.columns())

    def opening(self, loss: Callable[[], float]) -> list[str]:
        """What the techniques make of the model as a run begins, in lines; see `Technique.opening`."""
        return [line for technique in self.techniques for line in technique.opening(self, loss)]

    def outcome(self) -> list[str]:
        """What training made of the techniques beside the values, in lines."""
        return [line for technique in self.techniques for line in technique.outcome(self)]

    def summary(self) -> str:
        """The table of trainable and total parameters, one line a block or group of equal blocks."""
        lines = format_counts(parameter_counts(self.model, self.trainable()))
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), *self.outcome()])


def _name_beside(module: nn.Module, target: str, key: str, delta: Delta) -> str:
    """A name for the child: the technique's key, with a number where that is taken.

    Raises:
        TechniqueError: another of its kind is there, and the two cannot both act.
    """
    numbered = re.compile(rf"{re.escape(key)}(_\d+)?")
    there = {n: child for n, child in module.named_children() if numbered.fullmatch(n)}
    others = [child for child in there.values() if isinstance(child, Delta)]
    why = delta.refused_beside(others)
    if why:
        raise TechniqueError(
            f"{target or 'the model'} has a child {next(iter(there))!r}, and two cannot act together: {why}",
            cure="undo the earlier edit first, or switch between them: each is put on when the other is undone",
        )
    names = chain([key], (f"{key}_{number}" for number in count(2)))
    return next(name for name in names if not hasattr(module, name))
