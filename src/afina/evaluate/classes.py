"""Scores of a classifier of rows or of tokens: what it took for what, accuracy, and the mean F1 of its classes.

    F1_c = 2 n_cc / (Σ_j n_cj + Σ_i n_ic),    macro F1 = mean of F1_c over the classes that the rows have

Legend: n_ij how many things of class i were taken for class j.

Source: Opitz and Burst 2019, "Macro F1 and Macro F1", arXiv 1911.03347: the mean of F1 scores, not the F1 of means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from afina.config import EvalSettings
from afina.errors import DataError
from afina.evaluate.losses import class_scores, tag_scores
from afina.models.classes import class_names
from afina.types import IGNORE, Row


@dataclass(frozen=True)
class Confusion:
    """What was taken for what.

    Attributes:
        names: of the classes, in the order of their numbers.
        counts: of each class (a row) how many were taken for each class (a column).
    """

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Confusion:
        """From pairs of the right class and the predicted one."""
        counts = [[0] * len(names) for _ in names]
        for right, guess in pairs:
            counts[right][guess] += 1
        return Confusion(tuple(names), tuple(tuple(row) for row in counts))

    @property
    def total(self) -> int:
        """Things that were classified."""
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """Share that was classified right."""
        return sum(row[n] for n, row in enumerate(self.counts)) / self.total

    @property
    def f1(self) -> dict[str, float]:
        """F1 of each class that occurs."""
        taken = [sum(column) for column in zip(*self.counts, strict=True)]
        return {
            name: 2 * row[n] / (sum(row) + taken[n])
            for n, (name, row) in enumerate(zip(self.names, self.counts, strict=True))
            if sum(row)
        }

    @property
    def macro_f1(self) -> float:
        """Mean of `f1`."""
        return sum(self.f1.values()) / len(self.f1)

    def worst(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The commonest errors: (right class, predicted class, how often)."""
        found = [
            (self.names[i], self.names[j], count)
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if i != j and count
        ]
        return sorted(found, key=lambda one: (-one[2], one[0], one[1]))[:most]

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "labels": list(self.names),
            "counts": [list(row) for row in self.counts],
            "f1": self.f1,
        }


def classify(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    table: list[dict[str, Any]],
    settings: EvalSettings,
    on_progress: Callable[[int, int], None] | None,
) -> Confusion:
    """Writes each row's scores into its entry of `table`.

    Raises:
        DataError: some rows have classes and some have none.
        ModelError: the model is no such classifier.
    """
    tagged = all(row.tags is not None for row in rows)
    bare = [row for row in rows if row.label is None and not tagged]
    if bare:
        raise DataError(
            "some rows have a label and some have none",
            got=f"{len(bare)} without, the first {bare[0].source or bare[0].id}",
            cure="label every row, or evaluate the two kinds apart",
        )
    names = class_names(model) or tuple(f"{n}" for n in range(model.config.num_labels))
    batches = (model, rows, settings.batch_rows, on_progress)
    pairs: list[tuple[int, int]] = []
    if tagged:
        for entry, row, found in zip(table, rows, tag_scores(*batches), strict=True):
            entry["prompt"] = tokenizer.decode(row.tokens, skip_special_tokens=True)
            pairs += _tagged(entry, row, *found)
    else:
        for entry, row, found in zip(table, rows, class_scores(*batches), strict=True):
            entry["prompt"] = tokenizer.decode(row.tokens, skip_special_tokens=True)
            pairs.append(_labelled(entry, row, *found))
    return Confusion.of(names, pairs)


def _labelled(entry: dict[str, Any], row: Row, loss: float, guess: int) -> tuple[int, int]:
    """Writes a row's scores; (right, predicted)."""
    entry.update(label=row.label, predicted=guess)
    entry.update(loss=loss, accuracy=guess == row.label)
    return row.label or 0, guess


def _tagged(
    entry: dict[str, Any], row: Row, loss: float, guesses: list[int], right: list[int]
) -> list[tuple[int, int]]:
    """Writes the scores of a row's tokens; (right, predicted) of each that has a class."""
    entry.update(tags=[tag for tag in row.tags or () if tag != IGNORE], predicted=guesses)
    entry.update(loss=loss / len(right) if right else None, tokens=len(right))
    return list(zip(right, guesses, strict=True))
