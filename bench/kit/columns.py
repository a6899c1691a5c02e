"""Cells as a table: in Markdown, or in columns for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Cells = Sequence[str]


def barred(head: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    """Lines of Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def spaced(head: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    """Lines in which every column is as wide as its widest cell."""
    every = [head, *rows]
    widths = [max(len(cells[column]) for cells in every) for column in range(len(head))]
    for cells in every:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(cells, widths, strict=True)
        ).rstrip()
