"""One run from its data to its finished folder, in the order in which things happen."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afina.adapters.fingerprint import base_fingerprint
from afina.config import Resolved, TrainSettings
from afina.data.idle import refuse_idle_data
from afina.data.report import fingerprint
from afina.data.settings import DataSettings
from afina.errors import counted
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.offload import offloaded, refuse_idle_offload
from afina.ops import attention, native
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import OneProcess
from afina.parallel.together import patiently, together
from afina.train import (
    checkpoint,
    durable,
    folder,
    plan,
    preflight,
    record,
    result,
    resume,
    space,
    validate,
)
from afina.train.base_losses import BaseLosses
from afina.train.classes import PADDED, options_for
from afina.train.entering import Entering
from afina.train.filling import Filling
from afina.train.fit import (
    refuse_idle_settings,
    refuse_in_stages,
    refuse_rows,
    refuse_several,
)
from afina.train.keeper import Keeper
from afina.train.loop import loop
from afina.train.lowest import place_of, refuse_too_little_room
from afina.train.metrics import last_tenth_loss, read_metrics, scores_of
from afina.train.options import RunOptions
from afina.train.passes import Passes, passes_of, unshared
from afina.train.plan import Plan
from afina.train.record import Given
from afina.train.report import Reporter, Silent, reporter
from afina.train.restoring import restore
from afina.train.result import Run
from afina.train.resume import Origin
from afina.train.rows import are_rows, read_rows
from afina.train.saving import Contents
from afina.train.state import (
    BASE,
    PROCESSES,
    START,
    TRAIN_ROWS,
    VAL_ROWS,
    Difference,
    Machine,
    State,
    harmless,
    of_digests,
    on_the_card,
    recorded,
    rows_in_words,
    spread,
    starting_weights,
)
from afina.train.told import of_rows
from afina.train.tuning import Tuning
from afina.train.work import Work
from afina.tree import Edit
from afina.tree.twin import twin_of
from afina.types import Row


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
        mesh = self.options.mesh
        # One process speaks for all, and one has the folder.
        say = (self.options.reporter or reporter()) if mesh.writes else Silent()
        if mesh.writes:
            folder.refuse_busy(self.out)
        given = self.options.data_settings.packing
        self.options = options_for(self.model, self.options)
        if given and not self.options.data_settings.packing:
            say.say(PADDED)
        rows, val_rows, reports = read_rows(
            self.model,
            self.tokenizer,
            data,
            val,
            self.options.data_settings,
            keep=self.edit.columns(),
        )
        for line in (line for report in reports for line in report.lines()):
            say.say(line)
        if val is None and val_rows:
            held = counted(len(val_rows), "row")
            say.say(f"held out for validation, by content: {held}; {len(rows)} to train on")
        refuse_rows(self.model, rows, val_rows)
        refuse_idle_settings(self.settings, bool(val_rows), self.options.scores(val_rows))
        sources, formats = [data] if val is None else [data, val], [one.format for one in reports]
        refuse_idle_data(sources, self.options.data_settings, formats)
        self._look_at(rows, val_rows, say, given=are_rows(data))
        say.say(self.edit.summary())
        self.total_steps = plan.total_steps(self.settings, rows)
        if mesh.writes:
            self._refuse_too_little_room(bool(val_rows))
        resolved = self.options.config or self._as_config(data, val)
        self.seams = self.edit.seams(self.total_steps).and_then(self.options.seams)
        attention.refuse_missing(self.settings.attention, self._device())
        self.plan = self._plan(rows)
        self.place = place_of(self.edit, self.plan, self.seams)
        if self.place is not None:
            refuse_too_little_room(self.place, self.out)
        refuse_several(mesh.plan, self.settings, [one.key for one in self.edit.techniques])
        scored = self.options.evaluate is not None and bool(val_rows)
        refuse_in_stages(mesh.plan, self.seams, scores=scored)
        # Rows are read by now: processes that wait for each other do not wait for that.
        mesh.begin()
        self.values = self._hold()
        # What the settings cannot make is refused before a run that is there is removed.
        self.optimiser = self._optimiser()
        spread = self.optimiser.spread(self.settings.lr)
        if spread is not None:
            say.say(spread)
        self.blocks = Blocks(
            self.model, self.settings.recompute, must_compile=self.settings.compile is True
        )
        if self.settings.offload_activations:
            refuse_idle_offload(self._device())
        with self._claimed():
            try:
                with durable.writing("the run's files", self.out, alone=False):
                    return self._begin(
                        Given(rows, val_rows, reports, resolved, fingerprint(rows)), say
                    )
            finally:
                say.close()

    def _hold(self) -> dict[str, str]:
        """Each process takes its part of the model; what tells base and starting weights from others, of all of it."""
        mesh, edit, unread = self.options.mesh, self.edit, self.options.unread
        # From here on no process may have what trains whole.
        self.twin = twin_of(edit) if mesh.plan.shares_weights or unread else None
        beside = self.settings.save_async and self.twin is None
        self.copy = twin_of(edit, frozen=True) if beside else None
        if unread is None or self.twin is None:
            found = {BASE: base_fingerprint(self.model, edit), START: starting_weights(edit)}
            mesh.hold(self.model, edit.trainable())
            edit.renew()
            return found
        read = unread.read
        base = mesh.told(lambda: base_fingerprint(self.model, edit, read=read))
        filling = Filling(edit, self.twin, unread, self.settings.seed)
        mesh.hold(self.model, edit.trainable(), filling.fill)
        edit.renew()
        together(mesh, lambda: filling.digest_in_place(mesh.rank, mesh.plan.processes))
        digests = {n: d for told in mesh.gathered(filling.digests) for n, d in told.items()}
        return {BASE: base, START: of_digests(digests)}

    @contextmanager
    def _claimed(self) -> Generator[None, None, None]:
        """The run's folder, for the process that writes it."""
        options = self.options
        with ExitStack() as held:

            def claim() -> None:
                held.enter_context(
                    folder.claimed(self.out, resume=options.goes_on, overwrite=options.overwrite)
                )

            options.mesh.told(claim)
            yield

    def _optimiser(self) -> Optimiser:
        """Of what this process moves."""
        own = self.options.mesh.own(self.edit.trainable())
        return plan.optimiser_of(self.edit, self.settings, self.seams, own)

    def _look_at(self, rows: list[Row], val_rows: list[Row], say: Reporter, *, given: bool) -> None:
        """The cheap points of `afina check`: what would spoil the run is said, or stops it."""
        subject = preflight.subject_of(
            self.model,
            self.tokenizer,
            (rows, val_rows),
            self.settings,
            self.options.data_settings,
            given=given,
        )
        # Of rows that were read, the report has told the repetitions.
        told = () if given else ("duplicates",)
        preflight.say_and_refuse(preflight.cheap(subject), say.say, told)

    def _begin(self, given: Given, say: Reporter) -> Run:
        """From the folder to the first step: at the run's beginning, or where it goes on."""
        options = self.options
        mesh = options.mesh
        start = None
        if options.goes_on:
            start = patiently(mesh, lambda: resume.origin(self.out, options.resume_from))
        with resume.threads(self._threads(start)):
            now = self._state(given, start)
            if start is None:
                if options.goes_on:
                    say.say("the run was stopped before its first step, and begins now")
                mesh.told(lambda: record.write(self.out, given, self._machine()))
                return self._train(given, now, (), say)
            then = start.state
            changes = mesh.told(lambda: resume.compare(then, now, allow=options.allow_changes))
            done = mesh.told(lambda: resume.finished(self.out, then, now, changes))
            if done is not None:
                say.say(result.told(done, then.total_steps))
                return done
            whole = self.twin or self.edit
            mesh.told(lambda: resume.refuse_unfit(start.folder, whole, changes))
            resume.tell(then, now, changes, say)
            state = self._restore(start, now, changes, say)
            told = [*changes, *harmless(then, now), *spread(then, now)]
            if told:
                mesh.told(lambda: record.write_changes(self.out, given.resolved, state.step, told))
            return self._train(given, state, changes, say)

    def _threads(self, start: Origin | None) -> int | None:
        """Of torch: as set, else as then, which keeps the last bits; None where other processes share the cores."""
        if self.settings.threads or start is None:
            return self.settings.threads
        then = start.state.settings.get(PROCESSES, str(OneProcess.plan))
        return start.threads if then == str(self.options.mesh.plan) else None

    def _restore(
        self, start: Origin, now: State, changes: Sequence[Difference], say: Reporter
    ) -> State:
        """Gives model and optimiser the values of a checkpoint; returns the state of the rest of the run."""
        mesh, folder = self.options.mesh, start.folder
        state = patiently(mesh, lambda: resume.going_on(self.out, start.state, now, changes, say))
        if folder is None:
            say.say("the run was stopped before its first checkpoint, and begins again")
            return state
        renamed = any(difference.name == "train.optimizer" for difference in changes)
        if renamed:
            say.say(
                "warning: another optimiser cannot take the state of the old one: it starts anew"
            )
        optimiser = None if renamed else self.optimiser
        together(mesh, lambda: restore(folder, self.edit, optimiser, mesh, self.twin))
        if renamed:
            # Its fp32 masters of half-precision weights are of the weights that were just restored.
            self.optimiser = self._optimiser()
        mesh.told(lambda: self._goes_on_from(folder))
        if state.step < state.total_steps:
            seen = f"{counted(state.rows_seen, 'row')} seen"
            say.say(f"going on after step {state.step} of {state.total_steps}, {seen}")
        else:
            say.say(
                f"{counted(state.step, 'step')} of {state.total_steps} done: the run is brought to its end"
            )
        return state

    def _goes_on_from(self, folder: Path) -> None:
        checkpoint.point(self.out, folder)
        (self.out / result.FILE).unlink(missing_ok=True)

    def _state(self, given: Given, start: Origin | None) -> State:
        """Of step 0, with all that must be equal for a resumed run to be the same run."""
        more: dict[str, Any] = {
            "data.packing": self.options.data_settings.packing,
            "data.share_prefixes": self._shares(),
            TRAIN_ROWS: rows_in_words(given.rows, given.fingerprint),
            VAL_ROWS: rows_in_words(given.val_rows, fingerprint(given.val_rows)),
            PROCESSES: str(self.options.mesh.plan),
            **self.values,
        }
        if self.plan.chooser is not None:
            more |= self.plan.chooser.recorded()
        if self.options.evaluate is not None:
            found = given.resolved.config.eval.model_dump(mode="json")
            more |= {f"eval.{name}": value for name, value in found.items()}
        return State(
            step=0,
            total_steps=self.total_steps,
            machine=Machine.here(
                self.model, compiled=self._compiled(start), kernels=self.settings.kernels
            ),
            settings=recorded(self.settings, self.edit, more),
        )

    def _compiled(self, start: Origin | None) -> bool | None:
        """Whether the blocks run compiled: as set, as decided when the run began; None where it is to be found out."""
        if self.settings.compile != "auto":
            return self.settings.compile
        return start.state.machine.compiled if start and start.state.machine else None

    def _refuse_too_little_room(self, validates: bool) -> None:
        one = space.checkpoint_bytes(self.edit, self.settings.optimizer, self.tokenizer)
        most = space.checkpoints_at_once(self.settings, self.total_steps, validates)
        needed = most * one + space.weights_bytes(self.edit, self.tokenizer)
        cure = space.way_out(self.settings, self.total_steps, validates)
        space.refuse_too_little(self.out, needed, one, cure)

    def _train(
        self, given: Given, state: State, changes: Sequence[Difference], say: Reporter
    ) -> Run:
        """From `state` to the finished folder."""
        rows, val_rows = given.rows, given.val_rows
        card = on_the_card(state, given.in_words(), given.resolved.config.revision)
        contents = Contents(
            self.edit,
            self.optimiser,
            self._base(),
            self.tokenizer,
            card,
            self.options.mesh,
            self.twin,
            self.copy,
        )
        packed = self.options.data_settings.packing
        own = getattr(getattr(self.model, "config", None), "_attn_implementation", "")
        training = self.model.training
        way = attention.computed_by(self.settings.attention, self._device())
        offload = offloaded(self.model, self._device(), wanted=self.settings.offload_activations)
        plain = native.off(wanted=not self.settings.kernels)
        with plain, packing(self.model, packed), way, self.blocks.running(), offload:
            self.model.train()
            try:
                passes, why = self._passes()
                self.plan = self._plan(
                    rows,
                    BaseLosses(
                        self.out,
                        self.edit,
                        passes,
                        rows,
                        state.step,
                        say,
                        self.values[BASE],
                        self.options.mesh,
                    ),
                )
                whole = self.options.mesh.plan.pipeline == 1
                for line in of_rows(self.plan, passes, why, whole=whole):
                    say.say(line)
                tuning = Tuning(
                    self.edit, self.plan, passes, self.blocks, say, mesh=self.options.mesh
                )
                state, cut = tuning.decide(state)
                entering = self._entering(passes, cut, state.step, say)
                if not state.step:
                    self._tell_of_start(passes, cut, say)
                if changes or not state.step:
                    begun = state
                    self.options.mesh.told(lambda: record.write_start(self.out, begun))
                work = Work(
                    self.model,
                    self.edit,
                    self.optimiser,
                    self.settings,
                    cut,
                    passes,
                    self.options.mesh,
                    self.seams,
                    self.total_steps,
                    plan.warmup_steps(self.settings, self.total_steps),
                    self.plan.shown(),
                    **({} if entering is None else {"around": entering.around}),
                )
                score = validate.scorer(
                    val_rows,
                    cut,
                    passes,
                    self.options.evaluate,
                    own if packed else None,
                    self.options.mesh,
                )
                keeper = Keeper(
                    self.out,
                    self.model,
                    contents,
                    self.settings,
                    score,
                    state,
                    say,
                    changes,
                    mesh=self.options.mesh,
                )
                windows = self.plan.windows(state.step)
                done = state.step
                learnt = self.options.mesh.told(lambda: resume.learnt(self.out, self.plan, done))
                keeper.follow(loop(work, windows, state.step, state.skipped, learnt))
            finally:
                self.model.train(training)
        weights, best = keeper.finish()
        if self.plan.chooser is not None:
            self.options.mesh.told(self._leave)
        with self.options.mesh.opened():
            told = self.edit.outcome()
        for line in told:
            say.say(line)
        if entering is not None:
            entering.store.remove()
        return self.options.mesh.told(lambda: self._result(keeper.state, weights, best))

    def _leave(self) -> None:
        """What was shown when, in words and as a picture."""
        assert self.plan.chooser is not None
        with durable.writing("what was shown when", self.out):
            self.plan.chooser.leave(self.out, read_metrics(self.out))

    def _result(self, state: State, weights: Path, best: int) -> Run:
        """What the run came to, in its folder too."""
        loss, scores = last_tenth_loss(self.out), scores_of(self.out, best)
        run = Run(self.out, weights, state.step, loss, scores, best, state.skipped)
        result.write(run)
        return run

    def _tell_of_start(
        self, passes: Passes, cut: Callable[[Sequence[Row]], list[list[Row]]], say: Reporter
    ) -> None:
        """What the techniques make of the model before anything is learnt."""

        def loss() -> float:
            mesh = self.options.mesh
            rows = mesh.share(list(next(self.plan.windows())))
            return validate.mean_loss(self.model, cut(rows), passes, mesh)

        with self.options.mesh.opened():
            told = self.edit.opening(loss)
        for line in told:
            say.say(line)

    def _entering(
        self,
        passes: Passes,
        cut: Callable[[Sequence[Row]], list[list[Row]]],
        step: int,
        say: Reporter,
    ) -> Entering | None:
        """The way into the model at its lowest trained block; None where nothing of rows is kept."""
        if self.place is None:
            return None
        parts = cut(self.plan.usual())
        base = base_fingerprint(self.model, self.edit)
        entering = Entering.begin(self.place, passes, base, (self.out, step), parts)
        say.say(f"{self.place} ({self.settings.cache_inputs_gib} GiB are granted)")
        return entering

    def _by_row(self) -> bool:
        """Whether something of the run changes batches, or weighs losses, row by row."""
        return bool(self.seams.on_batch or self.seams.loss)

    def _shares(self) -> bool:
        """Whether rows that begin alike share their beginning in this run."""
        data = self.options.data_settings
        apart = unshared(self.model, self.edit, by_row=self._by_row())
        return data.packing and data.share_prefixes and apart is None

    def _plan(
        self, rows: Sequence[Row], losses: Callable[[], Sequence[float]] | None = None
    ) -> Plan:
        """Which rows each step gets; without losses only whether it can be said."""
        return plan.plan_of(self.settings, rows, self.total_steps, self.seams, losses)

    def _passes(self) -> tuple[Passes, str | None]:
        """How micro-batches go through the model, and why rows that begin alike are computed apart."""
        return passes_of(
            self.model,
            self.edit,
            self.options.data_settings,
            pad_id=getattr(self.tokenizer, "pad_token_id", None) or 0,
            by_row=self._by_row(),
            mesh=self.options.mesh,
        )

    def _base(self) -> str:
        config = getattr(self.model, "config", None)
        return self.options.base or str(getattr(config, "_name_or_path", "") or "unknown")

    def _device(self) -> torch.device:
        return self.options.mesh.computes or next(self.model.parameters()).device

    def _machine(self) -> dict[str, str]:
        return {"device": str(self._device()), "dtype": str(next(self.model.parameters()).dtype)}

    def _as_config(self, data: Any, val: Any) -> Resolved[DataSettings]:
        return record.as_config(
            self._base(),
            record.name_of(data),
            None if val is None else record.name_of(val),
            self.options.data_settings,
            self.edit,
            self.settings,
        )
