"""A run that is tried and not made: its rows, steps and sizes, on a model that is afterwards as it was before."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import nn

from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.train import micro
from afina.train.passes import Passes, passes_of
from afina.train.plan import Plan, plan_of, total_steps, warmup_steps
from afina.tree import Edit, Seams
from afina.types import Row


@dataclass(frozen=True)
class Trial:
    """A run that is tried and not made.

    Attributes:
        model: changed by `edit`.
        edit: what trains.
        rows: that train.
        settings: of the training.
        data_settings: of the data; `packing` is used.
        seams: of the run.
        pad_id: what padding holds.
        disposable: nobody uses the model afterwards, so its first step need not be undone.
    """

    model: Any
    edit: Edit
    rows: Sequence[Row]
    settings: TrainSettings
    data_settings: DataSettings
    seams: Seams
    pad_id: int = 0
    disposable: bool = False

    @property
    def packed(self) -> bool:
        """Whether rows lie end to end."""
        return self.data_settings.packing

    @cached_property
    def total_steps(self) -> int:
        """Of the run."""
        return total_steps(self.settings, self.rows)

    @cached_property
    def plan(self) -> Plan:
        """Which rows each step gets; where that goes by the base's losses, which are not measured here, by chance."""
        return plan_of(self.settings, self.rows, self.total_steps, self.seams)

    @property
    def warmup_steps(self) -> int:
        """Of the run."""
        return warmup_steps(self.settings, self.total_steps)

    @cached_property
    def rows_a_step(self) -> float:
        """Mean over an epoch."""
        epoch = self.settings.model_copy(update={"steps": None, "epochs": 1.0})
        return len(self.rows) / total_steps(epoch, self.rows)

    def windows(self) -> Iterator[list[Row]]:
        """The rows of each step; steps whose rows have no label, which move nothing, are left out."""
        found = self.plan.windows()
        return (rows for rows in found if any(row.trained_tokens for row in rows))

    @cached_property
    def passes(self) -> Passes:
        """How the run's micro-batches go through the model."""
        by_row = bool(self.seams.on_batch or self.seams.loss)
        return passes_of(
            self.model, self.edit, self.data_settings, pad_id=self.pad_id, by_row=by_row
        )[0]

    def micro_tokens(self) -> tuple[int | None, str]:
        """Tokens of a micro-batch where the run would find them by trial, and why; (None, "") where they are set."""
        if "auto" not in (self.settings.micro_rows, self.settings.micro_tokens):
            return None, ""
        longest = max(self.rows, key=lambda row: len(row.tokens))
        return micro.find_tokens([longest, *next(self.windows())], self._pass, self.passes)

    def _pass(self, rows: Sequence[Row]) -> None:
        self.passes.trial(rows, self.edit, dropping=self.settings.step_in_backward)

    @property
    def device(self) -> torch.device:
        """The model's."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return next(self.model.parameters()).dtype


@contextmanager
def untouched(edit: Edit) -> Generator[None, None, None]:
    """Whatever happens inside the block, the model is afterwards as it was before it."""
    model: nn.Module = edit.model
    kept = {name: p.detach().clone() for name, p in edit.trainable().items()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    gradients = {name: p.grad for name, p in edit.trainable().items()}
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in islice(model.parameters(), 1) if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in edit.trainable().items():
                    parameter.copy_(kept[name])
                    parameter.grad = gradients[name]
                for name, buffer in model.named_buffers():
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])
            for module, mode in modes:
                module.training = mode


@contextmanager
def without(edit: Edit) -> Generator[None, None, None]:
    """The model without its attached parts."""
    before = {name: delta.enabled for name, delta in edit.deltas.items()}
    try:
        for delta in edit.deltas.values():
            delta.enabled = False
        yield
    finally:
        for name, delta in edit.deltas.items():
            delta.enabled = before[name]
