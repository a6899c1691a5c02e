"""How the methods of `bench/methods.py` stand: a table, what is missing in it, figures, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .beside import Cost
from .columns import barred, spaced
from .points import scatter
from .report import Figure
from .works import BASELINE, METHODS


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
    rows = [_cells(each) for each in found]
    yield from barred(head, rows) if markdown else spaced(head, rows)


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
            rows += one.cost.pairs()
        made += [
            Figure("methods", work, setting, metric, unit, own, BASELINE, other)
            for metric, unit, own, other in rows
            if own is not None
        ]
    return made


def plot(found: Sequence[Standing], file: Path, score: str) -> None:
    """The score against memory, a point a method that has both."""
    points = {
        one.method: (one.cost.memory, one.score)
        for one in found
        if one.score is not None and one.cost is not None
    }
    share = f"{score.replace('_', ' ')} on the test rows"
    scatter(file, points, x="peak memory, as a ratio to LoRA's", y=share)
