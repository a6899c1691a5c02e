"""Points in a plane: which of them no other beats, and a picture of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

Points = Mapping[str, tuple[float, float]]
"""Name -> (x, y)."""


def frontier(points: Points) -> list[str]:
    """The names of the points that no other is below in both, or in one and equal in the other; from left to right."""

    def beaten(at: tuple[float, float]) -> bool:
        return any(
            other != at and other[0] <= at[0] and other[1] <= at[1] for other in points.values()
        )

    return sorted((name for name, at in points.items() if not beaten(at)), key=lambda n: points[n])


def scatter(file: Path, points: Points, *, x: str, y: str, marked: Collection[str] = ()) -> None:
    """Draws every point with its name, and a line through those that are marked.

    Args:
        file: its ending says the format.
        points: to draw.
        x, y: what the axes say.
        marked: names in the order of the line.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    line = [points[name] for name in marked]
    if line:
        axes.plot(*zip(*line, strict=True), color="#c0504d", linewidth=1, zorder=1)
    for name, at in points.items():
        axes.scatter(*at, color="#c0504d" if name in marked else "#1f4e79", s=18, zorder=2)
    axes.set(xlabel=x, ylabel=y)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    _name(axes, points)
    # Letters as text, and no date: a small file that changes with its content alone.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "afina"}):
        vector = file.suffix == ".svg"
        figure.savefig(file, dpi=110, metadata={"Date": None} if vector else None)


def _name(axes: Any, points: Points) -> None:
    """Writes every point's name beside it, where no other name and no point lies, the crowded ones joined by a line."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    drawing = axes.figure.canvas.get_renderer()
    at = {name: axes.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_bounds(px - 3, py - 3, 6, 6) for px, py in at.values()]
    for name in sorted(points, key=lambda n: tuple(at[n])):
        for dx, dy in _places():
            label = axes.annotate(
                name,
                points[name],
                xytext=(dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right",
                va="center",
                fontsize=7,
                arrowprops={"arrowstyle": "-", "lw": 0.4, "shrinkA": 0, "shrinkB": 2}
                if abs(dy) > 6
                else None,
            )
            label.update_positions(drawing)
            box = Text.get_window_extent(label)  # without the line
            free = not any(box.overlaps(other) for other in taken)
            if free and axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1):
                break
            label.remove()
        else:
            label = axes.annotate(name, points[name], fontsize=7)
        taken.append(Text.get_window_extent(label))


def _places() -> Iterator[tuple[int, int]]:
    """Where a name may stand beside its point, in points of type, the nearest first."""
    for far in range(0, 90, 6):
        for dy in dict.fromkeys((far, -far)):
            yield 5 + far // 3, dy
            yield -5 - far // 3, dy
