"""The run's figures on disk: one line a step, each step once, and the plot of the loss."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from afina.train import durable

FILE = "metrics.jsonl"


class MetricsFile:
    """`metrics.jsonl`: a line for each optimiser step, whatever happened between.

    Args:
        folder: the run's.
        keep_below: on resuming at this step, lines of it and earlier ones are kept, and later ones dropped.

    Attributes:
        missing: so many of the earlier steps have no line.
    """

    def __init__(self, folder: Path, keep_below: int = 0) -> None:
        self.folder, self.path = folder, folder / FILE
        kept = [line for line in read_metrics(folder) if line["step"] <= keep_below]
        self.missing = keep_below - len(kept)
        self._write(kept)

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with self._writing():
            durable.write_text(self.path, "".join(map(_line, lines)))

    def take(self, step: int) -> dict[str, Any]:
        """Takes the line of the newest step out of the file, to be added again with more in it."""
        lines = read_metrics(self.folder)
        self._write([line for line in lines if line["step"] != step])
        return next((line for line in lines if line["step"] == step), {"step": step})

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends one step's figures; `step` counts from 1 (steps done), and what is not finite becomes null."""
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(line))

    def sync(self) -> None:
        """Forces the lines to the disk: a checkpoint that is there after a power cut has its lines too."""
        with self._writing():
            durable.sync(self.path)

    def _writing(self) -> AbstractContextManager[None]:
        return durable.writing(FILE, self.folder)


class NoFile(MetricsFile):
    """The figures of a process that does not keep the run: they are the same as those of the one that does."""

    def __init__(self, folder: Path, keep_below: int = 0) -> None:
        self.folder, self.missing = folder, 0

    def take(self, step: int) -> dict[str, Any]:
        """Of the newest step nothing but its number."""
        return {"step": step}

    def add(self, line: Mapping[str, Any]) -> None:
        """Nothing is written."""

    def sync(self) -> None:
        """There is nothing on the disk."""


def _line(values: Mapping[str, Any]) -> str:
    """JSON has no word for NaN, and other programs read these lines too."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run by step, in order, of two of one step the later; a torn or damaged line is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines[int(line["step"])] = line
        except (ValueError, TypeError, KeyError):
            continue
    return [lines[step] for step in sorted(lines)]


def last_tenth_loss(folder: Path) -> float:
    """Mean training loss over the last tenth of a run's steps, weighted by trained tokens; NaN when none was finite."""
    lines = read_metrics(folder)
    last = [x for x in lines[-max(1, len(lines) // 10) :] if x.get("loss") is not None]
    tokens = sum(x["trained_tokens"] for x in last)
    return sum(x["loss"] * x["trained_tokens"] for x in last) / tokens if tokens else math.nan


def scores_of(folder: Path, step: int) -> dict[str, float]:
    """The validation scores of a step, by name; empty when it was not scored."""
    found: dict[str, Any] = next((x for x in read_metrics(folder) if x["step"] == step), {})
    return {
        name.removeprefix("val_"): math.nan if value is None else value
        for name, value in found.items()
        if name.startswith("val_")
    }


def plot_loss(folder: Path) -> Path | None:
    """Draws `loss.png` from the run's figures; None when there is nothing to draw."""
    lines = [line for line in read_metrics(folder) if line.get("loss") is not None]
    if not lines:
        return None
    # Figure without pyplot: no global state, no window, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line["step"] for line in lines]
    losses = [line["loss"] for line in lines]
    # Fixed margins: to measure every text for a tight layout takes longer than to draw it.
    figure = Figure(figsize=(7, 4))
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.13, top=0.97)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    axes.plot(steps, smooth(losses), color="#1f4e79", linewidth=2, label="running mean")
    scored = [
        (line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None
    ]
    if scored:
        axes.plot(*zip(*scored, strict=True), "o-", color="#c0504d", label="validation")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss per trained token (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = folder / "loss.png"
    temporary = durable.temporary_of(path)
    try:
        figure.savefig(temporary, dpi=120, format="png")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
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
