"""What can be said of rows before a model is run on them: what would train, and what would quietly spoil it.

Pure functions of rows, tokenizer and settings; each looks at one point and returns a `Finding`. Every run makes the
cheap ones before it writes anything; `afina check` makes these and those that run the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.errors import DataError
from afina.models.forward import context_of
from afina.models.stops import stop_ids
from afina.train.preflight.finding import Finding, Status, Subject, of_error, place, skipped
from afina.train.preflight.labels import labels, stop_token
from afina.train.preflight.lengths import lengths
from afina.train.preflight.template import template
from afina.train.preflight.twice import duplicates, overlap
from afina.types import Row

__all__ = [
    "Finding",
    "Status",
    "Subject",
    "cheap",
    "of_error",
    "place",
    "say_and_refuse",
    "skipped",
    "subject_of",
]


def subject_of(
    model: nn.Module,
    tokenizer: Any,
    rows: tuple[Sequence[Row], Sequence[Row]],
    settings: TrainSettings,
    data_settings: DataSettings,
    *,
    given: bool,
) -> Subject:
    """What the cheap points look at, in a run's own terms.

    Args:
        model: that will train.
        tokenizer: the model's, or None with prepared rows.
        rows: (training rows, validation rows).
        settings: of the training.
        data_settings: how the rows were read.
        given: the training rows were prepared by the caller.
    """
    context = context_of(model)
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    named = [] if named is None else [named] if isinstance(named, int) else list(named)
    return Subject(
        *rows,
        tokenizer,
        () if tokenizer is None else stop_ids(model, tokenizer),
        named,
        context,
        data_settings.max_tokens or context,
        settings,
        given,
    )


def cheap(subject: Subject) -> list[Finding]:
    """Every point that needs no run of the model."""
    return [
        labels(subject.rows, subject.stops),
        stop_token(subject),
        template(subject.rows, subject.tokenizer, subject.limit),
        lengths(subject.rows, subject.val_rows, subject.context, subject.settings),
        duplicates(subject.rows),
        overlap(subject.rows, subject.val_rows),
    ]


def say_and_refuse(
    findings: Sequence[Finding], say: Callable[[str], None], told: Collection[str] = ()
) -> None:
    """Says what is not in order, and raises when a run would be worthless.

    Args:
        findings: of the cheap points.
        say: where a run says things.
        told: points that were told otherwise already.

    Raises:
        DataError: for the first finding that is an error.
    """
    for finding in findings:
        if finding.status in ("note", "warning") and finding.name not in told:
            cure = f"; {finding.cure}" if finding.cure else ""
            say(f"{finding.status}: {finding.name}: {finding.seen}{cure}")
    for finding in findings:
        if finding.status == "error":
            raise DataError(f"{finding.name}: {finding.seen}", cure=finding.cure or None)
