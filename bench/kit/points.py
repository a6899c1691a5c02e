"""Points in a plane: which of them no other beats, and a picture of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

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
        axes.annotate(name, at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    # Letters as text, and no date: a small file that changes with its content alone.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "afina"}):
        vector = file.suffix == ".svg"
        figure.savefig(file, dpi=110, metadata={"Date": None} if vector else None)
