"""The run's figures on disk: one line a step, each step once, and the plot of the loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class MetricsFile:
    """`metrics.jsonl`: a line for each optimiser step, whatever happened between.

    Args:
        folder: the run's.
        keep_below: on resuming at this step, lines of it and later ones are dropped.
    """

    def __init__(self, folder: Path, keep_below: int = 0) -> None:
        self.path = folder / FILE
        kept = [line for line in read_metrics(folder) if line["step"] <= keep_below]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends one step's figures; `step` counts from 1 (steps done)."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order; a half-written last line is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def plot_loss(folder: Path) -> Path | None:
    """Draws `loss.png` from the run's figures; None when there is nothing to draw."""
    lines = read_metrics(folder)
    if not lines:
        return None
    # Figure without pyplot: no global state, no window, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line["step"] for line in lines]
    losses = [line["loss"] for line in lines]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    axes.plot(steps, smooth(losses), color="#1f4e79", linewidth=2, label="running mean")
    scored = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    if scored:
        axes.plot(*zip(*scored, strict=True), "o-", color="#c0504d", label="validation")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss per trained token (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = folder / "loss.png"
    temporary = folder / ".loss.tmp.png"
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, path)
    return path


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Running mean with exponential weights, corrected for its start."""
    means: list[float] = []
    mean = total = 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        means.append(mean / total)
    return means
