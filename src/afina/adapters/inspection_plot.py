"""A picture of an adapter: the norm and the effective rank of its changes over the blocks, a line a kind of module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afina.adapters.inspection import Row
from afina.errors import AdapterError, ConfigError


def plot(rows: Sequence[Row], file: Path) -> None:
    """Writes the picture, whole or not at all; its form is that of the file's ending.

    Places outside the blocks stand to the right of the last one.

    Raises:
        AdapterError: there is nothing to draw.
        ConfigError: the file cannot be written, or its ending is none that can be drawn.
    """
    if not rows:
        raise AdapterError("the adapter has no places to draw")
    # Figure without pyplot: no global state, no window, and safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranked = any(row.effective is not None for row in rows)
    figure = Figure(figsize=(8, 6.5 if ranked else 3.5))
    canvas = FigureCanvasAgg(figure)
    form = file.suffix.lstrip(".").lower() or "png"
    if form not in canvas.get_supported_filetypes():
        wanted = ", ".join(f".{one}" for one in sorted(canvas.get_supported_filetypes()))
        raise ConfigError(
            "there is no picture of that form", got=file, wanted=f"an ending of {wanted}"
        )
    panels: Any = figure.subplots(2 if ranked else 1, 1, squeeze=False)
    _draw(panels[0][0], rows, [row.norm for row in rows], "norm of the change")
    if ranked:
        _draw(panels[1][0], rows, [row.effective for row in rows], "effective rank")
    panels[0][0].legend(
        frameon=False, fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, 1.25)
    )
    panels[-1][0].set_xlabel("block")
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.1, top=0.87, hspace=0.15)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=120, format=form)
        os.replace(temporary, file)
    except OSError as error:
        raise ConfigError("the picture cannot be written", got=f"{file}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _draw(axes: Any, rows: Sequence[Row], values: Sequence[float | None], label: str) -> None:
    """One panel: a line for each last part of the names."""
    last = max((row.block for row in rows if row.block is not None), default=-1)
    tails = list(dict.fromkeys(row.tail for row in rows))
    for tail in tails:
        points = sorted(
            (last + 1 if row.block is None else row.block, value)
            for row, value in zip(rows, values, strict=True)
            if row.tail == tail and value is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, linewidth=1, label=tail)
    axes.set_ylabel(label)
    top = max((value for value in values if value is not None and value < float("inf")), default=0)
    axes.set_ylim(0, 1.08 * top or 1)
    axes.grid(alpha=0.3)
