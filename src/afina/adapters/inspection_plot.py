"""A picture of an adapter: the norm and the effective rank of its changes over the blocks, a line a kind of module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afina.adapters.inspection import Inspection
from afina.adapters.inspection_rows import Row
from afina.errors import AdapterError, ConfigError


def plot(found: Inspection, file: Path) -> None:
    """Writes the picture, whole or not at all; its form is that of the file's ending.

    Places outside the blocks stand to the right of the last one. Of an adapter of several techniques each has lines of
    its own.

    Raises:
        AdapterError: there is nothing to draw.
        ConfigError: the file cannot be written, or its ending is none that can be drawn.
    """
    rows = found.every_row
    if not rows:
        raise AdapterError("the adapter has no places to draw")
    # Figure without pyplot: no global state, no window, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranked = any(row.effective is not None for row in rows)
    figure = Figure(figsize=(8, 6.5 if ranked else 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    form = file.suffix.lstrip(".").lower() or "png"
    if form not in canvas.get_supported_filetypes():
        wanted = ", ".join(f".{one}" for one in sorted(canvas.get_supported_filetypes()))
        raise ConfigError(
            "there is no picture of that form", got=file, wanted=f"an ending of {wanted}"
        )
    panels: Any = figure.subplots(2 if ranked else 1, 1, squeeze=False)
    lines = lines_of(found)
    _draw(panels[0][0], lines, lambda row: row.norm, "norm of the change")
    if ranked:
        _draw(panels[1][0], lines, lambda row: row.effective, "effective rank")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside upper left", mode="expand"
    )
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=120, format=form)
        os.replace(temporary, file)
    except OSError as error:
        raise ConfigError("the picture cannot be written", got=f"{file}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def lines_of(found: Inspection) -> dict[str, list[Row]]:
    """The rows of each line: of one kind of module, and of one technique; by what the line is called."""
    lines: dict[str, list[Row]] = {}
    for part in found.parts or (found,):
        start = f"{part.method}: " if found.parts else ""
        for row in part.every_row:
            lines.setdefault(start + row.tail, []).append(row)
    return lines


def _draw(
    axes: Any,
    lines: Mapping[str, Sequence[Row]],
    value_of: Callable[[Row], float | None],
    label: str,
) -> None:
    """One panel."""
    rows = [row for each in lines.values() for row in each]
    last = max((row.block for row in rows if row.block is not None), default=-1)
    top = 0.0
    for name, each in lines.items():
        points = sorted(
            (last + 1 if row.block is None else row.block, value)
            for row in each
            if (value := value_of(row)) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=1, label=name)
            top = max(top, *(v for _, v in points if v < float("inf")), 0.0)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.08 * top or 1)
    axes.set_xlim(-0.5, last + (1.5 if any(row.block is None for row in rows) else 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("block" if last >= 0 else "outside of the blocks")
    axes.grid(alpha=0.3)
