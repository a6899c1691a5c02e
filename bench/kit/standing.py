"""How the methods of `bench/methods.py` stand: a table, what is missing in it, figures, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .beside import Taken
from .report import Figure
from .works import BASELINE, METHODS


@dataclass(frozen=True)
class Cost:
    """What steps of a method took, and of the baseline in turns with it.

    Attributes:
        seconds, beside_seconds: of the processor, step by step.
        peak_bytes, beside_peak_bytes: the most memory that the process held.
    """

    seconds: list[float]
    peak_bytes: int
    beside_seconds: list[float]
    beside_peak_bytes: int

    @staticmethod
    def of(own: Taken, beside: Taken) -> Cost:
        """From what the runs told."""
        return Cost(own.seconds, own.peak_bytes, beside.seconds, beside.peak_bytes)

    @property
    def time(self) -> float:
        """Median step over the baseline's."""
        return statistics.median(self.seconds) / statistics.median(self.beside_seconds)

    @property
    def memory(self) -> float:
        """Peak over the baseline's."""
        return self.peak_bytes / self.beside_peak_bytes


@dataclass(frozen=True)
class Standing:
    """What is known of a method; None is not known yet.

    Attributes:
        method: its name.
        lr: the better of its learning rates.
        rates: how many of the two have run.
        trained: trained numbers.
        score: share of right answers to the test rows.
        loss: over the last tenth of training, in nats.
        second_score, second_loss: of the second seed.
        cost: of a step.
    """

    method: str
    lr: float | None = None
    rates: int = 0
    trained: int | None = None
    score: float | None = None
    loss: float | None = None
    second_score: float | None = None
    second_loss: float | None = None
    cost: Cost | None = None


def lines(found: Sequence[Standing], score: str, *, markdown: bool = False) -> Iterator[str]:
    """The table: in Markdown, or in columns."""
    if not found:
        yield "nothing is there yet"
        return
    head = (
        "method",
        "trained",
        "rate",
        score.replace("_", " "),
        "second seed",
        "loss",
        "step time",
        "peak memory",
    )
    rows = [head, *(_cells(each) for each in found)]
    if markdown:
        yield _barred(head)
        yield _barred(["---"] * len(head))
        yield from map(_barred, rows[1:])
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _barred(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(one: Standing) -> tuple[str, ...]:
    def told(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        one.method,
        told(one.trained, ","),
        told(one.lr, "g") + (" (the only one run)" if one.rates == 1 else ""),
        told(one.score, ".3f"),
        told(one.second_score, ".3f"),
        told(one.loss, ".3f"),
        told(one.cost and one.cost.time, ".2f"),
        told(one.cost and one.cost.memory, ".2f"),
    )


def missing(found: Sequence[Standing]) -> Iterator[str]:
    """What the table lacks, a line a kind."""
    by_name = {each.method: each for each in found}
    every = [by_name.get(name, Standing(name)) for name in METHODS]
    kinds = {
        "not trained yet": [each.method for each in every if each.rates == 0],
        "at one learning rate so far": [each.method for each in every if each.rates == 1],
        "time and memory not taken yet": [each.method for each in every if each.cost is None],
    }
    for what, names in kinds.items():
        if names:
            yield f"{what}: {'; '.join(names)}"


def figures(found: Sequence[Standing], work: str, score: str) -> list[Figure]:
    """The rows of the JSON file; LoRA is what the others stand beside."""
    beside = next((each for each in found if each.method == BASELINE), Standing(BASELINE))
    made: list[Figure] = []
    for one in found:
        setting = one.method if one.lr is None else f"{one.method}, lr {one.lr:g}"
        rows: list[tuple[str, str, float | None, float | None]] = [
            ("trained parameters", "numbers", one.trained, beside.trained),
            (score, "share", one.score, beside.score),
            (f"{score}, second seed", "share", one.second_score, beside.second_score),
            ("loss, last tenth", "nats", one.loss, beside.loss),
            ("loss, last tenth, second seed", "nats", one.second_loss, beside.second_loss),
        ]
        if one.cost is not None:
            own, other = map(statistics.median, (one.cost.seconds, one.cost.beside_seconds))
            rows.append(("processor time", "s a step", own, other))
            peaks = (one.cost.peak_bytes, one.cost.beside_peak_bytes)
            rows.append(("peak memory", "bytes", *peaks))
        made += [
            Figure("methods", work, setting, metric, unit, own, BASELINE, other)
            for metric, unit, own, other in rows
            if own is not None
        ]
    return made


def plot(found: Sequence[Standing], file: Path, score: str) -> None:
    """The score against memory, a point a method that has both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(7, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for one in found:
        if one.score is None or one.cost is None:
            continue
        at = (one.cost.memory, one.score)
        axes.scatter(*at, color="#1f4e79", s=18)
        axes.annotate(one.method, at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(
        xlabel="peak memory, as a ratio to LoRA's",
        ylabel=f"{score.replace('_', ' ')} on the test rows",
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
