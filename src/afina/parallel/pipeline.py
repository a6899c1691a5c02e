"""Pipeline parallelism: processes share out the blocks of a model, and micro-batches go from one to the next.

    process 0   embedding, blocks 0 … k   ->   process 1   blocks k+1 …   ->   …   ->   blocks, final norm, head, loss

Every process of a pipeline has the same rows. What is sent forward are the states between two blocks, and backward
their gradients; everything else (masks, positions, labels, seeds) each process makes itself, from the number of the
micro-batch. torch's schedules say in which order (`torch.distributed.pipelining`); the last stage's result is the share
of the loss itself, so gradients are sums, as in one process.

With one micro-batch (`schedule: gpipe` and `train.micro_rows` as large as a step) this is plain model parallelism: the
layers lie in several processes, of which one works at a time. That saves memory alone.

Messages have one shape in a window: micro-batches are padded to the longest of them, and where a schedule needs more of
them than there are, empty ones are added, which cost a message and no computing. Tensors around the stack that several
processes hold (a tied embedding, a prefix) have their gradients summed over them before anything moves.

Source: Huang et al. 2019, "GPipe", arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; Qi et al. 2023, "Zero
Bubble Pipeline Parallelism", arXiv 2401.10241.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afina.errors import AfinaError, ConfigError, RunError
from afina.parallel.bubbles import made_schedule, micro_batches
from afina.parallel.copies import Copies
from afina.parallel.pipeline_balance import bounds_of, measured
from afina.parallel.pipeline_cut import (
    flows_into,
    held_names,
    reads_embedding,
    release,
    result_of,
    stack_of,
)
from afina.parallel.pipeline_stage import Blocks, Chunk, Left, Stage, hidden_of
from afina.parallel.plan import Place, Schedule
from afina.parallel.runtime import Micro, Named
from afina.seams.calls import Call, instead
from afina.seams.whole import positions
from afina.tree import front_of, seed_of
from afina.tree.pieces import mark, piece_of
from afina.types import Batch

if TYPE_CHECKING:
    from afina.parallel.processes import Processes
    from afina.parallel.tensor import Slices

T = TypeVar("T")

TIMED_TOKENS = 64
"""Of the pass by which blocks that are not alike are timed, where the model has room for as many."""


class Border(NamedTuple):
    """What one message holds.

    Attributes:
        shape: of the states (B, T, D).
        dtype: of the states.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Running:
    """What the stages work on just now.

    Attributes:
        micros: with their batches, all of one shape; behind them the empty ones.
        border: between stages.
    """

    micros: Sequence[tuple[Micro, Batch]]
    border: Border


class Pipeline:
    """One process's part of a pipeline.

    Args:
        mesh: the processes, which have met.
        model: whole; from here on this process holds its own part of it.
        tensors: that train, by name.
        slices: its part of every matrix, where a tensor group shares those.

    Attributes:
        chunks: the stretches of blocks of this process.
        names: of the parameters that it holds, all of one that has several.

    Raises:
        ConfigError: there are not enough blocks, or the split is not one of them.
        TechniqueError: this model's blocks cannot be shared out.
    """

    def __init__(
        self,
        mesh: Processes,
        model: nn.Module,
        tensors: Named,
        slices: Slices | None = None,
    ) -> None:
        self.mesh, self.model, self._slices = mesh, model, slices
        self.schedule: Schedule = mesh.plan.schedule
        self.group = mesh.group("pipeline")
        self.place = mesh.plan.place(mesh.rank).pipeline
        self.stack, modules = stack_of(model)
        self.blocks = Blocks(list(modules))
        bounds = self._bounds()
        self.stages = len(bounds)
        every = [Chunk(n, self.stages, *bound) for n, bound in enumerate(bounds)]
        self.chunks = every[self.place :: mesh.plan.pipeline]
        self._flows = [not c.begins and flows_into(model, c.first, tensors) for c in every]
        if tensors:
            self._refuse_still()
        self._own = [held_names(model, self.stack, self.blocks, chunk) for chunk in self.chunks]
        self.names = set[str]().union(*self._own)
        self._looks_up = {
            chunk: slices is None or reads_embedding(model, self.blocks, chunk)
            for chunk in self.chunks
        }
        self._shared = self._meet(tensors)
        release(model, self.names)
        self._running: Running | None = None
        self._made: dict[tuple[Any, ...], Any] = {}

    def _refuse_still(self) -> None:
        """Raises where torch's split backward pass would give what trains in a stage no gradient."""
        still = [stage for stage, flows in enumerate(self._flows) if stage and not flows]
        if self.mesh.plan.splits_backward and still:
            raise ConfigError(
                "parallel.schedule=zero_bubble needs something that trains before each border of stages: it splits a "
                "backward pass at the gradient of what enters a stage, and none flows there",
                got=f"nothing trains before stage {still[-1]} of {self.stages}",
                cure="set parallel.schedule to 1f1b, or train something in the first stage too",
            )

    def _bounds(self) -> list[tuple[int, int]]:
        """First block of each stage, and the one behind its last; the same in every process."""
        return bounds_of(self.mesh.plan, len(self.blocks.blocks), self._costs)

    def _costs(self) -> list[float]:
        """Of each block, by all processes together."""
        config: Any = self.model.config
        begins = Chunk(0, 1, 0, len(self.blocks.blocks))
        tokens = min(TIMED_TOKENS, positions(self.model) or TIMED_TOKENS)
        costs = measured(
            self.blocks.blocks,
            config,
            lambda: result_of(self.model, self.blocks, begins, tokens - front_of(self.model)),
        )
        # Each took its own times; the sum of them is one for all.
        return [sum(each) for each in zip(*self.mesh.gathered(costs), strict=True)]

    def _meet(self, tensors: Named) -> list[tuple[set[str], dist.ProcessGroup]]:
        """Which tensors that train are held by several processes of the pipeline, and the group of those.

        The first process that holds one stands for it in sums over all.
        """
        mine = frozenset(self.mine(tensors))
        told: list[tuple[int, frozenset[str]]] = self.mesh.gathered((self.place, mine))
        holders: dict[str, set[int]] = {}
        for place, names in told:
            for name in names:
                holders.setdefault(name, set()).add(place)
        several = sorted({tuple(sorted(p)) for p in holders.values() if len(p) > 1})
        found: list[tuple[set[str], dist.ProcessGroup]] = []
        for places in several:
            group = self._group_of(places)
            if self.place not in places:
                continue
            names = {n for n, p in holders.items() if tuple(sorted(p)) == places}
            found.append((names, group))
            if self.place != places[0]:
                for name in names:
                    mark(tensors[name], replace(piece_of(tensors[name]), counted=False))
        return found

    def _group_of(self, places: Sequence[int]) -> dist.ProcessGroup:
        """The processes at these places of this process's own pipeline; all processes make all groups alike."""
        plan = self.mesh.plan
        here = plan.place(self.mesh.rank)[1:]
        lines = sorted({plan.place(rank)[1:] for rank in range(plan.processes)})
        made = {
            line: dist.new_group(
                [plan.rank(Place(place, *line)) for place in places], timeout=self.mesh.timeout
            )
            for line in lines
        }
        return cast("dist.ProcessGroup", made[here])

    def mine(self, tensors: Named) -> dict[str, nn.Parameter]:
        """Those of the tensors that this process holds."""
        return {name: p for name, p in tensors.items() if name in self.names}

    def holds(self, name: str) -> bool:
        """Whether the values of a parameter of the model are here."""
        return name in self.names

    def add_shared(self, own: Named) -> None:
        """Sums the gradients of what several stages hold, over those."""
        for names, group in self._shared:
            Copies(group).reduce({name: own[name] for name in own if name in names})

    @property
    def ends(self) -> bool:
        """Whether the model ends in this process."""
        return self.chunks[-1].ends

    def through(self, micros: Sequence[Micro], *, train: bool) -> list[float | None]:
        """Takes micro-batches through all stages; see `Mesh.through`.

        Raises:
            RunError: the processes do not have the same micro-batches.
        """
        begun = [(micro, micro.begin()) for micro in micros]
        there = [(micro, batch) for micro, batch in begun if batch is not None]
        if not there:
            return [None] * len(micros)
        rows, tokens = (max(b.tokens_BT.shape[dim] for _, b in there) for dim in (0, 1))
        alike = [(micro, micro.widened(batch, rows, tokens)) for micro, batch in there]
        self._running = Running(alike, self._border(alike[0]))
        try:
            told = iter(self._run(train))
        finally:
            self._running = None
        return [None if batch is None else next(told) for _, batch in begun]

    def _run(self, train: bool) -> list[float]:
        """The share of the loss of each micro-batch, in every stage."""
        running = self._now
        count = micro_batches(self.schedule, self.mesh.plan.pipeline, len(running.micros))
        self._refuse_other(count, running.border)
        schedule = self._schedule(count, running.border, train)
        numbers = torch.arange(count)
        losses: list[Tensor] = []
        given: dict[str, Any] = {"number": numbers, "losses": losses, "return_outputs": False}
        if self.ends:
            given["target"] = numbers
        step = schedule.step if train else schedule.eval
        try:
            with quiet():
                step(*([numbers] if self.place == 0 else []), **given)
        except RuntimeError as error:
            raise _cause(error) from None
        told = torch.zeros(count, dtype=torch.float64, device=self.mesh.device)
        if self.ends:
            told += torch.stack([loss.detach().reshape(()) for loss in losses]).double()
        dist.all_reduce(told, group=self.group)
        shares: list[float] = told.tolist()  # pyright: ignore[reportUnknownMemberType]
        return shares[: len(running.micros)]

    @property
    def _now(self) -> Running:
        assert self._running is not None
        return self._running

    def _refuse_other(self, count: int, border: Border) -> None:
        """Raises where a stage would wait for what no other sends; a message of another shape is not seen by itself."""
        mine = torch.tensor([count, *border.shape], device=self.mesh.device)
        # The largest is the least of what lies on the other side of 0: one message for both.
        both = torch.cat([mine, -mine])
        dist.all_reduce(both, dist.ReduceOp.MIN, group=self.group)
        least, most = both[: len(mine)], -both[len(mine) :]
        if not torch.equal(least, most):
            raise RunError(
                "the processes of a pipeline have different micro-batches",
                got=f"{mine.tolist()} here, {least.tolist()} to {most.tolist()} in all",  # pyright: ignore[reportUnknownMemberType]
                wanted="the same rows in each of them",
                cure="give every process the same data and settings",
            )

    def _border(self, first: tuple[Micro, Batch]) -> Border:
        """What enters the first block, as it would between any two: asked of the model, whose pass ends there."""
        micro, batch = first
        block = self.blocks.blocks[0]

        def stop(call: Call) -> Call:
            def run(*args: Any, **kwargs: Any) -> Any:
                raise Left(hidden_of(args, kwargs))

            return run

        with torch.no_grad(), instead({block: stop}), self._looking_up(False):
            try:
                micro.loss(batch)
            except Left as left:
                return Border(tuple(left.hidden_BTD.shape), left.hidden_BTD.dtype)
        raise RunError("the model's pass did not come to its first block")

    def _schedule(self, count: int, border: Border, train: bool) -> Any:
        """torch's schedule for messages of this shape; the last of each kind is kept."""
        key = (train, count, border)
        if key not in self._made:
            self._made = {k: v for k, v in self._made.items() if k[0] != train}
            stages = [self._stage(number, border) for number in range(len(self.chunks))]
            self._made[key] = made_schedule(self.schedule, stages, count)
        return self._made[key]

    def _stage(self, number: int, border: Border) -> Any:
        """torch's stage of one of the stretches here."""
        from torch.distributed.pipelining import PipelineStage

        chunk = self.chunks[number]
        enters, leaves = chunk.number, chunk.number + 1
        between = [
            torch.empty(border.shape, dtype=border.dtype, device="meta", requires_grad=flows)
            for flows in (self._flows[enters], leaves < self.stages and self._flows[leaves])
        ]
        own = [p for name, p in self.model.named_parameters() if name in self._own[number]]
        return PipelineStage(
            Stage(lambda n, received: self._pass(chunk, border, n, received), own),
            chunk.number,
            self.stages,
            self.mesh.device,
            input_args=torch.empty(1, dtype=torch.int64, device="meta")
            if chunk.begins
            else between[0],
            output_args=torch.empty((), device="meta", requires_grad=True)
            if chunk.ends
            else between[1],
            group=self.group,
        )

    def _pass(self, chunk: Chunk, border: Border, number: int, received: Tensor | None) -> Tensor:
        """What a stretch makes of a micro-batch: states, or the share of the loss.

        Raises:
            RunError: what leaves has another shape than what the next stage waits for.
        """
        micros = self._now.micros
        if number >= len(micros):
            return self._of_nothing(chunk, border, received)
        micro, batch = micros[number]
        # As in one process where the model begins; each further stretch draws on its own.
        torch.manual_seed(
            seed_of(micro.seed, f"stage {chunk.number}") if chunk.number else micro.seed
        )
        entering = None if received is None else lambda given: received
        with self.blocks.only(chunk, entering), self._looking_up(self._looks_up[chunk]):
            try:
                return micro.loss(batch)
            except Left as left:
                hidden_BTD = left.hidden_BTD
        if Border(tuple(hidden_BTD.shape), hidden_BTD.dtype) != border:
            raise RunError(
                "the states between two stages of the pipeline changed their shape",
                got=f"{tuple(hidden_BTD.shape)}, {hidden_BTD.dtype}",
                wanted=f"{border.shape}, {border.dtype}",
            )
        return hidden_BTD.contiguous()

    def _looking_up(self, used: bool) -> AbstractContextManager[None]:
        """Inside the block a tensor group does not tell each other what tokens' rows are, if nobody uses that."""
        return nullcontext() if used or self._slices is None else self._slices.silent()

    def _of_nothing(self, chunk: Chunk, border: Border, received: Tensor | None) -> Tensor:
        """What an empty micro-batch comes to: zeros, which hang on what came in."""
        if received is None:
            flows = self._flows[1] and torch.is_grad_enabled()
            zeros = torch.zeros(border.shape, dtype=border.dtype, device=self.mesh.device)
            return zeros.requires_grad_(flows)
        return received.sum() * 0 if chunk.ends else received * 0

    def alone(self, run: Callable[[], Tensor]) -> Tensor:
        """Forward pass of this process's own stretches, with ones coming in: a number to run backward from.

        Args:
            run: a forward pass of the model that comes to a loss.
        """
        found: list[Tensor] = []
        for chunk in self.chunks:

            def entering(given: Tensor, flows: bool = self._flows[chunk.number]) -> Tensor:
                return torch.ones_like(given).requires_grad_(flows and torch.is_grad_enabled())

            with self.blocks.only(chunk, None if chunk.begins else entering):
                try:
                    found.append(run())
                except Left as left:
                    found.append(left.hidden_BTD.sum())
        return torch.stack([one.double() for one in found]).sum()

    def at_end(self, run: Callable[[], T]) -> T | None:
        """What `run` gives where the model ends, with drawn states coming in; None in other processes."""
        if not self.ends:
            return None

        def entering(given: Tensor) -> Tensor:
            drawn = torch.Generator().manual_seed(0)
            return torch.randn(given.shape, generator=drawn).to(given)

        with self.blocks.only(self.chunks[-1], entering):
            return run()


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Inside the block torch's schedules print no tables when something goes wrong: the error says it."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _cause(error: BaseException) -> BaseException:
    """What torch's schedules wrap: the first error of a chain, where it is ours or a run's (memory ran out)."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return first if isinstance(first, AfinaError | RuntimeError) else error
