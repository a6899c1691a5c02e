"""How long a run is, which rows each of its steps gets, and what moves its tensors: all from settings and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from torch import nn

from afina.config import TrainSettings
from afina.data.order import steps_in, windows
from afina.errors import ConfigError
from afina.optim.optimisers import Optimiser
from afina.train import ways
from afina.tree import Edit, Seams
from afina.tree.timing import Asked, Chooser
from afina.types import Row


@dataclass(frozen=True)
class Plan:
    """Which rows each step of a run gets.

    Attributes:
        settings: of the run.
        rows: that train.
        total_steps: of the run.
        chooser: chooses them; None deals every row once an epoch.
    """

    settings: TrainSettings
    rows: Sequence[Row]
    total_steps: int
    chooser: Chooser | None = None

    def windows(self, start: int = 0) -> Iterator[list[Row]]:
        """The rows of steps `start`, `start` + 1, … without end."""
        if self.chooser is not None:
            return self.chooser.windows(start)
        return windows_from(self.settings, self.rows, start)

    def usual(self) -> list[Row]:
        """The rows of a step that may stand for the others: the first, or the last where they change with time."""
        return next(self.windows(0 if self.chooser is None else self.total_steps - 1))

    def shown(self) -> list[int] | None:
        """Tokens before each step, and after the last; None where the learning rate goes by steps."""
        if self.settings.schedule_by == "steps":
            return None
        steps = islice(self.windows(), self.total_steps)
        each = (sum(len(row.tokens) for row in rows) for rows in steps)
        return list(accumulate(each, initial=0))

    def notes(self) -> list[str]:
        """What a user should know of the choice, in lines."""
        if self.chooser is None:
            return []
        found = self.chooser.notes()
        by_steps = self.settings.schedule_by == "steps" and self.settings.schedule != "constant"
        if self.chooser.cuts and by_steps:
            found.append(
                "note: the learning rate falls with the steps while early ones have few tokens; "
                f"{ways.setting('schedule_by', 'tokens')} makes it fall with the tokens"
            )
        return found


def plan_of(
    settings: TrainSettings,
    rows: Sequence[Row],
    total_steps: int,
    seams: Seams,
    losses: Callable[[], Sequence[float]] | None = None,
) -> Plan:
    """The plan of a run.

    Args:
        settings: of the run.
        rows: that train.
        total_steps: of the run.
        seams: of the run.
        losses: see `Asked`.

    Raises:
        ConfigError: more than one thing chooses the rows, or their choice cannot be made of these settings.
        DataError: or of these rows.
    """
    if len(seams.windows) > 1:
        raise ConfigError(
            "more than one thing chooses the rows of a step",
            got=f"{len(seams.windows)} functions in Seams.windows",
            wanted="at most one",
            cure="leave the curriculum out, or what RunOptions.seams brings beside it",
        )
    chooser = None
    if seams.windows:
        asked = Asked(rows, settings.seed, total_steps, **_step_size(settings), losses=losses)
        chooser = seams.windows[0](asked)
    return Plan(settings, rows, total_steps, chooser)


def total_steps(settings: TrainSettings, rows: Sequence[Row]) -> int:
    """Optimiser steps of the whole run."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    lengths = [len(row.tokens) for row in rows]
    return steps_in(lengths, settings.seed, settings.epochs, **_step_size(settings))


def warmup_steps(settings: TrainSettings, total: int) -> int:
    """Steps over which the learning rate rises."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil((settings.warmup_ratio or 0.0) * total)


def windows_from(
    settings: TrainSettings, rows: Sequence[Row], start: int = 0
) -> Iterator[list[Row]]:
    """The rows of steps `start`, `start` + 1, … without end."""
    lengths = [len(row.tokens) for row in rows]
    found = windows(lengths, settings.seed, start=start, **_step_size(settings))
    return ([rows[place] for place in window.rows] for window in found)


def optimiser_of(
    edit: Edit,
    settings: TrainSettings,
    seams: Seams,
    own: Mapping[str, nn.Parameter] | None = None,
) -> Optimiser:
    """The optimiser of a run, with a group for each learning rate.

    Args:
        edit: what trains.
        settings: of the run.
        seams: of the run.
        own: of what trains, that which this process moves; None is all of it.

    Raises:
        ConfigError: torch.optim has none of that name, or something of the run wants gradients that will be gone.
    """
    _refuse_whole_gradient(settings, seams)
    scales = edit.lr_scales()
    for change in seams.param_groups:
        scales = change(scales)
    options = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "betas": settings.betas,
        "eps": settings.eps,
    }
    own = edit.trainable() if own is None else own
    return Optimiser(own, scales, settings.optimizer, options)


def _step_size(settings: TrainSettings) -> dict[str, int | None]:
    return {
        "rows_per_step": settings.rows_per_step,
        "tokens_per_step": settings.tokens_per_step,
    }


def _refuse_whole_gradient(settings: TrainSettings, seams: Seams) -> None:
    """Raises when tensors are to move in backward, and something of the run wants the whole gradient first.

    Args:
        settings: of the run; what they contradict by themselves, they refuse themselves.
        seams: of the run.

    Raises:
        ConfigError: naming it.
    """
    looking = [*seams.before_step, *seams.moved]
    if settings.step_in_backward and looking:
        names = [getattr(function, "__qualname__", type(function).__name__) for function in looking]
        raise ConfigError(
            "train.step_in_backward drops each gradient at once, and something of this run looks at all of them",
            got=", ".join(names),
            cure="leave train.step_in_backward out, or what looks at the gradients: a technique, or in Python "
            "Seams.before_step or Seams.moved",
        )
