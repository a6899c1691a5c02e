"""What of an edit acts, and how much: on and off, more and less, the whole or a part of it, while it stays attached."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.tree.changes import Changes
from afina.tree.match import match, matches
from afina.tree.technique import Technique


class Switched(Changes):
    """What techniques changed in a model, and what of it acts.

    A part is chosen by patterns: the name of a module or of one that it lies in (`q_proj`, `self_attn`, `layers.3`),
    the key of a technique (`lora`), or a glob; no pattern means all.
    """

    def __init__(self, model: nn.Module, techniques: Sequence[Technique]) -> None:
        super().__init__(model, techniques)
        self._snapshots: dict[str, Tensor] = {}
        # Of base tensors that are trained in place: how much each counts, and what it was trained to, if not once.
        self._strengths: dict[str, float] = {}
        self._off: set[str] = set()
        self._trained: dict[str, Tensor] = {}

    @property
    def snapshots(self) -> Mapping[str, Tensor]:
        """The values before training of tensors that train in place, where they were kept."""
        return self._snapshots

    @property
    def whole_strength(self) -> bool:
        """Whether all of it acts, once."""
        children = all(d.enabled and d.strength == 1 for d in self.deltas.values())
        return children and not self._trained

    @property
    def strengths(self) -> dict[str, float]:
        """How many times each change counts just now, by the name of its child or of the tensor trained in place."""
        found = {name: d.strength if d.enabled else 0.0 for name, d in self.deltas.items()}
        return found | {name: self._share(name) for name in self.in_place}

    def scale(self, factor: float, *parts: str) -> None:
        """From now on the change counts `factor` times; 1 is as it was trained, and 0 is off.

        It is the change of what each module gives that is multiplied, and that of a tensor that was trained in place:
        W + factor · (W' - W). A merge folds that in too.

        Args:
            factor: any number; one below 0 turns the change round.
            parts: patterns; none means all.

        Raises:
            TechniqueError: no number, nothing matches, a part that has no strength (a prompt), an edit that is merged,
                or a tensor trained without keeping its original.
        """
        if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
            raise TechniqueError(
                "a change counts a number of times", got=repr(factor)[:80], wanted="edit.scale(0.5)"
            )
        children, tensors = self._parts(parts)
        fixed = [name for name in children if not self.deltas[name].scalable]
        if fixed and factor not in (0, 1):
            raise TechniqueError(
                "this can be on or off, but does not act more or less",
                got=", ".join(fixed[:3]),
                wanted="a factor of 0 or 1",
                cure="name the parts that are to be scaled: edit.scale(0.5, 'q_proj')",
            )
        self._refuse_lost(tensors)
        self._refuse_fixed()
        for name in children:
            self.deltas[name].counts(float(factor))
        self._write(tensors, lambda name: self._strengths.update({name: float(factor)}))

    def off(self, *parts: str) -> None:
        """Switches it off, or parts of it: the base acts there, bit for bit, until `on`.

        Raises:
            TechniqueError: see `scale`.
        """
        self._switch(parts, on=False)

    def on(self, *parts: str) -> None:
        """Switches on what `off` switched off; it counts as it did before.

        Raises:
            TechniqueError: see `scale`.
        """
        self._switch(parts, on=True)

    def _switch(self, parts: Sequence[str], *, on: bool) -> None:
        children, tensors = self._parts(parts)
        self._refuse_lost(tensors)
        self._refuse_fixed()
        for name in children:
            self.deltas[name].enabled = on
        change = self._off.difference_update if on else self._off.update
        self._write(tensors, lambda name: change([name]))

    @contextmanager
    def disabled(self, *parts: str) -> Generator[None, None, None]:
        """The base model inside the block: children off, tensors trained in place swapped for their originals.

        Args:
            parts: patterns of what is off; none means all.

        Raises:
            TechniqueError: when a tensor was trained in place without keeping its original, or nothing matches.
        """
        children, tensors = self._parts(parts)
        self._refuse_lost(tensors)
        before = {name: self.deltas[name].enabled for name in children}
        were_on = [name for name in tensors if name not in self._off]
        try:
            self._write(were_on, self._off.add)
            for name in children:
                self.deltas[name].enabled = False
            with self.unfolded():
                yield
        finally:
            for name in children:
                self.deltas[name].enabled = before[name]
            self._write(were_on, self._off.discard)

    @contextmanager
    def unfolded(self) -> Generator[None, None, None]:
        """The base's own weights inside the block; see `Folded`."""
        yield

    def _refuse_fixed(self) -> None:
        """Raises where what acts cannot be changed just now; see `Folded`."""

    # --- parts ------------------------------------------------------------------------------------------------------

    def _parts(self, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
        """Names of the children, and of the tensors trained in place, that the patterns mean.

        Raises:
            TechniqueError: a pattern is no text, or matches nothing.
        """
        children, tensors = list(self.deltas), list(self.in_place)
        if not patterns:
            return children, tensors
        strange = [p for p in cast("Sequence[object]", patterns) if not isinstance(p, str)]
        if strange:
            raise TechniqueError(
                "a part is named by a pattern",
                got=repr(strange[0])[:80],
                wanted="texts, such as edit.scale(0.5, 'self_attn')",
            )
        around = {name: _around(name) for name in children}
        around |= {name: [*_around(name), self._owner[name].key] for name in tensors}
        match(
            dict.fromkeys(n for names in around.values() for n in names), patterns, setting="parts"
        )
        chosen = {
            name
            for name, names in around.items()
            if any(matches(n, p) for n in names for p in patterns)
        }
        return [n for n in children if n in chosen], [n for n in tensors if n in chosen]

    def _refuse_lost(self, tensors: Sequence[str]) -> None:
        missing = [name for name in tensors if name not in self._snapshots]
        if missing:
            raise TechniqueError(
                "the base cannot be shown: its tensors were trained without keeping the originals",
                got=", ".join(missing[:3]),
                cure="apply with undoable=True, or load the base model again",
            )

    # --- tensors trained in place -----------------------------------------------------------------------------------

    def _share(self, name: str) -> float:
        """How many times the change of a tensor counts just now."""
        return 0.0 if name in self._off else self._strengths.get(name, 1.0)

    @contextmanager
    def settled(self) -> Generator[None, None, None]:
        """Tensors trained in place can be written inside the block; see `Folded`."""
        yield

    @torch.no_grad()
    def _write(self, names: Sequence[str], change: Callable[[str], None]) -> None:
        """Changes how much these tensors count, by `change(name)`, and gives them the values that follow."""
        before = {name: self._share(name) for name in names}
        for name in names:
            change(name)
        moved = [name for name in names if self._share(name) != before[name]]
        if not moved:
            return
        with self.settled():
            for name in moved:
                self._set(name, was_whole=before[name] == 1)

    def _set(self, name: str, *, was_whole: bool) -> None:
        parameter, share = self.in_place[name], self._share(name)
        if was_whole:
            self._trained[name] = parameter.detach().clone()
        if share == 1:
            parameter.copy_(self._trained.pop(name))
        elif share == 0:
            parameter.copy_(self._snapshots[name])
        else:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            original, trained = self._snapshots[name].to(wide), self._trained[name].to(wide)
            parameter.copy_(original + share * (trained - original))

    @torch.no_grad()
    def inherit(self, name: str, original: Tensor) -> None:
        """Takes over what a tensor was before an earlier edit trained it, which is gone."""
        self._snapshots[name] = original
        if self._share(name) != 1:
            self._set(name, was_whole=False)


def _around(name: str) -> list[str]:
    """A name and those of the modules that it lies in."""
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(1, len(pieces) + 1) if pieces[:end] != [""]]
