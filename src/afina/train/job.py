"""One run from its data to its finished folder, in the order in which things happen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afina.adapters.fingerprint import base_fingerprint
from afina.config import EvalSettings, Resolved, RunConfig, TrainSettings, as_given, dump
from afina.data.order import steps_in, windows
from afina.data.packing import collate
from afina.data.report import DataReport, fingerprint
from afina.data.settings import DataSettings
from afina.data.split import shared
from afina.errors import RunError
from afina.models.forward import (
    own_attention,
    packing,
    to_device,
    token_losses,
    trained_logits,
)
from afina.optim.optimisers import Optimiser
from afina.train import checkpoint, folder, micro
from afina.train.checkpoint import State
from afina.train.fit import refuse_idle_settings, refuse_rows
from afina.train.keeper import Keeper, last_tenth_loss, scores_of
from afina.train.loop import Work, loop
from afina.train.options import RunOptions
from afina.train.report import Reporter, reporter
from afina.train.rows import read_rows
from afina.train.validate import mean_loss
from afina.tree import Edit
from afina.types import Batch, Row


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: of all its files.
        weights: the trained part: `adapter/`, or `model/` after full fine-tuning.
        steps: optimiser steps done.
        loss: mean training loss of the last tenth of the steps, weighted by trained tokens.
        scores: of the kept weights on the validation rows, by name (`loss`, …); empty without such rows.
        best_step: the step whose weights were kept.
    """

    folder: Path
    weights: Path
    steps: int
    loss: float
    scores: Mapping[str, float]
    best_step: int

    @property
    def val_loss(self) -> float | None:
        """The validation loss of the kept weights, None without validation rows."""
        return self.scores.get("loss")


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else "(rows given in Python)"


@dataclass
class Job:
    """One call of `train`, in the order of a run."""

    model: nn.Module
    tokenizer: Any
    edit: Edit
    out: Path
    settings: TrainSettings
    options: RunOptions

    def run(self, data: Any, val: Any) -> Run:
        """From the data to the finished folder."""
        say = self.options.reporter or reporter()
        rows, val_rows, reports = read_rows(
            self.model, self.tokenizer, data, val, self.options.data_settings
        )
        for line in (line for report in reports for line in report.lines()):
            say.say(line)
        if val is None and val_rows:
            say.say(f"held out for validation, by content: {len(val_rows)} rows; {len(rows)} train")
        refuse_rows(rows, val_rows)
        refuse_idle_settings(self.settings, bool(val_rows))
        pairs = shared(rows, val_rows)
        if pairs:
            one, other = pairs[0]
            say.say(
                f"warning: {len(pairs)} validation rows are also training rows, so their score is too "
                f"good (row {one.source or one.id} is {other.source or other.id})"
            )
        say.say(self.edit.summary())
        self.lengths = [len(row.tokens) for row in rows]
        self.total_steps = self._total_steps()
        with folder.claimed(self.out, resume=self.options.resume, overwrite=self.options.overwrite):
            if not self.options.resume:
                counts = {"train": len(rows), "validation": len(val_rows)}
                self._record((_name(data), None if val is None else _name(val)), reports, counts)
            try:
                return self._train(rows, val_rows, say)
            finally:
                say.close()

    def _total_steps(self) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        assert self.settings.epochs is not None
        return steps_in(self.lengths, self.settings.seed, self.settings.epochs, **self._step_size())

    def _step_size(self) -> dict[str, int | None]:
        return {
            "rows_per_step": self.settings.rows_per_step,
            "tokens_per_step": self.settings.tokens_per_step,
        }

    def _warmup_steps(self) -> int:
        if self.settings.warmup_steps is not None:
            return self.settings.warmup_steps
        return math.ceil((self.settings.warmup_ratio or 0.0) * self.total_steps)

    def _windows(self, rows: Sequence[Row], start: int) -> Iterator[list[Row]]:
        found = windows(self.lengths, self.settings.seed, start=start, **self._step_size())
        return ([rows[place] for place in window.rows] for window in found)

    def _optimiser(self) -> Optimiser:
        scales = self.edit.lr_scales()
        for change in self.options.seams.param_groups:
            scales = change(scales)
        return Optimiser(
            self.edit.trainable(),
            scales,
            self.settings.optimizer,
            {
                "lr": self.settings.lr,
                "weight_decay": self.settings.weight_decay,
                "betas": self.settings.betas,
                "eps": self.settings.eps,
            },
        )

    def _train(self, rows: list[Row], val_rows: list[Row], say: Reporter) -> Run:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        optimiser = self._optimiser()
        state = self._start(optimiser, fingerprint(rows), fingerprint(val_rows))
        packed = self.options.data_settings.packing
        own = getattr(getattr(self.model, "config", None), "_attn_implementation", "")
        training = self.model.training
        with packing(self.model, packed):
            self.model.train()
            try:
                state, cut = self._cutter(rows, state, say)
                work = Work(
                    self.model,
                    self.edit,
                    optimiser,
                    self.settings,
                    cut,
                    self._collate,
                    self.options.mesh,
                    self.options.seams,
                    self.total_steps,
                    self._warmup_steps(),
                )
                keeper = Keeper(
                    self.out,
                    self.model,
                    self.edit,
                    optimiser,
                    self.settings,
                    self.total_steps,
                    self._scorer(val_rows, cut, own if packed else None),
                    state,
                    self._base(),
                    self.tokenizer,
                )
                keeper.follow(loop(work, self._windows(rows, state.step), state.step), say)
            finally:
                self.model.train(training)
        weights, best = keeper.finish(say)
        return Run(
            self.out,
            weights,
            keeper.state.step,
            last_tenth_loss(self.out),
            scores_of(self.out, best),
            best,
        )

    def _collate(self, rows: Sequence[Row]) -> Batch:
        pad = self.tokenizer.pad_token_id if self.tokenizer is not None else None
        return collate(rows, self.options.data_settings.packing, pad or 0)

    def _base(self) -> str:
        config = getattr(self.model, "config", None)
        return self.options.base or str(getattr(config, "_name_or_path", "") or "unknown")

    def _start(self, optimiser: Optimiser, rows_fingerprint: str, val_fingerprint: str) -> State:
        """The state of step 0, or that of the checkpoint to go on from."""
        settings = self._recorded_settings()
        settings["the validation rows"] = val_fingerprint
        settings["the base model's weights"] = base_fingerprint(self.model, self.edit)
        settings["the base model's type"] = str(next(self.model.parameters()).dtype)
        if not self.options.resume:
            return State(step=0, rows_fingerprint=rows_fingerprint, settings=settings)
        newest = checkpoint.latest(self.out)
        before = checkpoint.read_state(newest)
        differing = [k for k in settings if settings[k] != before.settings.get(k)]
        if before.rows_fingerprint != rows_fingerprint:
            differing.append("the training rows")
        if differing:
            raise RunError(
                "this run cannot be resumed exactly: it was started otherwise",
                got="different now: " + ", ".join(differing),
                cure="resume with the data and settings of its config.yaml, or start a new run",
            )
        return checkpoint.restore(newest, self.edit, optimiser)

    def _recorded_settings(self) -> dict[str, Any]:
        """What must be equal for a resumed run to be the same run."""
        recorded = {f"train.{k}": v for k, v in self.settings.model_dump(mode="json").items()}
        recorded["data.packing"] = self.options.data_settings.packing
        for technique in self.edit.techniques:
            for name, value in technique.model_dump(mode="json").items():
                recorded[f"techniques.{technique.key}.{name}"] = value
        return recorded

    def _cutter(
        self, rows: Sequence[Row], state: State, say: Reporter
    ) -> tuple[State, Callable[[Sequence[Row]], list[list[Row]]]]:
        """How a step is cut into micro-batches: as set, as decided before, or found by trial."""
        rows_each, tokens_each = self.settings.micro_rows, self.settings.micro_tokens
        if "auto" in (rows_each, tokens_each):
            tokens_each = state.micro_tokens
            if tokens_each is None:
                longest = max(rows, key=lambda row: len(row.tokens))
                sample = [longest, *next(self._windows(rows, 0))]
                tokens_each, why = micro.find_tokens(sample, self._trial, self._device())
                say.say(f"micro-batches of at most {tokens_each:,} tokens: {why}")
            state, rows_each = replace(state, micro_tokens=tokens_each), None
        each = None if rows_each is None else int(rows_each)
        most = None if tokens_each is None else int(tokens_each)
        return state, lambda part: micro.cut(part, rows_each=each, tokens_each=most)

    def _trial(self, rows: Sequence[Row]) -> None:
        """A forward and backward pass that leaves nothing behind."""
        batch = to_device(self._collate(rows), self._device())
        if batch.trained_tokens:
            token_losses(*trained_logits(self.model, batch)).sum().backward()
        for parameter in self.edit.trainable().values():
            parameter.grad = None

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _scorer(
        self,
        val_rows: list[Row],
        cut: Callable[[Sequence[Row]], list[list[Row]]],
        own: str | None,
    ) -> Callable[[nn.Module], Mapping[str, float]] | None:
        if not val_rows:
            return None
        parts = [m for i in range(0, len(val_rows), 16) for m in cut(val_rows[i : i + 16])]

        def score(model: nn.Module) -> Mapping[str, float]:
            scores = {"loss": mean_loss(model, parts, self._collate)}
            if self.options.evaluate is not None:
                # Generation knows nothing of packed rows and takes the model's own attention.
                with own_attention(model, own) if own else nullcontext():
                    scores.update(self.options.evaluate(model, val_rows))
            return scores

        return score

    def _record(
        self,
        sources: tuple[str, str | None],
        reports: Sequence[DataReport],
        counts: Mapping[str, int],
    ) -> None:
        """Everything the run was made from, before its first step."""
        resolved = self.options.config or self._as_config(*sources)
        folder.write_text(self.out / folder.CONFIG, dump(resolved))
        account = {"rows": dict(counts), "sources": [asdict(report) for report in reports]}
        folder.write_json(self.out / "data.json", account)
        machine = {"device": str(self._device()), "dtype": str(next(self.model.parameters()).dtype)}
        folder.write_json(self.out / "environment.json", {**folder.environment(), **machine})

    def _as_config(self, data: str, val: str | None) -> Resolved[DataSettings]:
        config = RunConfig(
            model=self._base(),
            source=data,
            val=val,
            revision=None,
            data=self.options.data_settings,
            techniques=tuple(self.edit.techniques),
            train=self.settings,
            eval=EvalSettings(),
        )
        return as_given(config, [t.key for t in self.edit.techniques], "Python")
