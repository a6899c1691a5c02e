"""Whether each setting of a run has an effect: one that has none would be a promise not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from afina.config import EvalSettings, TrainSettings
from afina.data.idle import refuse_idle_data
from afina.data.report import DataReport
from afina.errors import AfinaError
from afina.problems import together
from afina.train.fit import refuse_idle_settings
from afina.train.options import RunOptions
from afina.train.preflight import Finding, of_error
from afina.types import Row


def idle(
    settings: TrainSettings,
    options: RunOptions,
    sources: Sequence[Any],
    reports: Sequence[DataReport],
    val_rows: Sequence[Row],
) -> Finding:
    """The point about the settings, all that do nothing at once.

    Args:
        settings: of the training.
        options: of the run, for the settings of its data and of its evaluations.
        sources: the training data, and the validation data if it was given.
        reports: of what could be read of them.
        val_rows: that score.
    """
    evaluation = None if options.config is None else options.config.config.eval
    validates = bool(val_rows) or len(sources) > 1

    def refuse() -> None:
        refuse_idle_settings(settings, validates, options.scores(val_rows) if val_rows else None)

    formats = [one.format for one in reports]
    problems = [
        *_raised(refuse),
        *_raised(lambda: refuse_idle_data(sources, options.data_settings, formats)),
    ]
    if problems:
        return of_error("settings", problems[0] if len(problems) == 1 else together(problems))
    said = "known, in range, and each has an effect"
    later = [] if evaluation is None else unasked(settings, evaluation)
    if not later:
        return Finding("settings", "ok", said)
    have = "has its" if len(later) == 1 else "have theirs"
    why = f"{' and '.join(later)} {have} when `afina eval` measures the run: here the loss alone chooses"
    return Finding("settings", "note", f"known and in range; {why}")


def _raised(refuse: Callable[[], None]) -> list[AfinaError]:
    try:
        refuse()
    except AfinaError as error:
        return [error]
    return []


def unasked(settings: TrainSettings, evaluation: EvalSettings) -> list[str]:
    """Settings of evaluation that were changed and that no evaluation during the run looks at."""
    if settings.best != "loss":
        return []
    default = EvalSettings()
    names = EvalSettings.model_fields
    return [f"eval.{n}" for n in names if getattr(evaluation, n) != getattr(default, n)]
