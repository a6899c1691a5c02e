"""How a run is embedded: what is not a setting of the training itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from afina.config import Resolved, of_kind
from afina.data.settings import DataSettings
from afina.errors import ConfigError
from afina.models.in_parts import Unread
from afina.parallel.runtime import Mesh, OneProcess
from afina.train.report import Reporter
from afina.tree import Seams
from afina.types import Row

Scorer = Callable[[nn.Module, Sequence[Row]], Mapping[str, float]]
"""Scores a model on validation rows; its keys go into metrics.jsonl as `val_KEY`."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run belongs and who watches it.

    Attributes:
        base: name of the base model, for the files; None takes what it was loaded from.
        data_settings: how the data is read.
        evaluate: scores on validation rows beyond the loss (exact_match, accuracy).
        measured: validation rows -> the names of the scores that `evaluate` gives for them; None: not known beforehand.
        seams: functions of techniques that change with time.
        mesh: the processes; in a program that torchrun starts `afina.parallel.processes.Processes(settings)`, for
            nothing is picked up from the environment by itself.
        unread: the base's values, where the model has none yet (`models.in_parts`); None where it has them.
        reporter: None is a live line in a terminal and plain lines elsewhere.
        config: the resolved configuration, for config.yaml; None writes one from the arguments.
        resume: go on from the folder's latest checkpoint.
        resume_from: the same from this one of its checkpoints, by name or step.
        allow_changes: resume also with other data or settings; what differs is said and recorded.
        overwrite: replace a run that is in the folder.
    """

    base: str | None = None
    data_settings: DataSettings = field(default_factory=DataSettings)
    evaluate: Scorer | None = None
    measured: Callable[[Sequence[Row]], Collection[str]] | None = None
    seams: Seams = field(default_factory=Seams)
    mesh: Mesh = field(default_factory=OneProcess)
    unread: Unread | None = None
    reporter: Reporter | None = None
    config: Resolved[Any] | None = None
    resume: bool = False
    resume_from: str | int | None = None
    allow_changes: bool = False
    overwrite: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether this is the rest of a run."""
        return self.resume or self.resume_from is not None

    def scores(self, val_rows: Sequence[Row]) -> Collection[str] | None:
        """The names of the scores that validation on these rows gives; None when that is not known beforehand."""
        if self.evaluate is None:
            return ("loss",)
        return None if self.measured is None else self.measured(val_rows)


def options_of(given: RunOptions | None) -> RunOptions:
    """The options given, or the defaults for None.

    Raises:
        ConfigError: something else, or a field that holds something else than its place asks for.
    """
    options = RunOptions() if given is None else given
    if not isinstance(options, RunOptions):
        raise ConfigError(
            "these are no RunOptions",
            got=repr(options)[:80],
            wanted="RunOptions(resume=True), for one",
        )
    of_kind(DataSettings, options.data_settings)
    functions = {"evaluate": "the model and the validation rows", "measured": "the validation rows"}
    for name, of in functions.items():
        function = getattr(options, name)
        if function is not None and not callable(function):
            raise ConfigError(
                f"the option {name} is to be called, and cannot be",
                got=repr(function)[:80],
                wanted=f"a function of {of}",
            )
    return options
