"""The rows that every bench writes, and a table of them for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .jobs import write_json


@dataclass(frozen=True)
class Figure:
    """One figure of afina beside one of a peer.

    Attributes:
        bench: name of the script.
        work: name of the data.
        setting: of the peer, and what else tells rows apart.
        metric: what was measured.
        unit: of both values.
        value: afina's; None where it was not measured.
        peer: whose figure stands beside.
        peer_value: the peer's; None where it was not measured.
    """

    bench: str
    work: str
    setting: str
    metric: str
    unit: str
    value: float | None
    peer: str
    peer_value: float | None

    @property
    def ratio(self) -> float | None:
        """afina's value over the peer's; None without both, or over zero."""
        if self.value is None or not self.peer_value:
            return None
        return self.value / self.peer_value

    def row(self) -> dict[str, object]:
        """As a row of the JSON file."""
        return {**asdict(self), "ratio": self.ratio}


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Writes the list of rows."""
    write_json(path, [figure.row() for figure in figures])


def table(figures: Sequence[Figure]) -> str:
    """The figures in columns."""
    head = ("work", "beside", "metric", "unit", "afina", "peer", "ratio")
    lines = [head] + [
        (f.work, f.setting, f.metric, f.unit, _number(f.value), _number(f.peer_value), _number(f.ratio))
        for f in figures
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column > 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    """Four significant digits, and a dash for nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
