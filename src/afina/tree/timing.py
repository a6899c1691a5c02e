"""Where what changes with time meets the training loop: tuples of plain functions, and no event bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from afina.types import Batch, Row


@dataclass(frozen=True)
class Asked:
    """What the rows of a run's steps are chosen from, and how many a step takes.

    Attributes:
        rows: that train, in their order.
        seed: of the run.
        total_steps: of the run.
        rows_per_step, tokens_per_step: the size of a step; exactly one of the two is given.
        losses: gives the loss of each row under the model before training, a mean over its trained tokens in nats;
            None where it is not to be measured (before the run begins, and in a look at it).
    """

    rows: Sequence[Row]
    seed: int
    total_steps: int
    rows_per_step: int | None
    tokens_per_step: int | None
    losses: Callable[[], Sequence[float]] | None = None


class Chooser(ABC):
    """Which rows each step gets, where it is not every row once an epoch.

    Attributes:
        cuts: rows are shown in part at times.
    """

    cuts: ClassVar[bool] = False

    @abstractmethod
    def windows(self, start: int = 0) -> Iterator[list[Row]]:
        """The rows of steps `start`, `start` + 1, … without end: starting there gives what going on to there gives.

        A step's rows are asked for before the step in front of it has run.
        """

    def notes(self) -> list[str]:
        """What a user should know of the choice, in lines."""
        return []

    def recorded(self) -> dict[str, Any]:
        """What must be equal for a resumed run to get the same rows, beside settings and the tokens of the rows."""
        return {}

    def leave(self, out: Path, figures: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - most leave nothing
        """Leaves in the run's folder what was shown when.

        Args:
            out: the folder.
            figures: the lines of metrics.jsonl.
        """


Each = Callable[[Tensor], "list[Tensor]"]
"""From values (N,) of this process to those of every process that sees other rows, this one among them."""


@dataclass(frozen=True)
class Seams:
    """Functions that the loop calls; all empty for a plain run. Steps count from 0.

    Attributes:
        windows: (what there is to choose from) -> which rows each step gets; at most one.
        at_step: (step,), before its first micro-batch.
        on_batch: (batch, step) -> batch, before it is used.
        loss: (losses (N,), batch, step) -> losses, to weigh token losses.
        penalty: (step) -> scalar, added to the loss of the step; the loss that is reported does not have it.
        param_groups: (name -> scale of its learning rate) -> the same, changed.
        before_step: (step, named tensors), gradients reduced and clipped; torch is seeded by the run's seed and the
            step, so that what is drawn here does not depend on how the step was cut.
        moved: (step, named tensors), once the tensors have moved; their gradients are still there.
        bring: (`Each`,), after the last pass of a step: what was noted of rows is brought together, by every process
            alike, for each saw its own rows alone.
        after_step: (step,), whether or not the tensors moved; gradients are cleared.
    """

    windows: tuple[Callable[[Asked], Chooser], ...] = ()
    at_step: tuple[Callable[[int], None], ...] = ()
    on_batch: tuple[Callable[[Batch, int], Batch], ...] = ()
    loss: tuple[Callable[[Tensor, Batch, int], Tensor], ...] = ()
    penalty: tuple[Callable[[int], Tensor], ...] = ()
    param_groups: tuple[Callable[[dict[str, float]], dict[str, float]], ...] = ()
    before_step: tuple[Callable[[int, dict[str, nn.Parameter]], None], ...] = ()
    moved: tuple[Callable[[int, dict[str, nn.Parameter]], None], ...] = ()
    bring: tuple[Callable[[Each], None], ...] = ()
    after_step: tuple[Callable[[int], None], ...] = ()

    def and_then(self, other: Seams) -> Seams:
        """These functions, and after each kind of them the other's."""
        return Seams(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
