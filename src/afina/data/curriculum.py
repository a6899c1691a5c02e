"""Curriculum: easy rows first, and more and more of the others.

    rows of step t ~ uniform over { i : F(dᵢ) <= c(t) },    c(t) = min(1, sqrt(t (1 - c₀²) / T + c₀²))

From step T on the rows of every step are drawn from all of them. Each draw is a function of seed and step. `pacing` may
also be linear, in buckets (`steps`), or let rows grow instead of letting them in (`length`): then all rows are shown
from the start, but only the first L(t) tokens of each, and a row without a trained token among them waits until it has
one.

How long the run is does not change: `train.steps`, or as many steps as `train.epochs` would take without a curriculum.
Rows are not dealt out in epochs, though, so a row may come twice before another comes once. Validation always is on all
validation rows. Losses of early steps are of other rows than those of late ones, and are not to be compared.

Easy rows first is no sure gain: in more than 25,000 runs of "When Do Curricula Work?" it helped with little time or
wrong labels, and otherwise no more than a random order did. So `order: random` is at hand: the same numbers of rows let
in at the same time, but any rows. A gain that this control has too does not come from the difficulty.

Legend: d difficulty, F its rank among all rows (k of N is k / N; ties in an order of chance), t step from 0, T ramp,
c₀ start, L(t) tokens.

Source: Platanios et al. 2019, "Competence-based Curriculum Learning for Neural Machine Translation", arXiv 1903.09848,
section 3. Buckets: Bengio et al. 2009, "Curriculum Learning". Length: Li et al. 2021, arXiv 2108.06084, and DeepSpeed's
`CurriculumScheduler`. Controls: Wu, Dyer and Neyshabur 2021, arXiv 2012.03107.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from afina.data import curriculum_difficulty as difficulties
from afina.data.curriculum_course import Growing, Ranking
from afina.data.curriculum_lengthening import Lengthening
from afina.data.curriculum_pacing import (
    competence_linear,
    competence_sqrt,
    competence_steps,
    discrete_length,
    root_length,
)
from afina.errors import ConfigError, counted
from afina.tree import Edit, Seams, Technique
from afina.tree.timing import Asked, Chooser

WHAT = {
    "length": "length (tokens)",
    "rarity": "rarity (nats)",
    "loss": "the base's loss (nats a token)",
    "column": "column {column!r}",
}
"""Difficulties in words."""

OF_ROWS = ("difficulty", "column", "count", "order")
"""Settings of how rows are ranked, which rows that grow are not."""

OF_LENGTH = ("min_tokens", "multiple_of", "root_degree", "lengths", "last_steps")
"""Settings of how rows grow."""


class Curriculum(Technique):
    """Which rows a step gets, by how hard they are.

    It changes no weight and goes beside any technique that trains some.
    """

    key: ClassVar[str] = "curriculum"

    difficulty: Literal["length", "rarity", "loss", "column"] = Field(
        default="length",
        description="a row's tokens, how rare they are, the base's loss on it (measured once), or a column of yours",
    )
    column: str | None = Field(
        default=None,
        min_length=1,
        description="name of the column with a number for each row, for difficulty: column",
    )
    count: Literal["all", "trained"] = Field(
        default="all", description="tokens that length and rarity are of: all, or the labels"
    )
    order: Literal["easy_first", "hard_first", "random"] = Field(
        default="easy_first",
        description="which rows are let in first; random is the control for the others",
    )
    pacing: Literal["sqrt", "linear", "steps", "length"] = Field(
        default="sqrt",
        description="how the share of rows grows: by competence, in buckets; length: rows grow instead",
    )
    ramp_steps: int | None = Field(
        default=None, ge=1, description="the step from which on everything is shown"
    )
    ramp_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="the same as a share of the run; 0.5 when ramp_steps is not given either",
    )
    start: float = Field(
        default=0.01, gt=0, le=1, description="share of the rows let in at first (sqrt, linear)"
    )
    buckets: int = Field(default=4, ge=2, description="equal parts of the rows (steps)")
    min_tokens: int = Field(default=8, ge=2, description="tokens of a row at first (length)")
    multiple_of: int = Field(default=8, ge=1, description="what the length is a multiple of")
    root_degree: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="1: the length grows linearly; 2: with the square root",
    )
    lengths: tuple[int, ...] = Field(
        default=(), description="these lengths, one after the other, instead of growing"
    )
    last_steps: tuple[int, ...] = Field(
        default=(), description="the last step of each of lengths but the last, counted from 0"
    )

    @model_validator(mode="after")
    def _check(self) -> Curriculum:
        if (self.difficulty == "column") != (self.column is not None):
            raise ValueError(
                "difficulty: column and column go together: name the column of the rows that holds a number, or leave "
                "both out"
            )
        if self.count == "trained" and self.difficulty in ("loss", "column"):
            raise ValueError(
                f"count would do nothing, for a difficulty by {self.difficulty} counts no tokens: leave it out"
            )
        if self.ramp_steps is not None and self.ramp_ratio is not None:
            raise ValueError("ramp_steps and ramp_ratio say the same thing twice: give one of them")
        idle = {name: for_ for name, for_ in self._idle().items() if self._changed(name)}
        if idle:
            named = " and ".join(f"{name} is for {for_}" for name, for_ in idle.items())
            raise ValueError(
                f"with pacing {self.pacing} some settings would do nothing: {named}; leave them out, or change pacing"
            )
        self._check_lengths()
        return self

    def _changed(self, name: str) -> bool:
        return getattr(self, name) != type(self).model_fields[name].default

    def _idle(self) -> dict[str, str]:
        """Settings that do nothing with this pacing -> what they are for."""
        found: dict[str, str] = {}
        if self.pacing != "length":
            found |= dict.fromkeys(OF_LENGTH, "length")
        if self.pacing not in ("sqrt", "linear"):
            found["start"] = "sqrt and linear"
        if self.pacing != "steps":
            found["buckets"] = "steps"
        if self.pacing == "length":
            found |= dict.fromkeys(OF_ROWS, "sqrt, linear and steps")
            if self.lengths:
                steps = ("ramp_steps", "ramp_ratio", "min_tokens", "root_degree")
                found |= dict.fromkeys(steps, "a length that grows by itself, not by lengths")
        return found

    def _check_lengths(self) -> None:
        every = self.lengths or (self.min_tokens,)
        odd = [length for length in every if length < 2 or length % self.multiple_of]
        if odd:
            raise ValueError(
                f"a length ({odd[0]}) is at least 2 and a multiple of multiple_of ({self.multiple_of}): round it, or "
                "change multiple_of"
            )
        if len(self.last_steps) != max(0, len(self.lengths) - 1):
            raise ValueError(
                "last_steps has one step fewer than lengths has lengths: the last length stays to the end; got "
                f"{counted(len(self.lengths), 'length')} and {counted(len(self.last_steps), 'step')}"
            )
        for name, values in (("lengths", self.lengths), ("last_steps", self.last_steps)):
            if list(values) != sorted(set(values)) or any(value < 0 for value in values):
                raise ValueError(f"{name} must rise from one to the next, and begin with 0 or more")

    def columns(self) -> tuple[str, ...]:
        """See `Technique.columns`."""
        return () if self.column is None else (self.column,)

    def ramp(self, total_steps: int) -> int:
        """The step from which on everything is shown.

        Raises:
            ConfigError: the run ends before it.
        """
        if self.ramp_steps is None:
            ratio = 0.5 if self.ramp_ratio is None else self.ramp_ratio
            return max(1, math.ceil(ratio * total_steps))
        if self.ramp_steps > total_steps:
            raise ConfigError(
                "the curriculum is longer than the run: some rows would never be let in",
                got=f"techniques.curriculum.ramp_steps {self.ramp_steps}, of {counted(total_steps, 'step')}",
                wanted=f"at most {total_steps}",
                cure="train longer, lower ramp_steps, or give ramp_ratio instead, a share of the run",
            )
        return self.ramp_steps

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`. The model stays as it is."""
        return Edit(model, [self])

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """See `Technique.seams`."""
        return Seams(windows=(self.course,))

    def course(self, asked: Asked) -> Chooser:
        """What is shown when, in one run.

        Raises:
            ConfigError: the settings do not fit the run.
            DataError: rows lack their number in the column.
        """
        if self.pacing == "length":
            return Lengthening(asked, self.length(asked), self.multiple_of)
        ramp = self.ramp(asked.total_steps)
        return Growing(asked, self.ranking(asked), self.pace(ramp), ramp)

    def ranking(self, asked: Asked) -> Ranking:
        """The rows in the order in which they are let in."""
        values, what = self.values(asked), WHAT[self.difficulty].format(column=self.column)
        digest = sha256(repr(values).encode()).hexdigest()[:16] if self.column else None
        if self.order == "random":
            chance = difficulties.by_chance(len(values), asked.seed)
            return Ranking(chance, values, what, "in an order of chance", digest)
        if self.difficulty == "loss" and asked.losses is None:
            what += ", once that is measured"
        hard = self.order == "hard_first"
        ranked = difficulties.ranked(values, asked.seed, hardest_first=hard)
        return Ranking(
            ranked, values, what, f"by {what}, {'hard' if hard else 'easy'} ones first", digest
        )

    def values(self, asked: Asked) -> list[float]:
        """How hard each row is; 0 for all where that is a loss that is not to be measured now.

        Raises:
            DataError: rows lack their number in the column.
            ConfigError: tokens are to be counted that no row has.
        """
        rows, trained = asked.rows, self.count == "trained"
        if trained and not any(difficulties.tokens_of(row, trained=True) for row in rows):
            raise ConfigError(
                "no row has a trained token to count: rows with classes have none",
                got="techniques.curriculum.count=trained",
                cure="leave it out, then all tokens count",
            )
        if self.column is not None:
            return difficulties.column(rows, self.column)
        if self.difficulty == "loss":
            return [0.0] * len(rows) if asked.losses is None else list(asked.losses())
        measure = difficulties.rarities if self.difficulty == "rarity" else difficulties.lengths
        return measure(rows, trained=trained)

    def pace(self, ramp: int) -> Callable[[int], float]:
        """Step -> the share of the rows that is let in."""
        if self.pacing == "steps":
            return partial(competence_steps, ramp=ramp, buckets=self.buckets)
        grow = competence_linear if self.pacing == "linear" else competence_sqrt
        return partial(grow, ramp=ramp, start=self.start)

    def length(self, asked: Asked) -> Callable[[int], int]:
        """Step -> the tokens of a row.

        Raises:
            ConfigError: no row would be cut, or some to the end of the run.
        """
        longest = max(len(row.tokens) for row in asked.rows)
        first = self.lengths[0] if self.lengths else self.min_tokens
        if first >= longest:
            raise ConfigError(
                f"no row would be cut: the longest has {counted(longest, 'token')}",
                got=f"a first length of {first}",
                cure="lower techniques.curriculum.min_tokens (or lengths), or leave the curriculum out",
            )
        if self.lengths:
            self._refuse_unfinished(longest, asked.total_steps)
            return partial(discrete_length, lengths=self.lengths, last_steps=self.last_steps)
        most = -(-longest // self.multiple_of) * self.multiple_of
        return partial(
            root_length,
            ramp=self.ramp(asked.total_steps),
            least=self.min_tokens,
            most=most,
            multiple=self.multiple_of,
            degree=self.root_degree,
        )

    def _refuse_unfinished(self, longest: int, total_steps: int) -> None:
        """Raises when rows would be cut to the end of the run."""
        last = self.last_steps[-1] + 1 if self.last_steps else 0
        if self.lengths[-1] >= longest and last < total_steps:
            return
        whole = -(-longest // self.multiple_of) * self.multiple_of
        raise ConfigError(
            "some rows would be cut to the end of the run",
            got=f"lengths up to {self.lengths[-1]}, the last from step {last + 1} of {total_steps} on, and a row of "
            f"{counted(longest, 'token')}",
            wanted="a last length for all rows, before the run ends",
            cure=f"end techniques.curriculum.lengths with {whole} and lower last_steps, or shorten the rows with "
            "data.max_tokens",
        )
