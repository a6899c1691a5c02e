"""Scores of a model over prepared rows: loss, perplexity, exact match, JSON match, accuracy, and each row's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from afina.config import EvalSettings, of_kind
from afina.data.settings import DataSettings
from afina.errors import DataError
from afina.evaluate import scores
from afina.evaluate.answers import (
    choices_of,
    prompt_text,
    reference_text,
    right_choice,
    with_answer,
)
from afina.evaluate.classes import Confusion, classify
from afina.evaluate.inputs import Rows, rows_of
from afina.evaluate.losses import named, row_losses
from afina.evaluate.measured import refuse_system
from afina.models.answerable import refuse_unanswerable
from afina.models.generate import Completion, evaluating
from afina.models.generate import generate as answer_all
from afina.models.prompts import check_pair
from afina.problems import refuse_uncallable
from afina.types import Row

Progress = Callable[[str, int, int], None]
"""Told what is being done ("loss", "answers", "choices"), how many are done, and how many there are."""

FLAGS = ("exact_match", "json_match", "accuracy", "accuracy_per_token")
"""The row scores that are true or false; `field:NAME` joins them."""


@dataclass(frozen=True)
class Scores:
    """What a model scored over some rows.

    Attributes:
        n: rows.
        trained_tokens: tokens that the loss is a mean over; 0 for labelled rows.
        values: each metric by name: `loss` (nats a trained token), `perplexity`, and as shares between 0 and 1
            `exact_match`, `json_match`, `accuracy`, `accuracy_per_token`, `field:NAME`; of a classifier `macro_f1`.
        errors: standard errors of those that have one.
        counts: how many rows each share is a share of.
        confusion: of a classifier; None for other models.
        rows: one dictionary a row, in the order of the rows.
    """

    n: int
    trained_tokens: int
    values: dict[str, float]
    errors: dict[str, float]
    counts: dict[str, int]
    rows: list[dict[str, Any]] = field(repr=False)
    confusion: Confusion | None = field(default=None, repr=False)

    @property
    def loss(self) -> float | None:
        """Nats a trained token, over all rows at once; a mean over rows for a classifier."""
        return self.values.get("loss")

    @property
    def perplexity(self) -> float | None:
        """exp(loss)."""
        return self.values.get("perplexity")

    @property
    def exact_match(self) -> float | None:
        """Share of the answers that equal the reference."""
        return self.values.get("exact_match")

    @property
    def accuracy(self) -> float | None:
        """Share of rows whose likeliest choice, or predicted class, is the right one."""
        return self.values.get("accuracy")

    def summary(self) -> dict[str, Any]:
        """All but the rows, ready for JSON; infinity, which JSON has not, becomes None."""
        finite = {name: v if math.isfinite(v) else None for name, v in self.values.items()}
        return {
            "n": self.n,
            "trained_tokens": self.trained_tokens,
            **finite,
            "standard_errors": self.errors,
            "counts": self.counts,
            **({} if self.confusion is None else {"confusion": self.confusion.as_json()}),
        }


def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    settings: EvalSettings | None = None,
    *,
    data: DataSettings | None = None,
    generate: Callable[..., list[Completion]] = answer_all,
    on_progress: Progress | None = None,
) -> Scores:
    """Measures the model on every row.

    The loss is the sum of all token losses over the number of trained tokens, as in training. Answers are generated
    from each row's own prompt tokens, so the model is asked exactly what it was trained on.

    Args:
        model: a causal language model, or a classifier when the rows have labels.
        tokenizer: its tokenizer.
        rows: a file, folder or hub data set, dictionaries as a file's rows would be, or prepared rows.
        settings: defaults when None.
        data: how rows that are not prepared are read; defaults when None.
        generate: answers prompts; has the form of `afina.models.generate.generate`.
        on_progress: see `Progress`.

    Raises:
        DataError: no rows, nothing to measure, or a right answer that is not among its choices.
        ModelError: labelled rows and no classification head, or no model of Transformers.
        ConfigError: settings of another kind.
        RunError: the model's outputs are not finite numbers.
    """
    settings, data = of_kind(EvalSettings, settings), of_kind(DataSettings, data)
    refuse_uncallable(generate=generate, on_progress=on_progress)
    check_pair(model, tokenizer)
    refuse_system(settings)
    rows = rows_of(model, tokenizer, rows, data)[: settings.max_rows]
    if not rows:
        raise DataError("there are no rows to evaluate", cure="give a file that has some")
    table: list[dict[str, Any]] = [{"id": row.id, "source": row.source} for row in rows]
    confusion: Confusion | None = None
    with evaluating(model):
        if any(row.label is not None or row.tags is not None for row in rows):
            confusion = classify(
                model, tokenizer, rows, table, settings, _told(on_progress, "loss")
            )
        else:
            _losses(model, rows, table, settings, on_progress)
            _answers(model, tokenizer, rows, table, settings, generate, on_progress)
            _choose(model, tokenizer, rows, table, settings, on_progress)
    return _gather(table, confusion)


def compare(after: Scores, before: Scores) -> dict[str, tuple[float, float]]:
    """What changed, metric by metric, over the same rows: the difference and its standard error, row by row.

    A loss is compared by each row's own, in nats a token of all rows; perplexity has no entry.
    """
    changes: dict[str, tuple[float, float]] = {}
    for name in after.values:
        pairs = [
            (_comparable(a, name), _comparable(b, name))
            for a, b in zip(after.rows, before.rows, strict=True)
            if a.get(name) is not None and b.get(name) is not None
        ]
        if not pairs:
            continue
        mean, error = scores.paired_difference(*zip(*pairs, strict=True))
        if name == "loss" and after.trained_tokens:
            scale = after.n / after.trained_tokens
            mean, error = mean * scale, error * scale
        changes[name] = (mean, error)
    return changes


def _comparable(row: dict[str, Any], name: str) -> float:
    return float(row[name]) * row.get("tokens", 1) if name == "loss" else float(row[name])


def _told(on_progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda done, total: on_progress(what, done, total)


def _losses(
    model: Any,
    rows: Sequence[Row],
    table: list[dict[str, Any]],
    settings: EvalSettings,
    on_progress: Progress | None,
) -> None:
    sums = row_losses(model, rows, settings.batch_rows, _told(on_progress, "loss"))
    for entry, row, total in zip(table, rows, sums, strict=True):
        tokens = row.trained_tokens
        entry["loss"] = total / tokens if tokens else None
        entry["tokens"] = tokens


def _answers(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    table: list[dict[str, Any]],
    settings: EvalSettings,
    generate: Callable[..., list[Completion]],
    on_progress: Progress | None,
) -> None:
    asked: list[tuple[dict[str, Any], Row, str]] = []
    for entry, row in zip(table, rows, strict=True):
        reference = reference_text(row, tokenizer)
        if reference is not None:
            entry.update(prompt=prompt_text(row, tokenizer), reference=reference)
            asked.append((entry, row, reference))
    if not settings.generate or not asked:
        return
    for _, row, _ in asked:
        prompt = row.tokens[: row.prompt_tokens]
        refuse_unanswerable(model, tokenizer, prompt, f"the prompt of {named(row)}")
    answers = generate(
        model,
        tokenizer,
        [list(row.tokens[: row.prompt_tokens]) for _, row, _ in asked],
        settings.answers,
        on_progress=_told(on_progress, "answers"),
    )
    for (entry, _, reference), answer in zip(asked, answers, strict=True):
        entry.update(completion=answer.text, stop_reason=answer.stop_reason)
        entry["exact_match"] = scores.exact_match(answer.text, reference)
        entry["json_match"] = scores.json_match(answer.text, reference)
        for name in settings.fields:
            match = scores.json_field_match(answer.text, reference, name)
            entry[f"field:{name}"] = match


def _choose(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    table: list[dict[str, Any]],
    settings: EvalSettings,
    on_progress: Progress | None,
) -> None:
    tasks = []
    for entry, row in zip(table, rows, strict=True):
        choices = choices_of(row, settings.choices)
        if choices and "reference" in entry:
            right = right_choice(row, choices, entry["reference"])
            tasks.append((entry, right, [with_answer(row, c, tokenizer) for c in choices], choices))
    if not tasks:
        return
    flat = [row for _, _, variants, _ in tasks for row in variants]
    losses = iter(row_losses(model, flat, settings.batch_rows, _told(on_progress, "choices")))
    for entry, right, variants, choices in tasks:
        own = [next(losses) for _ in variants]
        tokens = [row.trained_tokens for row in variants]
        summed = scores.best_choice(own, tokens, per_token=False)
        mean = scores.best_choice(own, tokens, per_token=True)
        entry.update(choices=list(choices), choice_losses=own, choice=choices[summed])
        entry.update(accuracy=summed == right, accuracy_per_token=mean == right)


def _gather(table: list[dict[str, Any]], confusion: Confusion | None = None) -> Scores:
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    counts: dict[str, int] = {}
    measured = [entry for entry in table if entry.get("loss") is not None]
    tokens = [entry.get("tokens", 1) for entry in measured]
    sums = [entry["loss"] * n for entry, n in zip(measured, tokens, strict=True)]
    if measured:
        values["loss"] = scores.mean_loss(sums, tokens)
        counts["loss"] = len(measured)
        error = scores.mean_loss_error(sums, tokens)
        if error is not None:
            errors["loss"] = error
        values["perplexity"] = scores.perplexity(values["loss"])
    fields = dict.fromkeys(name for entry in table for name in entry if name.startswith("field:"))
    for name in (*FLAGS, *fields):
        flags = [entry[name] for entry in table if entry.get(name) is not None]
        if flags:
            values[name], errors[name] = scores.proportion(flags)
            counts[name] = len(flags)
    if not values:
        scores.mean_loss([], [])
    if confusion is not None:
        values["accuracy"], values["macro_f1"] = confusion.accuracy, confusion.macro_f1
    trained = sum(entry.get("tokens", 0) for entry in table)
    return Scores(len(table), trained, values, errors, counts, table, confusion)
