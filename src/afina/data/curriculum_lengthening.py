"""A curriculum in which rows grow: their first tokens at first, and all of them later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import ClassVar

from afina.data.curriculum_course import Course, Ranking
from afina.errors import ConfigError, counted
from afina.tree.timing import Asked
from afina.types import Row


class Lengthening(Course):
    """All rows, cut to a length that grows; a row is let in once a trained token of it is left.

    Attributes:
        length: step -> tokens.
        longest: tokens of the longest row.
        least_tokens: the length at which a step can be filled.
    """

    cuts: ClassVar[bool] = True

    def __init__(self, asked: Asked, length: Callable[[int], int], multiple: int) -> None:
        lengths = [float(len(row.tokens)) for row in asked.rows]
        needs = {n: need for n, row in enumerate(asked.rows) if (need := _needed(row)) is not None}
        ranked = sorted(needs, key=needs.__getitem__)
        super().__init__(asked, Ranking(ranked, lengths, "tokens of the rows shown", "by length"))
        self.length, self._needs = length, [needs[place] for place in ranked]
        self.longest = int(max(lengths))
        self.least_tokens = self._enough(multiple)

    def _enough(self, multiple: int) -> int:
        """The first length at which the rows let in fill a step."""
        wanted = min(len(self.ranked), self.asked.rows_per_step or 1)
        first = -(-self._needs[wanted - 1] // multiple) * multiple
        for tokens in range(first, self.longest, multiple):
            inside = self.ranked[: bisect_right(self._needs, tokens)]
            held = sum(min(tokens, self.ranking.values[place]) for place in inside)
            if held >= (self.asked.tokens_per_step or 0):
                return tokens
        return self.longest

    def tokens(self, step: int) -> int:
        """The longest that a row is at a step."""
        return max(self.length(step), self.least_tokens)

    def pool(self, step: int) -> int:
        """See `Course.pool`."""
        return bisect_right(self._needs, self.tokens(step))

    def shown(self, place: int, step: int) -> Row:
        """See `Course.shown`: its beginning, with the labels that are there."""
        row, tokens = self.asked.rows[place], self.tokens(step)
        if len(row.tokens) <= tokens:
            return row
        return replace(row, tokens=row.tokens[:tokens], trained=row.trained[:tokens])

    def level(self, place: int, step: int) -> float:
        """See `Course.level`: its tokens as it is shown."""
        return min(self.ranking.values[place], float(self.tokens(step)))

    def notes(self) -> list[str]:
        """See `Chooser.notes`."""
        whole = next(step for step in count() if self.tokens(step) >= self.longest)
        left_out = len(self.asked.rows) - self.pool(0)
        found = [
            f"rows are cut to {self.tokens(0)} tokens at first, and whole from step {whole + 1} of "
            f"{self.asked.total_steps} on; drawn anew at each step, and not dealt in epochs"
        ]
        if self.length(0) < self.least_tokens:
            found.append(
                f"note: at {self.length(0)} tokens too few rows have a trained token left to fill a step, so the "
                f"length begins with {self.least_tokens}"
            )
        if left_out:
            found.append(
                f"note: {left_out} of {counted(len(self.asked.rows), 'row')} have no trained token in their first "
                f"{self.tokens(0)} tokens, and are shown once they have"
            )
        return found


def _needed(row: Row) -> int | None:
    """How many of a row's first tokens hold a label; None for a row without one.

    Raises:
        ConfigError: it has a class, or its tokens have.
    """
    if row.label is not None or row.tags is not None:
        raise ConfigError(
            "rows with classes cannot be cut: what closes them would be lost",
            got="techniques.curriculum.pacing=length",
            cure="let short rows in first: pacing sqrt or linear, with difficulty length",
        )
    return next((at + 1 for at in range(1, len(row.tokens)) if row.trained[at]), None)
