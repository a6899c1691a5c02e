"""Changing a model: children attached, tensors trained in place, weights folded; and the way back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from afina.counts import format_counts, parameter_counts
from afina.errors import TechniqueError
from afina.tree.attached import Attached
from afina.tree.changes import Changes
from afina.tree.fold import Folds
from afina.tree.technique import Delta, Technique
from afina.tree.timing import Seams


class Edit(Changes):
    """What was changed in a model, what will train, and how to undo it; `Changes` has what can be asked."""

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]) -> None:
        super().__init__(model, techniques)
        self._snapshots: dict[str, Tensor] = {}
        self._replaced: dict[str, Callable[[], None]] = {}
        self._given_up: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._undone = False
        self._attached: list[Attached] = []
        self._folds: Folds | None = None

    @property
    def undone(self) -> bool:
        """Whether `undo` has been called."""
        return self._undone

    def attach(self, target: str, technique: Technique, delta: Delta) -> None:
        """Makes `delta` a child of the module `target`, where it acts.

        Raises:
            TechniqueError: when that module already has a child of this name.
        """
        module = self.model.get_submodule(target)
        key = technique.key
        if hasattr(module, key):
            raise TechniqueError(
                f"{target} already has something named {key!r}",
                cure="undo the earlier edit first, or apply all techniques in one call; two adapters of one kind add "
                "up to one: afina combine A B -o C (in Python afina.combine)",
            )
        delta.train(module.training)
        module.add_module(key, delta)
        attached = Attached(module, key)
        attached.hook()
        self._attached.append(attached)
        self.deltas[f"{target}.{key}"] = delta
        self._maker[f"{target}.{key}"] = technique
        for name, _ in delta.named_parameters():
            self._owner[f"{target}.{key}.{name}"] = technique

        def undo() -> None:
            attached.unhook()
            delattr(module, key)

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
        if undoable and not parameter.is_meta:
            self._snapshots[name] = parameter.detach().clone()
        self.in_place[name] = parameter
        self._owner[name] = technique
        parameter.requires_grad_(True)
        self._undo.append(lambda: self._restore(name, parameter, undoable))

    def _restore(self, name: str, parameter: nn.Parameter, undoable: bool) -> None:
        parameter.grad = None
        if undoable and not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(self._snapshots.pop(name))

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

    @contextmanager
    def disabled(self) -> Generator[None, None, None]:
        """The base model inside the block: children off, tensors trained in place swapped for their originals.

        Raises:
            TechniqueError: when a tensor was trained in place without keeping its original.
        """
        missing = [name for name in self.in_place if name not in self._snapshots]
        if missing:
            raise TechniqueError(
                "the base cannot be shown: its tensors were trained without keeping the originals",
                got=", ".join(missing[:3]),
                cure="apply with undoable=True, or load the base model again",
            )
        before = {name: delta.enabled for name, delta in self.deltas.items()}
        trained = {name: p.detach().clone() for name, p in self.in_place.items()}
        try:
            self._write({name: self._snapshots[name] for name in self.in_place})
            for delta in self.deltas.values():
                delta.enabled = False
            with self.unfolded():
                yield
        finally:
            self._write(trained)
            for name, delta in self.deltas.items():
                delta.enabled = before[name]

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.in_place[name].copy_(value)

    @property
    def merged(self) -> bool:
        """Whether the changes are folded into the base's weights just now."""
        return self._folds is not None

    def merge(self) -> dict[str, float]:
        """Folds every change into the weight beside it: the model has the base's modules and no hook of ours acts.

        Each sum is made in fp32 and rounded once, to the weight's dtype. The originals are kept, for `unmerge`.
        A head that shares the embedding's weight gets one of its own, if only one of the two is changed or the
        changes differ; the model's config says so until `unmerge`.

        Returns:
            Of each changed module, the share of its change that the rounding lost.

        Raises:
            TechniqueError: merged or undone already, or a change cannot be folded; the model is then as it was.
        """
        if self._undone or self._folds is not None:
            raise TechniqueError(
                "the edit was undone: there is nothing to merge"
                if self._undone
                else "the edit is merged already: its changes would count twice",
                cure="apply again: afina.apply(model, [...])" if self._undone else "edit.unmerge()",
            )
        if not all(delta.enabled for delta in self.deltas.values()):
            raise TechniqueError("the edit is disabled", cure="merge outside of edit.disabled()")
        self._folds = Folds(
            self.model, {n: d for n, d in self.deltas.items() if not d.only_in_training}
        )
        for attached in self._attached:
            attached.unhook()
        return self._folds.rounding

    def unmerge(self) -> None:
        """The state before `merge`: the base's own tensors, bit for bit, for they were kept and not computed back.

        Raises:
            TechniqueError: not merged.
        """
        if self._folds is None:
            raise TechniqueError("the edit is not merged", cure="edit.merge() first")
        self._folds.take_out()
        self._folds = None
        for attached in self._attached:
            attached.hook()

    def keep(self) -> None:
        """Makes the merged weights the model's own: what was attached goes, and there is no way back.

        Afterwards the model is a plain one, to be saved with its own `save_pretrained`.

        Raises:
            TechniqueError: not merged.
        """
        if self._folds is None:
            raise TechniqueError("the edit is not merged", cure="edit.merge() first")
        with torch.no_grad():
            for name, kept in self._snapshots.items():
                kept.copy_(self.in_place[name])
        self._folds = None
        self._reverse()

    @contextmanager
    def unfolded(self) -> Generator[None, None, None]:
        """The base's own weights inside the block, whether merged or not; what the edit attached acts as before."""
        if self._folds is None:
            yield
            return
        self._folds.take_out()
        try:
            yield
        finally:
            self._folds.put_in()

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
        # `other`'s steps look snapshots up in `other`; both dictionaries hold the same tensors.
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
