"""What a finished run came to, for Python and, in `result.json`, for whoever looks into its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from afina.errors import counted
from afina.train import durable, ways

FILE = "result.json"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: of all its files.
        weights: the trained part: `adapter/`, or `model/` after full fine-tuning.
        steps: optimiser steps done.
        loss: mean training loss of the last tenth of the steps, weighted by trained tokens.
        scores: of the kept weights on the validation rows, by name (`loss`, …); empty without such rows.
        best_step: the step whose weights were kept.
        skipped: steps that did not move the weights, for a loss that is not finite or rows without a label.
    """

    folder: Path
    weights: Path
    steps: int
    loss: float
    scores: Mapping[str, float]
    best_step: int
    skipped: int = 0

    @property
    def val_loss(self) -> float | None:
        """The validation loss of the kept weights, None without validation rows."""
        return self.scores.get("loss")


def write(run: Run) -> None:
    """Marks a run as finished."""
    value = {
        "steps": run.steps,
        "skipped": run.skipped,
        "best_step": run.best_step,
        "weights": run.weights.name,
        "loss": _plain(run.loss),
        "scores": {name: _plain(score) for name, score in run.scores.items()},
    }
    durable.write_json(run.folder / FILE, value)


def read(folder: Path) -> Run | None:
    """The result of the run in a folder; None while it is not finished."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Run(
            folder,
            folder / found["weights"],
            found["steps"],
            _number(found["loss"]),
            {name: _number(score) for name, score in found["scores"].items()},
            found["best_step"],
            found.get("skipped", 0),  # which older versions did not write
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def told(run: Run, total_steps: int) -> str:
    """What whoever resumes a finished run reads.

    Args:
        run: with its result.
        total_steps: that it was to make; fewer are done where its scores stopped improving.
    """
    early = run.steps < total_steps
    why = ": the scores stopped improving" if early else ""
    flags = "--set train.early_stopping=null" if early else "--steps N"
    return (
        f"this run is finished ({counted(run.steps, 'step')}{why}), and nothing was changed; to train on: "
        f"{ways.resume(run.folder, allow_changes=True, flags=flags)}"
    )


def _plain(number: float) -> float | None:
    """JSON has no word for NaN."""
    return number if math.isfinite(number) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
