"""The children of reversible blocks, and the pass through the blocks that they share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.ops.reversible import Grid, Step
from afina.ops.reversible_pass import Front, Way, other_shape
from afina.techniques.reversible_halves import Halves
from afina.tree import Around, seed_of
from afina.types import Context

Check = Literal["first", "always", "never"]


@dataclass(frozen=True)
class Shape:
    """What is the same in every pass.

    Attributes:
        names: of the blocks.
        bits: m; None for additive coupling.
        grid: of the streams.
        seed: of the signs.
        by_row: signs are drawn for each row.
    """

    names: Sequence[str]
    bits: int | None
    grid: Grid
    seed: int
    by_row: bool


class Pass:
    """What the children of one model share: where the pass that is on its way stands, and whose signs it has.

    Attributes:
        shape: of every pass.
        check: when states that come back are compared.
        rows: ids of the rows of the next pass, in their order; None numbers them.
        step: of the run, from 0.
        front: of the pass that is on its way.
    """

    def __init__(self, shape: Shape, check: Check) -> None:
        self.shape = shape
        self.check: Check = check
        self.rows: tuple[int, ...] | None = None
        self.step = 0
        self.front: Front | None = None
        self._places = torch.empty(0)
        self._ids: Sequence[int] = ()
        self._checked = False
        self._mode: Literal["own", "off", "shown"] = "own"

    def __deepcopy__(self, memo: dict[int, Any]) -> Pass:
        """Of a copy of the model: nothing of a pass that is on its way."""
        return Pass(self.shape, self.check)

    def at_step(self, step: int) -> None:
        """The run is at this step."""
        self.step = step

    @contextmanager
    def off(self) -> Generator[None, None, None]:
        """Inside the block the blocks run plainly."""
        with self._in("off"):
            yield

    @contextmanager
    def shown(self) -> Generator[None, None, None]:
        """Inside the block they run as in training, without a gradient too."""
        with self._in("shown"):
            yield

    @contextmanager
    def _in(self, mode: Literal["off", "shown"]) -> Generator[None, None, None]:
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def acts(self, training: bool) -> bool:
        """Whether blocks run reversibly now."""
        if self._mode != "own":
            return self._mode == "shown"
        return self.shape.bits is None or (training and torch.is_grad_enabled())

    def enter(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Front:
        """A pass begins."""
        grid = replace(self.shape.grid, blocks=hidden.dtype)
        checks = self.check == "always" or (self.check == "first" and not self._checked)
        way = Way(grid, checks and torch.is_grad_enabled(), self._was_checked)
        if self.shape.bits is not None and self.shape.by_row:
            self._places, self._ids = self._rows_of(hidden, kwargs)
        self.rows = None
        shares = (0.5, 0.5) if self.shape.bits is None else (0.0, 1.0)
        self.front = Front(hidden, way, shares, self.shape.names[0])
        return self.front

    def _was_checked(self) -> None:
        self._checked = True

    def _rows_of(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, Sequence[int]]:
        """Which of the rows each place is of, (1, T, 1) in a packed line and else (B, 1, 1); and the rows' ids."""
        context = kwargs.get("afina_context")
        if isinstance(context, Context):
            places = context.segments_BT.clamp(min=0)[..., None]
            if places.shape[1] != hidden.shape[1]:
                here = (*context.segments_BT.shape, hidden.shape[-1])
                raise other_shape(self.shape.names[0], here, tuple(hidden.shape))
        else:
            places = torch.arange(hidden.shape[0], device=hidden.device).view(-1, 1, 1)
        count = int(places.max()) + 1
        told = self.rows is not None and len(self.rows) == count
        return places, cast("Sequence[int]", self.rows) if told else range(count)

    def step_of(self, place: int, number: int) -> Step:
        """The step of a block, or of one of its halves.

        Args:
            place: of the block among the reversible ones.
            number: of the step in its pass.
        """
        name, bits = self.shape.names[place], self.shape.bits
        if bits is None:
            return Step(number, name, 1.0, 0.0, 1.0, first=number == 1)
        if place == 0:
            return Step(number, name, 0.0, 1.0, 1.0, first=True)
        past = self._factor(name, 2.0**-bits)
        return Step(number, name, past, 1 - past, 1 + past, bits)

    def _factor(self, name: str, size: float) -> Tensor | float:
        """±2^-m: a pure function of seed, step, block and row."""
        seed, step = self.shape.seed, self.step
        if not self.shape.by_row:
            return size * sign(seed, step, name)
        drawn = [size * sign(seed, step, name, row) for row in self._ids]
        factors = torch.tensor(drawn, dtype=self.shape.grid.dtype, device=self._places.device)
        return factors[self._places]


def sign(seed: int, step: int, block: str, row: int | None = None) -> int:
    """1 or -1, of a block in a step; where it is drawn for each row, of that row."""
    return 1 - 2 * (seed_of(seed, f"reversible {step} {block} {row}") & 1)


class ReversibleDelta(Around):
    """A block that runs reversibly.

    Attributes:
        shared: with the other blocks.
        apart: why rows that begin alike must be computed apart; empty where they need not.
    """

    recomputes: ClassVar[bool] = True

    def __init__(self, shared: Pass, place: int, index: int, halves: Halves | None) -> None:
        super().__init__()
        self.shared, self.halves = shared, halves
        self._place, self._index = place, index
        self.only_in_training = shared.shape.bits is not None
        by_row = shared.shape.bits is not None and shared.shape.by_row
        self.apart = (
            "reversible draws a sign for each row (reversible.signs=step draws one for all)"
            if by_row
            else ""
        )

    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's result, by way of the streams."""
        if not self.shared.acts(self.training):
            return call(*args, **kwargs)
        try:
            return self._through(call, base, args, kwargs)
        except BaseException:
            self.shared.front = None
            raise

    def _through(
        self,
        call: Callable[..., Any],
        base: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        shared, given = self.shared, _Given(args, kwargs)
        front = shared.enter(given.hidden, kwargs) if self._place == 0 else self._front(given)
        run = partial((given.bare(self._index) if torch.is_grad_enabled() else given).to, call)
        step_of = partial(shared.step_of, self._place)
        if self.halves is None:
            said = front.through(run, step_of)
        else:
            look = partial(given.bare().to, call)
            one, other = self.halves.of(base, run, look, given.hidden.detach())
            said = front.through(one, step_of)
            front.through(other, step_of)
        if self._place == len(shared.shape.names) - 1:
            shared.front = None
            out = front.leave()
        else:
            out = front.show()
        return (out, *cast("tuple[Any, ...]", said)[1:]) if isinstance(said, tuple) else out

    def _front(self, given: _Given) -> Front:
        front = self.shared.front
        if front is None or front.shown is not given.hidden:
            raise TechniqueError(
                "reversible: a block is not given what the one before it said",
                got=f"something acts between {self.shared.shape.names[self._place - 1]} and "
                f"{self.shared.shape.names[self._place]}, or the first blocks were left out",
                cure="leave train.cache_inputs_gib out, and hooks on whole blocks; or set reversible.plain so that "
                "the reversible blocks begin behind it",
            )
        return front


class _Given:
    """What a block is called with: its states, and all else."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.hidden: Tensor = args[0] if args else kwargs["hidden_states"]

    def to(self, call: Callable[..., Any], state: Tensor) -> Any:
        """The call with another state."""
        if self._args:
            return call(state, *self._args[1:], **self._kwargs)
        return call(**{**self._kwargs, "hidden_states": state})

    def bare(self, index: int | None = None) -> _Given:
        """The same without states of its own, and without a cache: what runs twice would fill it twice.

        Args:
            index: of the block, to see that the cache holds nothing yet; None does not look.

        Raises:
            TechniqueError: the cache holds something that would be lost.
        """

        def kept(value: Any) -> Any:
            length = getattr(value, "get_seq_length", None)
            if length is None:
                return value
            if index is not None and length(index):
                raise TechniqueError(
                    "reversible: in training a block cannot begin with what a cache holds",
                    got=f"{length(index)} tokens",
                    cure="train on whole rows, with use_cache=False",
                )
            return None

        # The states would be kept for as long as the call, which backward needs.
        nothing = self.hidden.new_empty(0)
        args = tuple(nothing if a is self.hidden else kept(a) for a in self._args)
        kwargs = {n: nothing if v is self.hidden else kept(v) for n, v in self._kwargs.items()}
        return _Given(args, kwargs)
