"""What was shown when: `curriculum.jsonl`, a line a step, and `curriculum.png`, made from the run's own figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afina.data.curriculum_course import Course

TABLE, PICTURE = "curriculum.jsonl", "curriculum.png"
"""In the run's folder."""


def table(course: Course, figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each step what was let in, and how hard the rows were that it showed.

    Args:
        course: of the run.
        figures: the lines of metrics.jsonl; those whose rows are not the run's are left out.

    Returns:
        Lines of `step` (from 1), `share` that the pacing lets in, `pool` of rows, `rows` shown, and least, median and
        largest of their `difficulty` and of their `rank` (k of N ranked rows is k / N).
    """
    places = {row.id: place for place, row in enumerate(course.asked.rows)}
    every = len(course.asked.rows)
    ranks = {place: number / every for number, place in enumerate(course.ranked, start=1)}
    lines: list[dict[str, Any]] = []
    for figure in figures:
        step = int(figure["step"]) - 1
        found = [places.get(id) for id in figure.get("rows", ())]
        shown = [place for place in found if place in ranks]
        if not shown or len(shown) < len(found):
            continue
        lines.append({
            "step": step + 1,
            "share": course.share(step),
            "pool": course.pool(step),
            "rows": len(shown),
            "difficulty": _spread([course.level(place, step) for place in shown]),
            "rank": _spread([ranks[place] for place in shown]),
        })  # fmt: skip
    return lines


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def write(out: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes the table, whole or not at all."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    _replace(out / TABLE, lambda path: path.write_text(text, encoding="utf-8"))


def draw(out: Path, lines: Sequence[Mapping[str, Any]], what: str) -> None:
    """Draws the table.

    Args:
        out: the run's folder.
        lines: of the table, at least one.
        what: the difficulty in words.
    """
    # Figure without pyplot: no global state, no window, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(7, 6))
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.09, top=0.97, hspace=0.12)
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, sharex=True)
    for axes, of in zip(panels, ("rank", "difficulty"), strict=True):
        low, middle, high = ([line[of][name] for line in lines] for name in _spread([0.0]))
        axes.fill_between(steps, low, high, color="#9bb7d4", alpha=0.6, label="rows shown")
        axes.plot(steps, middle, color="#1f4e79", label="their median")
        axes.grid(alpha=0.3)
    panels[0].plot(
        steps, [line["share"] for line in lines], "--", color="#c0504d", label="share let in"
    )
    panels[0].set_ylabel("rank among all rows")
    panels[0].set_ylim(0, 1.02)
    panels[0].legend(frameon=False, loc="lower right")
    panels[1].set_ylabel(what)
    panels[1].set_xlabel("optimiser step")
    _replace(out / PICTURE, lambda path: figure.savefig(path, dpi=120, format="png"))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        make(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
