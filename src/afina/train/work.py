"""What the training loop takes, and what it gives after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from afina.config import TrainSettings
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import Mesh
from afina.train.moving import Mover
from afina.train.nonfinite import Fault
from afina.train.passes import Passes
from afina.tree import Edit, Seams
from afina.types import Row


@dataclass(frozen=True)
class Work:
    """All that a step needs.

    Attributes:
        model: the changed model, on its device.
        edit: what was changed.
        optimiser: over the edit's trainable tensors.
        settings: of the run.
        cut: the rows of a step -> micro-batches of rows.
        passes: rows of a micro-batch -> batch -> losses.
        mesh: the processes.
        seams: what techniques, and whoever called, do in between.
        total_steps: of the whole run.
        warmup_steps: of the whole run.
        shown: tokens before each step, and after the last; None where the learning rate goes by steps.
        around: (rows of a micro-batch, step, its number) -> what its forward pass runs inside.
    """

    model: nn.Module
    edit: Edit
    optimiser: Optimiser
    settings: TrainSettings
    cut: Callable[[Sequence[Row]], list[list[Row]]]
    passes: Passes
    mesh: Mesh
    seams: Seams
    total_steps: int
    warmup_steps: int
    shown: Sequence[int] | None = None
    around: Callable[[Sequence[Row], int, int], AbstractContextManager[None]] = (
        lambda rows, step, number: nullcontext()
    )

    def mover(self) -> Mover | None:
        """What moves tensors inside the backward pass of one step; None where that is not asked for."""
        if not self.settings.step_in_backward:
            return None
        return Mover(self.optimiser, self.edit.trainable(), self.mesh)


@dataclass(frozen=True)
class Step:
    """What one optimiser step did.

    Attributes:
        step: steps done, counted from 1.
        loss: mean over the window's trained tokens, in nats.
        rows: ids of the window's rows.
        tokens: real tokens, padding not counted.
        trained_tokens: that were labels.
        gradient_norm: of the whole gradient, before clipping.
        lr: the run's rate at this step.
        seconds: that it took.
        peak_bytes: highest memory use so far, None where unknown.
        moved: whether the optimiser made a step.
        fault: why it made none, when loss or gradient were not finite.
    """

    step: int
    loss: float
    rows: tuple[int, ...]
    tokens: int
    trained_tokens: int
    gradient_norm: float
    lr: float
    seconds: float
    peak_bytes: int | None
    moved: bool = True
    fault: Fault | None = None

    def line(self) -> dict[str, Any]:
        """As a line of metrics.jsonl."""
        return {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "gradient_norm": self.gradient_norm,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "rows": list(self.rows),
            **({} if self.fault is None else {"skipped": self.fault.cause()}),
        }
