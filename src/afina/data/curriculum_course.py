"""What a curriculum shows at each step: rows drawn from those that are let in, whole or cut.

At step t some rows are let in, a beginning of an order of all rows. Those of the step are drawn from it, each equally
likely and none twice in one step, by a hash of seed and step: so a run that goes on draws what it would have drawn. In
a step of so many tokens the row that did not fit any more comes first in the next step; else long rows would be passed
over, for they are the ones that do not fit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from afina.data import curriculum_picture
from afina.data.curriculum_pacing import allowed
from afina.data.order import shuffled
from afina.errors import counted
from afina.tree.timing import Asked, Chooser
from afina.types import Row


@dataclass(frozen=True)
class Ranking:
    """In which order rows are let in.

    Attributes:
        ranked: places of the rows, in that order.
        values: difficulty of each row, by place.
        what: the difficulty in words, with its unit.
        way: the order in words.
        digest: of values that nothing else records.
    """

    ranked: Sequence[int]
    values: Sequence[float]
    what: str
    way: str
    digest: str | None = None


class Course(Chooser):
    """Rows drawn from a pool that grows.

    Attributes:
        asked: what there is to choose from.
        ranking: the rows in the order in which they are let in.
    """

    def __init__(self, asked: Asked, ranking: Ranking) -> None:
        self.asked, self.ranking = asked, ranking

    @property
    def ranked(self) -> Sequence[int]:
        """Places of the rows in the order in which they are let in."""
        return self.ranking.ranked

    @abstractmethod
    def pool(self, step: int) -> int:
        """How many of the ranked rows are let in at a step."""

    def shown(self, place: int, step: int) -> Row:
        """A row as it is shown at a step."""
        return self.asked.rows[place]

    def share(self, step: int) -> float:
        """The share of the rows that the pacing lets in at a step."""
        return self.pool(step) / len(self.asked.rows)

    def level(self, place: int, step: int) -> float:
        """How hard a row is as it is shown at a step."""
        return self.ranking.values[place]

    def windows(self, start: int = 0) -> Iterator[list[Row]]:
        """See `Chooser.windows`. Steps of so many rows begin anywhere; those of so many tokens are made up to there."""
        carried: int | None = None
        for step in count(start if self.asked.rows_per_step is not None else 0):
            places, carried = self._places(step, carried)
            if step >= start:
                yield [self.shown(place, step) for place in places]

    def _places(self, step: int, carried: int | None) -> tuple[list[int], int | None]:
        """The rows of a step, and the one that did not fit any more.

        Args:
            step: counted from 0.
            carried: the one that did not fit into the step before.
        """
        rows, tokens = self.asked.rows_per_step, self.asked.tokens_per_step
        found = [] if carried is None else [carried]
        held = sum(len(self.shown(place, step).tokens) for place in found)
        for at in shuffled(self.pool(step), self.asked.seed, step):
            place = self.ranked[at]
            if place == carried:
                continue
            if rows is not None and len(found) == rows:
                break
            if tokens is not None:
                length = len(self.shown(place, step).tokens)
                if found and held + length > tokens:
                    return found, place
                held += length
            found.append(place)
        return found, None

    def least(self) -> int:
        """The smallest pool that fills a step: so many of the first ranked rows."""
        if self.asked.rows_per_step is not None:
            return min(len(self.ranked), self.asked.rows_per_step)
        held = 0
        for number, place in enumerate(self.ranked, start=1):
            held += len(self.asked.rows[place].tokens)
            if held >= (self.asked.tokens_per_step or 0):
                return number
        return len(self.ranked)

    def leave(self, out: Path, figures: Sequence[Mapping[str, Any]]) -> None:
        """See `Chooser.leave`: a table and a picture."""
        lines = curriculum_picture.table(self, figures)
        if lines:
            curriculum_picture.write(out, lines)
            curriculum_picture.draw(out, lines, self.ranking.what)


class Growing(Course):
    """More and more of the rows, each whole.

    Attributes:
        pace: step -> share of the rows.
        ramp: the step from which on all are let in.
    """

    def __init__(
        self, asked: Asked, ranking: Ranking, pace: Callable[[int], float], ramp: int
    ) -> None:
        super().__init__(asked, ranking)
        self.pace, self.ramp = pace, ramp
        self._least = self.least()

    def pool(self, step: int) -> int:
        """See `Course.pool`: at least enough for one step."""
        return max(self._least, allowed(self.share(step), len(self.ranked)))

    def share(self, step: int) -> float:
        """See `Course.share`."""
        return self.pace(step)

    def notes(self) -> list[str]:
        """See `Chooser.notes`."""
        every = len(self.ranked)
        found = [
            f"rows are drawn {self.ranking.way}: {self.pool(0)} of {counted(every, 'row')} at first, all of them "
            f"from step {self.ramp + 1} of {self.asked.total_steps} on; drawn anew at each step, and not dealt in "
            "epochs"
        ]
        if allowed(self.share(0), every) < self._least < every:
            grown = next(step for step in count() if self.pool(step) > self._least)
            found.append(
                f"note: a step takes {self._least} rows, and {allowed(self.share(0), every)} would be let in at first: "
                f"steps 1 to {grown} show the same {self._least}; a larger techniques.curriculum.start, or fewer rows "
                "a step, would avoid that"
            )
        return found

    def recorded(self) -> dict[str, Any]:
        """See `Chooser.recorded`."""
        digest = self.ranking.digest
        return {} if digest is None else {"the rows' difficulty": digest}
