"""Streams of states from which the earlier ones are computed back, so that backward need not remember them.

    z[j+1] = a (z[j-1] - s[j] / 2^l) + Q[b z[j] + c h_j(z[j])],    s[j] = (2^l z[j-1]) mod 2^m
    z[j-1] = (z[j+1] - Q[b z[j] + c h_j(z[j])]) / a + s[j] / 2^l

| form | a | b | c | m |
|---|---|---|---|---|
| BDIA | ±2^-m | 1 - a | 1 + a | side bits a number |
| additive coupling | 1 | 0 | 1 | 0 |
| a first step | 0 | 1 | 1 | 0, and not computed back |

Every number is a multiple of 2^-l and below 2^(p - l), where p is the precision of the streams' type, so that sum and
difference are exact whatever h_j computes in; a is a power of two, and what it divides by was made divisible: the side
bits s are what that cost. So the earlier state comes back bit for bit, if h_j says twice the same. In gradients
rounding and side bits count as if they were not there:

    dz[j-1] += a g,    dz[j] += b g + c h_j'(z[j])ᵀ g,    g = dz[j+1]

Only the two last states and the side bits are kept. h_j is run a second time when its gradient is asked for, as in
recomputation (torch's checkpoint, whose input alone is replaced): parameters, masks and what else h_j reads stay in
the ordinary graph, so nothing is hidden from autograd, and random numbers are drawn again from the same state.

Legend: z states (B, T, D), h_j what block j adds to a state, Q rounding to a multiple of 2^-l.

Source: Gomez et al. 2017, "The Reversible Residual Network", arXiv 1707.04585, section 3.1 (a = 1); BDIA: "On
Exact Bit-level Reversible Transformers Without Changing Architectures", ICML 2025, PMLR 267 (a = ±1/2, m = 1). With
m > 1 there is no paper known to us.
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

PRECISION = {torch.float64: 53, torch.float32: 24}
"""Binary digits of the types that streams may have."""

Call = Callable[[Tensor], Any]
"""From a state in the model's type to what a block says, which is a state or begins with one."""

WORD = 8
"""Side bits of so many numbers are packed together."""


@dataclass(frozen=True)
class Grid:
    """What the numbers of a stream are multiples of.

    Attributes:
        exponent: l.
        dtype: of the streams.
        blocks: the type of the states that blocks are given.
    """

    exponent: int
    dtype: torch.dtype
    blocks: torch.dtype

    @property
    def limit(self) -> float:
        """No number may be as large: half of what the type still holds exactly, for a sum of two."""
        return 2.0 ** (PRECISION[self.dtype] - 1 - self.exponent)

    def rounded(self, x: Tensor) -> Tensor:
        """Q[x], in the streams' type."""
        scale = 2.0**self.exponent
        return x.to(self.dtype).mul(scale).round_().div_(scale)


@dataclass(frozen=True)
class Step:
    """How one state follows from the two before it.

    Attributes:
        number: j, counted from 1: of the state that is read.
        name: of the block, for errors.
        past: a; a number, or one for each line (B, 1, 1) or token (1, T, 1). Zero is the number alone.
        own: b, as a.
        gain: c, as a.
        bits: m.
        first: nothing is computed back from here.
    """

    number: int
    name: str
    past: Tensor | float
    own: Tensor | float
    gain: Tensor | float
    bits: int = 0
    first: bool = False


# --- mathematics -----------------------------------------------------------------------------------------------


def summand(cur: Tensor, y: Tensor, step: Step, grid: Grid) -> Tensor:
    """Q[b z + c h], where h is what a block added to the state that it was given.

    Args:
        cur: z (B, T, D), in the streams' type.
        y: what the block says (B, T, D) of z in the model's type.
        step: b and c.
        grid: of the streams.
    """
    change = y.to(grid.dtype) - cur.to(grid.blocks).to(grid.dtype)
    return grid.rounded(step.own * cur + step.gain * change)


def side_bits(past: Tensor, bits: int, grid: Grid) -> Tensor:
    """s, the lowest m binary digits of a state in units of the grid; uint8 (B, T, D)."""
    return torch.remainder(past * 2.0**grid.exponent, 2.0**bits).to(torch.uint8)


def following(
    past: Tensor, cur: Tensor, y: Tensor, step: Step, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """z[j+1] and s[j], which is None for m = 0."""
    added = summand(cur, y, step, grid)
    if not step.bits:
        return (added if _zero(step.past) else past + added), None
    digits = side_bits(past, step.bits, grid)
    return step.past * (past - digits.to(grid.dtype) * 2.0**-grid.exponent) + added, digits


def _zero(factor: Tensor | float) -> bool:
    return not isinstance(factor, Tensor) and factor == 0


def before(
    after: Tensor, cur: Tensor, y: Tensor, step: Step, grid: Grid, digits: Tensor | None
) -> Tensor:
    """z[j-1], the inverse of `following`."""
    left = after - summand(cur, y, step, grid)
    if digits is None:
        return left
    return left / step.past + digits.to(grid.dtype) * 2.0**-grid.exponent


def pack(digits: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits without gaps: uint8 (bits · ⌈n / 8⌉,), which for n a multiple of 8 is bits · n bits."""
    flat = digits.flatten()
    missing = -flat.numel() % WORD
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    groups = flat.view(-1, WORD)
    words = torch.zeros(groups.shape[0], dtype=torch.int64, device=digits.device)
    for place in range(WORD):
        words |= groups[:, place].to(torch.int64) << (bits * place)
    return torch.stack([(words >> (8 * n)) & 255 for n in range(bits)], dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """The inverse of `pack`, as uint8 of this shape."""
    words = torch.zeros(packed.shape[0], dtype=torch.int64, device=packed.device)
    for n in range(bits):
        words |= packed[:, n].to(torch.int64) << (8 * n)
    mask = (1 << bits) - 1
    digits = torch.stack([(words >> (bits * place)) & mask for place in range(WORD)], dim=1)
    return digits.to(torch.uint8).flatten()[: math.prod(shape)].view(shape)


def marks(x: Tensor, grid: Grid) -> Tensor:
    """Two sums over the width, in units of the grid (B, T, 2), int64: plain, and with odd factors.

    A state of which one number is off has another second sum, always; the difference of the first says by how much.
    """
    whole = (x * 2.0**grid.exponent).to(torch.int64)
    places = torch.arange(x.shape[-1], device=x.device)
    factors = (places * 2654435761) % 2**20 | 1
    return torch.stack([whole.sum(-1), (whole * factors).sum(-1)], dim=-1)


# --- one pass --------------------------------------------------------------------------------------------------


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
            g * step.past if past and not _zero(step.past) else None,
            g * own if cur and not _zero(own) else None,
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
