"""Where a run goes on from, whether the rest will be what it would have been, and what differs if not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from afina.adapters import files
from afina.adapters.contents import is_adapter, is_exact
from afina.errors import RunError
from afina.train import checkpoint, manifest, metrics, record, result, state, ways
from afina.train.plan import Plan
from afina.train.report import Reporter
from afina.train.result import Run
from afina.train.state import Difference, State
from afina.tree import Edit
from afina.types import Row

LENGTH = ("train.steps", "train.epochs")
SCORING = (state.VAL_ROWS, "train.best")


@dataclass(frozen=True)
class Origin:
    """Where a run goes on from.

    Attributes:
        state: as it was there.
        folder: of the checkpoint; None is the run's beginning.
    """

    state: State
    folder: Path | None

    @property
    def threads(self) -> int | None:
        """Of torch, when the run was started."""
        return self.state.machine.threads if self.state.machine else None


def origin(out: Path, wanted: str | int | None) -> Origin | None:
    """Where the run in `out` goes on from; None when it was stopped before anything was decided.

    Raises:
        RunError: when the checkpoint is damaged or not there, or all of them are gone.
    """
    folder = checkpoint.latest(out, wanted)
    if folder is None:
        return _beginning(out) if (out / record.START).exists() else None
    saved = state.from_file(folder / checkpoint.STATE)
    # Changes that were allowed here, before a next checkpoint knew of them, need not be allowed again.
    begun = state.or_none(out / record.START)
    return Origin(begun if begun is not None and begun.step == saved.step else saved, folder)


def _beginning(out: Path) -> Origin:
    begun = state.from_file(out / record.START)
    _refuse_emptied(out, begun)
    return Origin(begun, None)


def _refuse_emptied(out: Path, begun: State) -> None:
    """Raises when the run went so far that it saved checkpoints: to begin again would throw its figures away."""
    lines = metrics.read_metrics(out)
    done = lines[-1]["step"] if lines else 0
    every = begun.settings.get("train.save_every")
    if (every is not None and done > every) or (out / result.FILE).exists():
        raise RunError(
            "the checkpoints of this run are gone, and nothing was changed",
            got=f"{out}: figures of {done} steps, and no checkpoint",
            cure=f"put the folder checkpoints back, or begin anew: {ways.OVERWRITE}",
        )


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Inside the block torch has so many CPU threads; None changes nothing."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(then: State, now: State, *, allow: bool) -> list[Difference]:
    """What makes the rest of a run another one.

    Raises:
        RunError: when something does and `allow` is false, or the weights are of other techniques.
    """
    found = state.differences(then, now)
    other = [difference for difference in found if difference.name == state.TECHNIQUES]
    if other:
        raise RunError(
            "this run cannot be resumed: what trains is not what trained",
            got=other[0],
            cure=f"resume with {other[0].then}, as it is without --technique (in Python with an edit of it), or "
            "start a new run",
        )
    if found and not allow:
        raise RunError(
            "this run cannot be resumed exactly: it was started otherwise",
            got="\n          ".join(map(str, found)),
            cure="resume with the data and settings of its config.yaml, or start a new run, or go on "
            f"with what differs: {ways.ALLOW_CHANGES}",
        )
    return found


def refuse_unfit(folder: Path | None, edit: Edit, changes: Sequence[Difference]) -> None:
    """Raises when the weights of a checkpoint have no place under the settings of now, whatever is allowed.

    Args:
        folder: of the checkpoint; None where there is none yet.
        edit: what trains now.
        changes: what differs.

    Raises:
        RunError: naming the settings that differ.
    """
    # Where the adapter has not all that trains, the checkpoint has it beside, and is compared when it is read.
    if folder is None or not is_adapter(edit) or not is_exact(edit):
        return
    then = {name: tuple(t.shape) for name, t in files.read_tensors(folder / "adapter").items()}
    now = {name: tuple(t.shape) for name, t in files.peft_tensors(edit).items()}
    if then == now:
        return
    settings = [one for one in changes if one.name.startswith("techniques.")] or changes
    name = next(n for n in sorted({*then, *now}) if then.get(n) != now.get(n))
    raise RunError(
        "this run cannot go on with other settings of this kind: its weights would have no place",
        got="\n          ".join(map(str, settings)),
        wanted=f"the weights that were saved, such as {name} {then.get(name, 'not there')}; now it is "
        f"{now.get(name, 'not there')}",
        cure="resume with these as they were, or start a new run with them",
    )


def tell(then: State, now: State, changes: Sequence[Difference], say: Reporter) -> None:
    """Says how the rest of a run differs from what it would have been."""
    for difference in changes:
        say.say(f"warning: resumed with a change, {difference}")
    for difference in state.harmless(then, now):
        say.say(f"resumed with {difference}; nothing that is learnt changes with it")
    for difference in state.roundings(then, now):
        say.say(f"warning: {difference}: the last bits of the weights may differ")
    if any(difference.name in LENGTH for difference in changes) and now.total_steps > then.step:
        say.say(
            f"the schedule of the learning rate is laid over {now.total_steps} steps now, and goes on "
            f"at step {then.step + 1} of it"
        )


def finished(out: Path, then: State, now: State, changes: Sequence[Difference]) -> Run | None:
    """The run's result, when nothing is left to do."""
    done = result.read(out)
    if done is None or done.steps != then.step or not done.weights.is_dir():
        return None
    nothing = now.total_steps <= then.step or _is_spent(then, now, changes) or not changes
    return done if nothing else None


def _is_spent(then: State, now: State, changes: Sequence[Difference]) -> bool:
    """Whether the scores had stopped improving, and what is asked for now does not wait longer."""
    patience = now.settings.get("train.early_stopping")
    return patience is not None and then.since_best >= patience and not _is_rescored(changes)


def _is_rescored(changes: Sequence[Difference]) -> bool:
    """Whether the scores so far are of something else than those to come."""
    names = {difference.name for difference in changes}
    return any(name in SCORING or name.startswith("eval.") for name in names)


def learnt(out: Path, plan: Plan, step: int) -> tuple[Sequence[Row], float] | None:
    """The rows of the newest step and the loss that they had then; None when it moved nothing, or had other rows."""
    line = next((x for x in metrics.read_metrics(out) if x["step"] == step), None)
    if not step or line is None or line.get("loss") is None:
        return None
    window = next(plan.windows(step - 1))
    return (window, line["loss"]) if [row.id for row in window] == line.get("rows") else None


def going_on(
    out: Path, then: State, now: State, changes: Sequence[Difference], say: Reporter
) -> State:
    """The state of the rest of a run: what was reached, under the settings of now."""
    merged = replace(then, total_steps=now.total_steps, machine=now.machine, settings=now.settings)
    if _is_rescored(changes):
        why = "the scores so far are of something else"
    elif then.best_step is None or not manifest.damage(checkpoint.folder_of(out, then.best_step)):
        return merged
    else:
        why = f"the best checkpoint, of step {then.best_step}, is not whole any more"
    if then.best_step is not None:
        say.say(f"warning: {why}, so the best weights are chosen among those from here on")
    return replace(merged, best_score=None, best_step=None, since_best=0)
