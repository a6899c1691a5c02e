"""What a run keeps while it goes: figures, scores, checkpoints, the best weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from afina.adapters.files import replace_folder
from afina.config import TrainSettings
from afina.errors import ConfigError
from afina.optim.optimisers import Optimiser
from afina.train import checkpoint
from afina.train.checkpoint import State
from afina.train.interrupt import between_steps
from afina.train.loop import Step
from afina.train.metrics import MetricsFile, plot_loss, read_metrics
from afina.train.report import Reporter
from afina.tree import Edit


@dataclass
class Keeper:
    """Follows a run step by step.

    Attributes:
        out: the run's folder.
        model: in training.
        edit: what was changed.
        optimiser: its state goes into checkpoints.
        settings: of the run.
        total_steps: of the run.
        score: validation scores of the model, None without validation rows.
        state: where the run stands.
        base: name of the base model.
        tokenizer: saved with the weights.
    """

    out: Path
    model: nn.Module
    edit: Edit
    optimiser: Optimiser
    settings: TrainSettings
    total_steps: int
    score: Callable[[nn.Module], Mapping[str, float]] | None
    state: State
    base: str
    tokenizer: Any

    def follow(self, steps: Iterator[Step], say: Reporter) -> None:
        """Runs the steps to their end, until the scores stop improving, or until somebody stops the run.

        Raises:
            KeyboardInterrupt: after Ctrl-C; the run is saved as it was after its last whole step.
            SystemExit: the same after SIGTERM.
        """
        metrics = MetricsFile(self.out, keep_below=self.state.step)
        board = _board(self.out) if self.settings.tensorboard else None
        with between_steps() as stopping:
            for step in steps:
                self._after(step, metrics, board, say)
                if self._spent():
                    say.say(
                        f"stopped at step {step.step}: no better score since {self.state.best_step}"
                    )
                    break
                if stopping.signal is not None and step.step < self.total_steps:
                    self._save()
                    say.say(
                        f"stopped after step {step.step} of {self.total_steps}, saved; "
                        f"go on with: afina train --resume -o {self.out}"
                    )
                    break
        if board is not None:
            board.close()
        if self.state.step < self.total_steps:
            stopping.end()

    def _after(self, step: Step, metrics: MetricsFile, board: Any, say: Reporter) -> None:
        """Scores, writes and saves what is due after a step."""
        self.state = replace(self.state, step=step.step)
        line = step.line()
        if self._due(step.step, self.settings.eval_every) and self.score is not None:
            scores = self.score(self.model)
            line.update({f"val_{name}": value for name, value in scores.items()})
            self._judge(scores)
            told = "  ".join(f"val {name} {value:.4f}" for name, value in scores.items())
            say.say(f"step {step.step}: {told}")
        metrics.add(line)
        say.step(step, self.total_steps)
        if board is not None:
            _to_board(board, line)
        if self._due(step.step, self.settings.save_every) or self.state.best_step == step.step:
            self._save()

    def _due(self, step: int, every: int | None) -> bool:
        return step == self.total_steps or (every is not None and step % every == 0)

    def _judge(self, scores: Mapping[str, float]) -> None:
        """Notes whether these scores are the best so far."""
        name = self.settings.best
        if name not in scores:
            raise ConfigError(
                f"train.best is {name}, which this validation does not measure",
                wanted=", ".join(scores),
            )
        score = scores[name] if name == "loss" else -scores[name]
        better = self.state.best_score is None or score < self.state.best_score
        # A score that is not a number is never better.
        if better and math.isfinite(score):
            self.state = replace(
                self.state, best_score=score, best_step=self.state.step, since_best=0
            )
        else:
            self.state = replace(self.state, since_best=self.state.since_best + 1)

    def _spent(self) -> bool:
        patience = self.settings.early_stopping
        return patience is not None and self.state.since_best >= patience

    def _save(self) -> None:
        checkpoint.save(
            self.out,
            self.edit,
            self.optimiser,
            self.state,
            base=self.base,
            tokenizer=self.tokenizer,
        )
        checkpoint.prune(self.out, self.settings.keep_last, self.state.best_step)

    def finish(self, say: Reporter) -> tuple[Path, int]:
        """Puts the kept weights in their place in the folder and draws the loss.

        Returns:
            The weights' folder and the step they are from: the best scored one, else the last.
        """
        if not checkpoint.folder_of(self.out, self.state.step).exists():
            self._save()
        step = self.state.best_step or self.state.step
        source = checkpoint.folder_of(self.out, step)
        name = "adapter" if self.edit.deltas else "model"
        temporary = self.out / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source / name, temporary)
        replace_folder(temporary, self.out / name)
        plot_loss(self.out)
        if step != self.state.step:
            say.say(f"kept the weights of step {step}, the best by validation {self.settings.best}")
        return self.out / name, step


def last_tenth_loss(out: Path) -> float:
    """Mean training loss over the last tenth of a run's steps, weighted by trained tokens."""
    lines = read_metrics(out)
    last = lines[-max(1, len(lines) // 10) :]
    return sum(x["loss"] * x["trained_tokens"] for x in last) / sum(
        x["trained_tokens"] for x in last
    )


def scores_of(out: Path, step: int) -> dict[str, float]:
    """The validation scores of a step, by name; empty when it was not scored."""
    lines = [line for line in read_metrics(out) if line["step"] == step]
    found = lines[-1] if lines else {}
    return {k.removeprefix("val_"): v for k, v in found.items() if k.startswith("val_")}


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "train.tensorboard needs the tensorboard package",
            cure="pip install 'afina[plot]', or leave train.tensorboard out",
        ) from None
    return SummaryWriter(str(out / "tensorboard"))


def _to_board(board: Any, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if isinstance(value, int | float) and name != "step":
            board.add_scalar(name, value, line["step"])
