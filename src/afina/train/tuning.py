"""What is decided for the machine before the first step: the micro-batches, and whether the blocks are compiled.

A run that goes on takes what was decided when it began: both show in the last bits of a sum.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from afina.config import TrainSettings
from afina.errors import RunError, lasting
from afina.models.blocks import Blocks
from afina.ops import native
from afina.parallel.runtime import Mesh, OneProcess
from afina.train import micro
from afina.train.passes import Passes
from afina.train.plan import Plan
from afina.train.report import Reporter
from afina.train.state import Machine, State
from afina.tree import Edit
from afina.types import Row

COST_S = 60.0
"""Seconds that compiling takes, about: SmolLM2's blocks took 70 of one slow core without a cache."""
GAIN = 0.25
"""Share of a pass that compiled blocks save, about: 0.29 there, in fp32. The run then measures its own."""

Cut = Callable[[Sequence[Row]], list[list[Row]]]


@dataclass(frozen=True)
class Tuning:
    """How a run finds out.

    Attributes:
        edit: of the model, in training mode, its blocks `blocks.running()`.
        plan: of the run.
        passes: rows -> losses.
        blocks: of the model.
        say: who is told.
        clock: seconds.
        mesh: the processes, which decide alike.
    """

    edit: Edit
    plan: Plan
    passes: Passes
    blocks: Blocks
    say: Reporter
    clock: Callable[[], float] = time.perf_counter
    mesh: Mesh = field(default_factory=OneProcess)

    @property
    def settings(self) -> TrainSettings:
        """Of the run."""
        return self.plan.settings

    def decide(self, state: State) -> tuple[State, Cut]:
        """Micro-batches and compiling: as set, as decided when the run began, or found out; says what, and why.

        Raises:
            RunError: blocks that are to be compiled cannot be, here.
        """
        searched = state.micro_tokens is None and micro.is_found(self.settings)
        state, cut = self._micro_batches(state)
        self._tell_of_sums(cut)
        if self.blocks.unfused is None and self.blocks.blocks and self.settings.compile is not True:
            self.say.say(
                f"each block is computed as one operation, by kernels in C++ ({native.unit()})"
            )
        return self._compiling(state, cut, warm=searched), cut

    def _tell_of_sums(self, cut: Cut) -> None:
        parts = len(cut(self.plan.usual()))
        if self.settings.step_in_backward and parts > 1:
            self.say.say(
                f"train.step_in_backward saves no memory here: a step has {parts} micro-batches, whose gradients are "
                "summed before anything moves; fewer rows a step, or larger micro-batches, would make it one"
            )

    def _micro_batches(self, state: State) -> tuple[State, Cut]:
        tokens = state.micro_tokens
        if not micro.is_found(self.settings):
            tokens = None
        elif tokens is None:
            tokens, why = micro.find(
                self.plan.rows, self.plan.usual(), self._pass, self.passes, self.mesh
            )
            tokens = round(self.mesh.least(tokens))
            tokens = micro.for_stages(tokens, self.plan.usual(), self.passes, self.mesh.plan)
            self.say.say(f"micro-batches of at most {tokens:,} tokens: {why}")
        return replace(state, micro_tokens=tokens), micro.cutter(self.settings, tokens, self.passes)

    def _compiling(self, state: State, cut: Cut, *, warm: bool) -> State:
        machine = cast("Machine", state.machine)
        # The same rows whenever the run begins or goes on, so that the graphs are the same.
        parts = cut(self.plan.usual())
        if machine.compiled is not None:
            if machine.compiled:
                self._compile(parts[0])
            return state
        mine = self._pays(parts, state.total_steps, warm=warm)
        compiled = bool(self.mesh.least(mine))
        if mine and not compiled:
            self.blocks.compile(False)
        return replace(state, machine=replace(machine, compiled=compiled))

    def _pays(self, parts: Sequence[Sequence[Row]], steps: int, *, warm: bool) -> bool:
        """Compiles when the run is long enough to get the time back, and keeps it when a pass is faster for it.

        Args:
            parts: the micro-batches of a usual step.
            steps: of the run.
            warm: passes ran just now, so that the first is not slower than the others.
        """
        if self.passes.device.type != "cpu" or not self.blocks.compilable:
            return False
        if self.blocks.unfused is None:
            return False
        # With zero=3 weights come and go within a block's call; where processes wait for each other, each would come to
        # another end of these trials.
        if self.mesh.plan.talks_in_passes or self.mesh.plan.splits_backward:
            return False
        if not warm:
            self._pass(parts[0])
        plain_s = self._timed(parts[0])
        tokens = sum(self.passes.tokens(part) for part in parts)
        run_s = plain_s * tokens / self.passes.tokens(parts[0]) * steps
        if run_s * GAIN < COST_S:
            if run_s > COST_S:
                self.say.say(
                    f"not compiled: a run of about {lasting(run_s)} is over before compiling pays "
                    "(train.compile=true does it all the same)"
                )
            return False
        try:
            self._compile(parts[0])
        except RunError as error:
            self.blocks.compile(False)
            self.say.say(f"not compiled: {error.got}; the run goes on without")
            return False
        share = self._timed(parts[0]) / plain_s
        kept = share < 1
        self.blocks.compile(kept)
        self.say.say(
            f"{'compiled' if kept else 'not compiled'}: a pass then takes {share:.0%} of its time, in a run of about "
            f"{lasting(run_s)}"
        )
        return kept

    def _compile(self, part: Sequence[Row]) -> None:
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        self.say.say(
            "compiling the blocks, which takes a minute or so, less when it was done before"
        )
        self.blocks.compile(True)
        try:
            with warnings.catch_warnings():
                # What torch's compiler says of its own insides is not for the user.
                warnings.simplefilter("ignore")
                self._pass(part)
        except (TorchDynamoException, InductorError) as error:
            raise RunError(
                "the blocks of this model cannot be compiled here",
                got=" ".join(str(error).split())[:300],
                cure="set train.compile=false, or install a C++ compiler (g++) if that is what is missing",
            ) from None

    def _pass(self, rows: Sequence[Row]) -> None:
        self.passes.trial(rows, self.edit, dropping=self.settings.step_in_backward)

    def _timed(self, rows: Sequence[Row]) -> float:
        began = self.clock()
        self._pass(rows)
        return self.clock() - began
