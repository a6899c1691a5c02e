"""One pass through blocks that run reversibly: what is kept, and how backward finds the states again.

h_j is run a second time when its gradient is asked for, as in recomputation (torch's checkpoint, whose input alone is
replaced by the state that came back): parameters, masks and what else h_j reads stay in the ordinary graph, so nothing
is hidden from autograd, and random numbers are drawn again from the same state.

    backward of step j:   side bits of j   ->   h_j runs again from z[j]   ->   z[j-1]   ->   step j - 1

Legend: as in `ops/reversible.py`, which has the mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import checkpoint as recomputation

from afina.errors import RunError
from afina.ops.reversible import Grid, Step, before, following, is_zero, marks, pack, unpack

Call = Callable[[Tensor], Any]
"""From a state in the model's type to what a block says, which is a state or begins with one."""


@dataclass
class Way:
    """What backward knows of one pass through the blocks. It holds nothing that has a gradient's history.

    Attributes:
        grid: of the streams.
        checks: whether each state that comes back is compared with what it was.
        checked: called when all of them were.
        states: of the two newest steps, by number; filled and emptied in backward.
        digits: packed side bits, by number; of those steps that backward has passed.
        marks: of the states, where they are compared.
        needed: numbers of the states that backward must have.
        calls: of the steps that backward has passed and that have not run again, by number.
    """

    grid: Grid
    checks: bool = False
    checked: Callable[[], None] = lambda: None
    states: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    digits: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    marks: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    needed: set[int] = field(default_factory=set[int])
    calls: dict[int, tuple[Step, Call]] = field(default_factory=dict[int, "tuple[Step, Call]"])

    def note(self, number: int, state: Tensor, name: str) -> None:
        """Keeps what a state is compared with later.

        Raises:
            RunError: its numbers are too large for the grid.
        """
        if not (self.checks or self.grid.dtype == torch.float32):
            return
        most = float(state.detach().abs().max())
        if self.grid.limit <= most < math.inf:
            raise RunError(
                f"reversible: the states behind {name} are too large for exact sums in "
                f"{str(self.grid.dtype).removeprefix('torch.')} on a grid of 2^-{self.grid.exponent}",
                got=f"{most:,.0f}",
                wanted=f"below {self.grid.limit:,.0f}",
                cure="set reversible.stream=fp64, or a smaller reversible.grid",
            )
        if not math.isfinite(most):
            self.checks = False  # there is nothing to come back to; the loss says what is wrong
        if self.checks:
            self.marks[number] = marks(state.detach(), self.grid)

    def state(self, step: Step) -> Tensor:
        """What a block is given when it runs again.

        Raises:
            RunError: backward comes here before it was in the next block.
        """
        j = step.number
        while self.states and j not in self.states:
            # A block that keeps nothing for its gradient, and so draws nothing, was not run again.
            later = min(self.states)
            if later not in self.calls:
                break
            passed, call = self.calls[later]
            self.back(passed, first_of(call(self.states[later].to(self.grid.blocks))))
        if j not in self.states:
            raise RunError(
                f"reversible: backward is at {step.name}, and its state is not there",
                cure="take gradients of the loss as a whole; a second backward pass needs retain_graph=True",
            )
        return self.states[j]

    def back(self, step: Step, y: Tensor) -> None:
        """From what a block says again to the state before the one that it was given.

        Raises:
            RunError: it is not what it was.
        """
        j = step.number
        self.calls.pop(j, None)
        if step.first or j not in self.needed:
            self.states.clear()
            if self.checks:
                self.checked()
            return
        cur, packed = self.states[j], self.digits.pop(j, None)
        digits = None if packed is None else unpack(packed, step.bits, cur.shape)
        found = before(self.states.pop(j + 1), cur, y, step, self.grid, digits)
        if self.checks:
            _compare(marks(found, self.grid), self.marks[j - 1], step, self.grid)
        self.states[j - 1] = found


def _compare(found: Tensor, kept: Tensor, step: Step, grid: Grid) -> None:
    wrong_BT = (found != kept).any(-1)
    if bool(wrong_BT.any()):
        most = (found[..., 0] - kept[..., 0]).abs().max().item() * 2.0**-grid.exponent
        raise RunError(
            f"reversible: what went into {step.name} does not come back",
            got=f"{int(wrong_BT.sum())} of {wrong_BT.numel()} tokens differ; the sum over a token's state by up to "
            f"{most:.3g}",
            wanted="the same, bit for bit",
            cure="something in the block is not the same when it runs again; leave reversible out, and take "
            "train.recompute=true, which keeps each block's input",
        )


class Enter(torch.autograd.Function):
    """The first state: what a model's blocks are given, rounded to the grid."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, way: Way) -> Tensor:
        """Q[hidden], in the streams' type."""
        ctx.grid = way.grid
        return way.grid.rounded(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """As if it were not rounded."""
        return gradients[0].to(ctx.grid.blocks), None


class Follow(torch.autograd.Function):
    """The next state; keeps the side bits."""

    @staticmethod
    def forward(
        ctx: Any, past: Tensor, cur: Tensor, y: Tensor, way: Way, step: Step, call: Call
    ) -> Tensor:
        """z[j+1]; see `following`."""
        state, digits = following(past, cur, y, step, way.grid)
        ctx.way, ctx.step, ctx.call, ctx.dtype = way, step, call, y.dtype
        if ctx.needs_input_grad[1]:
            way.needed.add(step.number)
            if digits is not None:
                ctx.save_for_backward(pack(digits, step.bits))
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See the head of this file; and what the block's second run will need."""
        step: Step = ctx.step
        ctx.way.calls[step.number] = step, ctx.call
        for packed in ctx.saved_tensors:
            ctx.way.digits[step.number] = packed
        past, cur, block = ctx.needs_input_grad[:3]
        (g,), own = gradients, step.own - step.gain
        return (
            g * step.past if past and not is_zero(step.past) else None,
            g * own if cur and not is_zero(own) else None,
            (g * step.gain).to(ctx.dtype) if block else None,
            None,
            None,
            None,
        )


class Leave(torch.autograd.Function):
    """What the blocks give to the model; keeps the two last states."""

    @staticmethod
    def forward(
        ctx: Any, past: Tensor, cur: Tensor, way: Way, number: int, shares: tuple[float, float]
    ) -> Tensor:
        """The states (j - 1 and j = `number`) times their shares, in the model's type."""
        ctx.way, ctx.number, ctx.shares = way, number, shares
        ctx.save_for_backward(past, cur)
        return joined(past, cur, shares).to(way.grid.blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Here backward through the blocks begins."""
        way: Way = ctx.way
        past, cur = ctx.saved_tensors
        way.states.clear()
        way.calls.clear()
        way.states.update({ctx.number - 1: past, ctx.number: cur})
        g = gradients[0].to(way.grid.dtype)
        return (*(g * share if share else None for share in ctx.shares), None, None, None)


def joined(past: Tensor, cur: Tensor, shares: tuple[float, float]) -> Tensor:
    """The two states times their shares."""
    return cur if shares == (0.0, 1.0) else shares[0] * past + shares[1] * cur


class Again:
    """A block's call that reads its state from the pass when it runs a second time."""

    def __init__(self, call: Call, given: Tensor, way: Way, step: Step) -> None:
        self._call, self._way, self._step = call, way, step
        self._given: Tensor | None = given
        self._needs = given.requires_grad

    def __call__(self, place: Tensor) -> Any:
        """What the block says.

        Args:
            place: an empty tensor, by which torch knows the device.
        """
        if self._given is not None:
            given, self._given = self._given, None
            return self._call(given)
        with torch.no_grad():
            state = self._way.state(self._step)
        given = state.to(self._way.grid.blocks).detach().requires_grad_(self._needs)
        said = self._call(given)
        with torch.no_grad():
            self._way.back(self._step, first_of(said).detach())
        return said


def other_shape(name: str, wanted: object, got: object) -> RunError:
    """The error where tokens come or go between blocks."""
    return RunError(
        f"reversible: at {name} there are other tokens than before, and sums need the same ones",
        got=got,
        wanted=wanted,
        cure="with token_pruning set its dropped to restore, where tokens pass blocks by; else leave reversible out",
    )


def first_of(said: Any) -> Tensor:
    """The states among what a block says."""
    return cast("tuple[Tensor, ...]", said)[0] if isinstance(said, tuple) else said


class Front:
    """The newest two states of a pass that is on its way through the blocks.

    Attributes:
        way: what backward will know.
        shares: of the two states in what the model is given.
        shown: that, as the next block must be given it.
    """

    def __init__(self, hidden: Tensor, way: Way, shares: tuple[float, float], name: str) -> None:
        self.way, self.shares = way, shares
        entered: Tensor = cast("Any", Enter).apply(hidden, way)
        self._past = self._cur = entered
        self.shown = hidden
        self._number = 1
        for number in (0, 1):
            way.note(number, entered, name)

    def through(self, call: Call, step_of: Callable[[int], Step]) -> Any:
        """One step; returns what the call says, its states among it.

        Args:
            call: from a state in the model's type to what a block says.
            step_of: number -> step.

        Raises:
            RunError: states are too large for the grid, or of another shape.
        """
        step = step_of(self._number)
        given = self._cur.to(self.way.grid.blocks)
        if torch.is_grad_enabled():
            again = Again(call, given, self.way, step)
            run: Any = cast("Any", recomputation).checkpoint
            said = run(again, given.new_empty(0), use_reentrant=False, early_stop=False)
        else:
            said = call(given)
        y = first_of(said)
        if y.shape != given.shape:
            raise other_shape(step.name, tuple(given.shape), tuple(y.shape))
        after: Tensor = cast("Any", Follow).apply(self._past, self._cur, y, self.way, step, call)
        self._past, self._cur, self._number = self._cur, after, self._number + 1
        self.way.note(self._number, after, step.name)
        return said

    def show(self) -> Tensor:
        """What a block between two others gives to the model."""
        self.shown = joined(self._past, self._cur, self.shares).to(self.way.grid.blocks)
        return self.shown

    def leave(self) -> Tensor:
        """What the last one gives."""
        node: Any = Leave
        return node.apply(self._past, self._cur, self.way, self._number, self.shares)
