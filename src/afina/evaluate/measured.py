"""Which scores an evaluation can choose a run's best weights by: known before the model says a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afina.config import EvalSettings
from afina.errors import ConfigError
from afina.evaluate.answers import choices_of, reference_text, right_choice
from afina.types import Row


def measured(rows: Sequence[Row], settings: EvalSettings, tokenizer: Any) -> tuple[str, ...]:
    """Which of loss, exact_match and accuracy `evaluate` gives for these rows.

    Args:
        rows: prepared.
        settings: of the evaluation.
        tokenizer: the model's.

    Raises:
        DataError: a right answer that is not among its choices, as `evaluate` would.
        ConfigError: settings that `evaluate` does not take.
    """
    refuse_system(settings)
    if any(row.label is not None or row.tags is not None for row in rows):
        return ("loss", "accuracy")
    answered = chosen = False
    for row in rows[: settings.max_rows]:
        reference = reference_text(row, tokenizer)
        if reference is None:
            continue
        answered = True
        choices = choices_of(row, settings.choices)
        if choices:
            right_choice(row, choices, reference)
            chosen = True
    asked = answered and settings.generate
    found = {"loss": True, "exact_match": asked, "accuracy": chosen}
    return tuple(name for name, given in found.items() if given)


def refuse_system(settings: EvalSettings) -> None:
    """Raises for a system prompt, which no row would be asked with.

    Raises:
        ConfigError: see above.
    """
    if settings.answers.system is not None:
        raise ConfigError(
            "eval.answers.system changes nothing: each row is asked with its own prompt, as in training",
            got=repr(settings.answers.system[:60]),
            cure="give the rows a system turn, or a column `system`",
        )
