"""The pre-flight of a run: every point at which a run quietly goes wrong, looked at before it is made.

A point that cannot be looked at, because one before it failed, is told as skipped; all others are looked at all the
same, so that one call tells everything there is to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afina.config import TrainSettings
from afina.data.formats import recognise, rename
from afina.data.report import DataReport
from afina.data.sources import read
from afina.errors import AfinaError, ModelError
from afina.problems import name_of
from afina.reports import data as data_points
from afina.reports import packed, space, steps
from afina.reports import settings as settings_points
from afina.reports.checked import Checked
from afina.reports.idle import idle
from afina.reports.trial import Trial
from afina.train import plan
from afina.train.classes import options_for
from afina.train.fit import refuse_kinds, refuse_rows, refuse_unfit
from afina.train.options import RunOptions, options_of
from afina.train.preflight import Finding, cheap, of_error, skipped, subject_of
from afina.train.rows import are_rows, read_rows
from afina.train.run import overruled, sources_of
from afina.tree import Edit
from afina.types import Row

ROW_POINTS = ("labels", "stop token", "template", "lengths", "duplicates", "overlap")
RUN_POINTS = ("batch", "learning rate", "schedule", "capacity", "disk")
STEP_POINTS = ("packing", "start", "first step", "pace")


def check(
    model: nn.Module,
    tokenizer: Any,
    data: str | Path | Sequence[Row] | Sequence[Mapping[str, Any]],
    edit: Edit,
    out: str | Path | None = None,
    *,
    val: str | Path | Sequence[Row] | Sequence[Mapping[str, Any]] | None = None,
    settings: TrainSettings | None = None,
    options: RunOptions | None = None,
    quick: bool = False,
    **overrides: Any,
) -> Checked:
    """Looks at all that a call of `train` with the same arguments would do, and does none of it.

    The model is afterwards as it was before, its first steps undone.

    Args:
        model: as of `train`, like all the others.
        tokenizer: the model's.
        data: that trains.
        edit: from `afina.apply`.
        out: the run's folder; None leaves out the points about it.
        val: validation data.
        settings: of the training.
        options: how the run would be embedded.
        quick: leave out what runs the model.
        **overrides: settings by name, as `steps=200`.

    Returns:
        The findings. What does not fit is one of them, and not raised.

    Raises:
        ConfigError: for an override that is no setting, or out of range, or an argument of another kind.
        ModelError, TechniqueError: for no model, or no edit.
    """
    settings, options = overruled(settings, overrides), options_of(options)
    refuse_kinds(model, tokenizer, edit)
    place = None if out is None else Path(name_of(out, "the run's folder", "a folder, or None"))
    reads = sources_of(model, tokenizer, options, data, val)
    case = Case(model, tokenizer, edit, settings, options, place, quick, reads=reads)
    return case.look(data, val)


@dataclass
class Case:
    """One call of `check`.

    Attributes:
        model, tokenizer, edit: None where they could not be had; `failed` then says why. A model whose weights could
            not be had may be its outline, for the points that need no more.
        settings: of the training.
        options: how the run would be embedded.
        out: its folder.
        quick: leave out what runs the model.
        failed: point ("model", "technique") -> its error.
        disposable: nobody uses the model afterwards.
        reads: what the run is made from, as `afina.train.folder.refuse_inside` takes it.
    """

    model: Any
    tokenizer: Any
    edit: Edit | None
    settings: TrainSettings
    options: RunOptions
    out: Path | None = None
    quick: bool = False
    failed: dict[str, AfinaError] = field(default_factory=dict[str, AfinaError])
    disposable: bool = False
    reads: Mapping[str, object] = field(default_factory=dict[str, object])

    def look(self, data: Any, val: Any) -> Checked:
        """Every point, in the order in which a run meets them."""
        if self.model is not None:
            self.options = options_for(self.model, self.options)
        found = [*self._fit(), *self._output()]
        rows, val_rows, reports, failed = self._read(data, val)
        if failed is not None:
            found += [of_error("format", failed), skipped("rows", "the data cannot be read")]
        elif not rows:
            found += [self._recognised(data), skipped("rows", "there is no model")]
        else:
            found += [data_points.format_of(reports), data_points.fate_of(reports)]
        if rows:
            found += self._of_rows(rows, val_rows, given=are_rows(data))
        else:
            found += [skipped(name, found[-1].seen) for name in ROW_POINTS]
        sources = [data] if val is None else [data, val]
        found.append(idle(self.settings, self.options, sources, reports, val_rows))
        broken = [f.name for f in found if f.name in ("labels", "lengths") and f.status == "error"]
        found += self._of_run(rows, val_rows, f"see {' and '.join(broken)}" if broken else "")
        return Checked(tuple(found), tuple(rows), self.tokenizer)

    def _fit(self) -> list[Finding]:
        """The model, and the technique on it."""
        if self.model is None:
            return [
                of_error("model", self.failed["model"]),
                skipped("technique", "there is no model"),
            ]
        model = self._loaded()
        if self.edit is None:
            return [model, of_error("technique", self.failed["technique"])]
        try:
            refuse_unfit(self.model, self.edit)
        except ModelError as error:
            self.failed["model"] = error
            return [of_error("model", error), skipped("technique", "the model cannot be trained")]
        except AfinaError as error:
            self.failed["technique"] = error
            return [model, of_error("technique", error)]
        count = sum(p.numel() for p in self.model.parameters())
        trainable = sum(p.numel() for p in self.edit.trainable().values())
        names = " and ".join(one.key for one in self.edit.techniques)
        said = f"{names}: {trainable:,} parameters train ({100 * trainable / count:.3g} %)"
        values = {"trainable": trainable, "tensors": len(self.edit.trainable())}
        warned, noted = self.edit.warnings, self.edit.notes
        status = "warning" if warned else "note" if noted else "ok"
        cure = "take another model, or train what can be reached" if warned else ""
        return [model, Finding("technique", status, said, cure, (*warned, *noted), values)]

    def _loaded(self) -> Finding:
        """What the model is, or why only its outline could be had."""
        if "model" in self.failed:
            return of_error("model", self.failed["model"])
        count = sum(p.numel() for p in self.model.parameters())
        parameter = next(self.model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        place = "its weights not read" if parameter.is_meta else f"on {parameter.device}"
        kind = f"{type(self.model).__name__}, {count:,} parameters, {dtype}, {place}"
        return Finding("model", "ok", kind, values={"parameters": count, "dtype": dtype})

    def _output(self) -> list[Finding]:
        options = self.options
        way = {"resume": options.goes_on, "overwrite": options.overwrite}
        return [space.output(self.out, **way, reads=self.reads)]

    def _read(
        self, data: Any, val: Any
    ) -> tuple[list[Row], list[Row], list[DataReport], AfinaError | None]:
        """Rows as the run would have them; none without a model; or why they cannot be had."""
        if self.model is None:
            return [], [], [], None
        try:
            read_ = read_rows(
                self.model,
                self.tokenizer,
                data,
                val,
                self.options.data_settings,
                keep=() if self.edit is None else self.edit.columns(),
            )
        except AfinaError as error:
            # Where it is the validation rows that fail, the others can be looked at.
            rows = [] if val is None else self._read(data, None)[0]
            return rows, [], [], error
        return *read_, None

    def _recognised(self, data: Any) -> Finding:
        """The format alone, for which no tokenizer is needed."""
        settings = self.options.data_settings
        try:
            found = read(data, settings)
            format, _ = recognise(rename(found.rows, settings.columns), settings)
        except AfinaError as error:
            return of_error("format", error)
        return Finding("format", "ok", f"{format.name}: {format.why}")

    def _of_rows(self, rows: list[Row], val_rows: list[Row], *, given: bool) -> list[Finding]:
        """The cheap points; unusable rows are the finding of the labels."""
        subject = subject_of(
            self.model,
            self.tokenizer,
            (rows, val_rows),
            self.settings,
            self.options.data_settings,
            given=given,
        )
        found = cheap(subject)
        try:
            refuse_rows(self.model, rows, val_rows)
        except AfinaError as error:
            found[0] = of_error("labels", error)
        return found

    def _of_run(self, rows: list[Row], val_rows: list[Row], broken: str) -> list[Finding]:
        """The points about the settings and, unless all is to be quick, those that run the model.

        Args:
            rows: that train.
            val_rows: that score.
            broken: why the model cannot be run on them, if so.
        """
        names = (*RUN_POINTS, "validation", *STEP_POINTS)
        if self.edit is None or "technique" in self.failed:
            return [skipped(name, "nothing can train: see model and technique") for name in names]
        keys = [technique.key for technique in self.edit.techniques]
        if not any(row.trained_tokens for row in rows):
            rate = settings_points.rate(self.settings, keys)  # which asks no row
            none = "there are no rows that train"
            return [rate if name == rate.name else skipped(name, none) for name in names]
        trial = self._trial(rows)
        trainable = sum(p.numel() for p in self.edit.trainable().values())
        seen = trial.rows_a_step * trial.total_steps
        found = [
            settings_points.batch(rows, self.settings, keys),
            settings_points.rate(self.settings, keys),
            _schedule(trial, rows, seen),
            settings_points.capacity(rows, trainable, keys),
            space.disk(
                self.edit,
                self.settings,
                trial.total_steps,
                self.out,
                tokenizer=self.tokenizer,
                validates=bool(val_rows),
            ),
            settings_points.validation(val_rows),
        ]
        broken = "see model" if "model" in self.failed else broken
        broken = broken or ("see schedule" if found[2].status == "error" else "")
        if self.quick or broken:
            left_out = "left out (quick)" if self.quick else broken
            return [*found, *(skipped(name, left_out) for name in STEP_POINTS)]
        return [*found, *self._of_steps(trial)]

    def _trial(self, rows: Sequence[Row]) -> Trial:
        assert self.edit is not None
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return Trial(
            self.model,
            self.edit,
            rows,
            self.settings,
            self.options.data_settings,
            self.edit.seams(plan.total_steps(self.settings, rows)).and_then(self.options.seams),
            pad or 0,
            self.disposable,
        )

    def _of_steps(self, trial: Trial) -> list[Finding]:
        """What runs the model; what is broken already is not run further."""
        found = [_held("packing", trial, packed.packed_as_alone)]
        if found[0].status == "error":  # the rest as it will be once that is mended
            unpacked = trial.data_settings.model_copy(update={"packing": False})
            trial = replace(trial, data_settings=unpacked)
        found.append(_held("start", trial, steps.start))
        if found[-1].status == "error":
            why = "see start"
            return [*found, *(skipped(name, why) for name in STEP_POINTS[2:])]
        return [*found, *steps.first_steps(trial)]


def _schedule(trial: Trial, rows: Sequence[Row], seen: float) -> Finding:
    """The length of the run, and which rows it shows when."""
    found = settings_points.schedule(rows, seen, trial.total_steps, trial.warmup_steps)
    try:
        return replace(found, details=(*found.details, *trial.plan.notes()))
    except AfinaError as error:
        return of_error(found.name, error)


def _held(name: str, trial: Trial, point: Callable[[Trial], Finding]) -> Finding:
    """A point that runs the model, where the device has the memory for it."""
    try:
        return point(trial)
    except torch.OutOfMemoryError:
        return steps.out_of_memory(name, trial)
