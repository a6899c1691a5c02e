"""What a run keeps while it goes: figures, scores, checkpoints, the best weights."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from afina.adapters.contents import is_adapter
from afina.config import TrainSettings
from afina.errors import RunError, counted
from afina.parallel.runtime import Mesh, OneProcess
from afina.parallel.together import patiently, together
from afina.train import checkpoint, durable, nonfinite, ways
from afina.train.behind import Saver
from afina.train.export import put_weights
from afina.train.fit import refuse_unmeasured
from afina.train.interrupt import Stopping, between_steps
from afina.train.memory import OutOfMemoryError
from afina.train.metrics import MetricsFile, NoFile, plot_loss
from afina.train.nonfinite import MOST_IN_A_ROW, TORN, Fault, NotFiniteError
from afina.train.report import Reporter
from afina.train.saving import Contents
from afina.train.state import Difference, State
from afina.train.work import Step

T = TypeVar("T")

LINE = ";\n          "
"""Between two ways out, each on a line of its own."""

WRONG = 1_000_000
"""What a process says instead of the number of a signal when something went wrong in it."""

LOWER = 10
"""A rate that ruined the weights is divided by this in what is advised."""


@dataclass
class Keeper:
    """Follows a run step by step.

    Attributes:
        out: the run's folder.
        model: in training.
        contents: what goes into checkpoints.
        settings: of the run.
        score: validation scores of the model, None without validation rows.
        state: where the run stands.
        say: where it is told.
        changes: what differs from the run's start, for the first line of its figures.
        mesh: the processes, of which one keeps the run; the others follow it without a file.
    """

    out: Path
    model: nn.Module
    contents: Contents
    settings: TrainSettings
    score: Callable[[nn.Module], Mapping[str, float]] | None
    state: State
    say: Reporter
    changes: Sequence[Difference] = ()
    mesh: Mesh = field(default_factory=OneProcess)

    def __post_init__(self) -> None:
        newest = self.state.step or None
        self._saver = Saver(self.out, self.contents, self.settings.keep_last, newest)
        self._bad_in_a_row = 0
        self._scores: Mapping[str, float] = {}
        self._wrong: Exception | None = None

    def follow(self, steps: Iterator[Step]) -> None:
        """Runs the steps to their end, until the scores stop improving, or until somebody stops the run.

        Raises:
            KeyboardInterrupt: after Ctrl-C; the run is saved as it was after its last whole step.
            SystemExit: the same after SIGTERM.
            RunError: for a loss or gradient that is not finite; the run is saved as it was before that step.
        """
        if self._spent():
            return
        figures = MetricsFile if self.mesh.writes else NoFile
        metrics = self._made(lambda: figures(self.out, keep_below=self.state.step))
        if self.state.unscored:
            self._score(metrics.take(self.state.step), metrics)
            self._saver.saved = None  # what was saved knows nothing of these scores
            self._save()
            if self._spent():
                return
        if metrics.missing:
            missing = f"{metrics.missing} of the first {counted(self.state.step, 'step')}"
            self.say.say(f"warning: metrics.jsonl has no figures for {missing}")
        board = None
        if self.settings.tensorboard:
            writes = self.mesh.writes
            board = self._made(lambda: _board(self.out, self.state.step) if writes else None)
        with between_steps(self._tell) as stopping:
            try:
                for step in steps:
                    self._after(step, metrics, board)
                    if self._spent():
                        best = self.state.best_step
                        self.say.say(f"stopped at step {step.step}: no better score since {best}")
                        break
                    if self._asked(stopping) and step.step < self.state.total_steps:
                        self._stop(step.step)
                        break
            except NotFiniteError as error:
                kept, then = self._keep(error.fault), self._settled()
                if error.fault.torn:
                    then += self._before_tear()
                else:
                    then += self._before_ruin() if error.fault.ruined else self._saved_before()
                # A step that moves tensors in backward cannot be left out, so that is not advised.
                on_nan = "skip" if self.settings.step_in_backward else self.settings.on_nan
                raise error.fault.error(kept, then, on_nan) from None
            except OutOfMemoryError as error:
                # Of several processes one alone ran out: the others save nothing with it.
                alone = self.mesh.plan.processes == 1
                then = (self._settled() if alone else "") + (f"{LINE}{TORN}" if error.torn else "")
                then += self._saved_before() if alone and not error.torn else self._before_tear()
                raise OutOfMemoryError(error.step, error.rows, then, torn=error.torn) from None
            except Exception:
                if self.mesh.plan.processes == 1:
                    self._settled()
                raise
            finally:
                if board is not None:
                    board.close()
        if self.state.step < self.state.total_steps:
            stopping.end()

    def _made(self, make: Callable[[], T]) -> T:
        """What each process makes for itself; all end where one cannot."""
        found: list[T] = []
        together(self.mesh, lambda: found.append(make()))
        return found[0]

    def _alone(self, do: Callable[[], object]) -> None:
        """Does what one process does with files; of several, all meet before what goes wrong is raised."""
        if self.mesh.plan.processes == 1:
            do()
            return
        try:
            if self._wrong is None:
                do()
        except Exception as error:
            self._wrong = error

    def _meet(self) -> None:
        """Raises what went wrong in one process, in all of them."""

        def tell() -> None:
            if self._wrong is not None:
                raise self._wrong

        together(self.mesh, tell)

    def _asked(self, stopping: Stopping) -> bool:
        """Whether somebody asked any of the processes to stop; then all of them were asked."""
        mine = WRONG if self._wrong is not None else stopping.signal or 0
        number = -round(self.mesh.least(-mine))
        if number == WRONG:
            self._meet()
        self._saver.look()
        if number and stopping.signal is None:
            stopping.signal = number
        return number != 0

    def _tell(self, asked: int, number: int) -> None:
        """What the user reads when a signal arrives, before the step has ended."""
        if asked == 1:
            again = "press Ctrl-C again" if number == signal.SIGINT else "send the signal again"
            self.say.say(
                f"finishing step {self.state.step + 1}, then saving; {again} to stop at once"
            )
        else:
            saved = self._saver.saved
            lost = f"the steps after {saved} are not saved" if saved else "no step is saved"
            self.say.say(f"stopping at once; {lost}")

    def _stop(self, step: int) -> None:
        self._save(beside=False)
        self.say.say(
            f"stopped after step {step} of {self.state.total_steps}, saved; "
            f"go on with: {ways.resume(self.out)}"
        )

    def _saved_before(self) -> str:
        """Saves the run as it was before a step that could not be made; says how it goes on."""
        if not self.state.step:
            return f"{LINE}then begin anew: {ways.OVERWRITE}"
        try:
            self._save(beside=False)
        except RunError as error:
            return f"{LINE}{error}"
        way = ways.resume(self.out, allow_changes=True, flags="--set …")
        steps = counted(self.state.step, "step")
        return f"{LINE}{steps} before it saved, go on with what is changed: {way}"

    def _before_tear(self) -> str:
        """Says where a run goes on whose weights are half moved, which are never saved."""
        if self._saver.saved is None:
            return f"{LINE}no step is saved: begin anew: {ways.OVERWRITE}"
        way = ways.resume(self.out, allow_changes=True, flags="--set …")
        return f"{LINE}go on from the checkpoint of step {self._saver.saved}, with what is changed: {way}"

    def _before_ruin(self) -> str:
        """Says where a run goes on whose newest weights are of no use: they are not saved, or passed over."""
        lower = f"--lr {self.settings.lr / LOWER:g}"
        sound = [f for f in checkpoint.found(self.out) if checkpoint.step_of(f) < self.state.step]
        if not sound:
            return f"{LINE}nothing earlier is saved: begin anew with {lower} and {ways.OVERWRITE}"
        way = ways.resume(self.out, sound[-1].name, allow_changes=True, flags=lower)
        return f"{LINE}go on from the weights before it, more slowly: {way}"

    def _keep(self, fault: Fault) -> Path:
        def write() -> Path:
            with durable.writing("the batch that is not finite", self.out):
                return nonfinite.write(fault, self.out, self.contents.tokenizer)

        return self.mesh.told(write)

    def _after(self, step: Step, metrics: MetricsFile, board: Any) -> None:
        """Scores, writes and saves what is due after a step."""
        self._count(step)
        self._scores = {}
        line = step.line()
        if self.changes:
            line["changed"] = {d.name: [d.then, d.now] for d in self.changes}
            self.changes = ()
        if self._due(step.step, self.settings.eval_every):
            self._score(line, metrics)
        else:
            self._alone(lambda: metrics.add(line))
        self.say.step(step, self.state.total_steps)
        if board is not None:
            self._alone(lambda: _to_board(board, line))
        if self._due(step.step, self.settings.save_every) or self.state.best_step == step.step:
            self._alone(metrics.sync)
            self._save()

    def _score(self, line: dict[str, Any], metrics: MetricsFile) -> None:
        """Writes the figures of the newest step with the scores of its weights.

        Whatever an evaluation raises passes; the run is saved before, and is evaluated here when it goes on.
        """
        try:
            score = self.score
            if score is not None:
                self._scores = together(self.mesh, lambda: score(self.model))[0]
            if self._scores:
                self._judge(self._scores)
        except Exception:
            self._alone(lambda: metrics.add(line))
            self._alone(metrics.sync)
            self.state, self._scores = replace(self.state, unscored=True), {}
            self._save(beside=False)
            self.say.say(
                f"the evaluation after step {self.state.step} failed, and the run is saved as it was before it; "
                f"go on with: {ways.resume(self.out)}"
            )
            raise
        self.state = replace(self.state, unscored=False)
        line.update({f"val_{name}": value for name, value in self._scores.items()})
        self._alone(lambda: metrics.add(line))
        if self._scores:
            told = "  ".join(f"val {name} {value:.4f}" for name, value in self._scores.items())
            self.say.say(f"step {self.state.step}: {told}")

    def _count(self, step: Step) -> None:
        """Notes a step's place in the data, and whether it was skipped.

        Raises:
            RunError: after too many skipped steps in a row.
        """
        self.state = replace(
            self.state,
            step=step.step,
            rows_seen=self.state.rows_seen + len(step.rows),
            tokens_seen=self.state.tokens_seen + step.tokens,
            skipped=self.state.skipped + (not step.moved),
        )
        if step.fault is None:
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        kept = self._keep(step.fault)
        if self._bad_in_a_row == MOST_IN_A_ROW:
            many = f"{MOST_IN_A_ROW} steps in a row were not finite, so none was skipped any more"
            raise step.fault.error(kept, f"{LINE}{many}", self.settings.on_nan)
        self.say.say(
            f"warning: step {step.step} skipped, {step.fault.cause()} is not finite; "
            f"{self.state.skipped} skipped so far; its batch: {kept}"
        )

    def _due(self, step: int, every: int | None) -> bool:
        return step == self.state.total_steps or (every is not None and step % every == 0)

    def _judge(self, scores: Mapping[str, float]) -> None:
        """Notes whether these scores are the best so far."""
        name = self.settings.best
        refuse_unmeasured(name, scores)
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

    def _save(self, *, beside: bool | None = None) -> None:
        """Writes the checkpoint of this step, unless it is there.

        Args:
            beside: while training goes on; None as the settings say.
        """
        self._meet()
        beside = self.settings.save_async if beside is None else beside
        if self._saver.newest != self.state.step:
            self._saver.save(self.state, self._scores, beside=beside)
        if not beside:
            self._saver.wait()

    def _settled(self) -> str:
        """Waits for a checkpoint under way; says what went wrong with it."""
        try:
            self._saver.wait()
        except RunError as error:
            return f"{LINE}{error}"
        return ""

    def finish(self) -> tuple[Path, int]:
        """Puts the kept weights in their place in the folder and draws the loss.

        Returns:
            The weights' folder and the step they are from: the best scored one, else the last.

        Raises:
            RunError: when no step moved the weights; they are not put in their place.
        """
        self._save(beside=False)
        self._refuse_unmoved()
        step = self.state.best_step or self.state.step
        name = "adapter" if is_adapter(self.contents.whole) else "model"
        weights = patiently(self.mesh, lambda: self._publish(step, name))
        if step != self.state.step:
            best = self.settings.best
            self.say.say(f"kept the weights of step {step}, the best by validation {best}")
        return weights, step

    def _publish(self, step: int, name: str) -> Path:
        weights = put_weights(self.out, step, name, self.contents)
        with durable.writing("loss.png", self.out):
            plot_loss(self.out)
        return weights

    def _refuse_unmoved(self) -> None:
        if self.state.skipped < self.state.step:
            return
        batches = self.out / "nan"
        raise RunError(
            "nothing was learnt: no step of this run moved the weights",
            got=f"{self.state.skipped} of {counted(self.state.step, 'step')} skipped",
            wanted="a step with a finite loss and gradient, and a row that trains",
            cure=f"look at the batches in {batches}, lower train.lr, or {ways.loaded_as('fp32')}; then begin anew: "
            f"{ways.OVERWRITE}"
            if batches.is_dir()
            else "train more steps: the rows of these have no token to learn",
        )


def _board(out: Path, done: int) -> Any:
    """A writer of TensorBoard events that take the place of those of steps after `done`."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tensorboard"), purge_step=done + 1 if done else None)


def _to_board(board: Any, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if isinstance(value, int | float) and name != "step":
            board.add_scalar(name, value, line["step"])
