"""An edit's changes folded into the base's weights, and taken out again, also where other edits are folded in too."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from torch import nn

from afina.errors import TechniqueError
from afina.tree.attached import Attached
from afina.tree.fold import Folds, by_module
from afina.tree.standing import edits_on, lifted, merged_on
from afina.tree.switched import Switched
from afina.tree.technique import Technique

if TYPE_CHECKING:
    from afina.tree.edit import Edit


class Folded(Switched):
    """What techniques changed in a model, beside its weights or, when merged, in them."""

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]) -> None:
        super().__init__(model, techniques)
        self._attached: list[Attached] = []
        self._folds: Folds | None = None
        self._undone = False

    @property
    def undone(self) -> bool:
        """Whether `undo` has been called."""
        return self._undone

    @property
    def merged(self) -> bool:
        """Whether the changes are folded into the base's weights just now."""
        return self._folds is not None

    @property
    def merged_at(self) -> int:
        """Which of the merges of its model this is, the first being the least; 0 where it is not merged."""
        return 0 if self._folds is None else self._folds.number

    def merge(self) -> dict[str, float]:
        """Folds every change into the weight beside it: the model has the base's modules and no hook of ours acts.

        Each sum is made in fp32 and rounded once, to the weight's dtype. The originals are kept, for `unmerge`.
        A head that shares the embedding's weight gets one of its own, if only one of the two is changed or the
        changes differ; the model's config says so until `unmerge`. What is scaled is folded in so; what is off is not.

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
        if self.deltas and not any(delta.acts for delta in self.deltas.values()):
            raise TechniqueError(
                "the edit is disabled", cure="merge outside of edit.disabled(), or after edit.on()"
            )
        self._refuse_others()
        self.fold_in()
        assert self._folds is not None
        for attached in self._attached:
            attached.unhook()
        return self._folds.rounding

    def fold_in(self) -> None:
        """Folds what acts into the weights that are there now."""
        deltas = {n: d for n, d in self.deltas.items() if d.acts and not d.only_in_training}
        self._folds = Folds(self.model, deltas)

    def take_out(self) -> None:
        """The weights as they were before the last `fold_in`."""
        assert self._folds is not None
        self._folds.take_out()

    def unmerge(self) -> None:
        """The state before `merge`: the base's own tensors, bit for bit, for they were kept and not computed back.

        Edits that were merged later stay merged: they are folded again into the base's own tensors.

        Raises:
            TechniqueError: not merged.
        """
        if self._folds is None:
            raise TechniqueError("the edit is not merged", cure="edit.merge() first")
        with lifted(self._above()):
            self._folds.take_out()
            self._folds = None
        for attached in self._attached:
            attached.hook()

    @contextmanager
    def unfolded(self) -> Generator[None, None, None]:
        """The weights inside the block without what this edit folded in; what it attached acts as before."""
        if self._folds is None:
            yield
            return
        above = self._above()
        with lifted(above):
            self._folds.take_out()
        try:
            yield
        finally:
            with lifted(above):
                self._folds.put_in()

    @contextmanager
    def settled(self) -> Generator[None, None, None]:
        """No edit is folded into anything inside the block, so that the base's own tensors can be written."""
        with lifted(merged_on(self.model)):
            yield

    def folded_to(self, parameter: nn.Parameter) -> bool:
        """Whether this very tensor is one that the edit folded its changes to."""
        return self._folds is not None and self._folds.made(parameter)

    def _above(self) -> list[Edit]:
        """Those that were merged after this one, in that order."""
        return [other for other in merged_on(self.model) if other.merged_at > self.merged_at]

    def _refuse_fixed(self) -> None:
        if self.merged:
            raise TechniqueError(
                "the edit is merged: what it attached does not act, and is neither scaled nor switched",
                cure="edit.unmerge() first; a merge takes what acts, as it is scaled",
            )

    def _refuse_others(self) -> None:
        """Raises where another edit acts at the same places and the two do not simply add up.

        Raises:
            TechniqueError: naming the places.
        """
        mine = by_module({n: d for n, d in self.deltas.items() if d.acts})
        for other in edits_on(self.model):
            if other is cast("Edit", self) or other.merged:
                continue
            theirs = by_module({n: d for n, d in other.deltas.items() if d.acts})
            shared = [
                place
                for place in mine.keys() & theirs.keys()
                if not all(delta.additive for delta in (*mine[place], *theirs[place]))
            ]
            if shared:
                raise TechniqueError(
                    "another edit acts at the same places, and what the two do there does not simply add up",
                    got=f"{', '.join(sorted(shared)[:3])}{', …' if len(shared) > 3 else ''}",
                    cure="undo the other edit first, or apply all techniques in one call and merge that",
                )
