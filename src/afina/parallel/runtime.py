"""The mesh a loop runs on, and its one-process twin, with the same methods.

The loop asks for sums and for permission to write; it never asks how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from afina.parallel.parts import materialise, parts_of, placed
from afina.parallel.placement import Placement, place
from afina.parallel.plan import Plan
from afina.parallel.store import Lot
from afina.types import Batch

T = TypeVar("T")
Named = Mapping[str, nn.Parameter]
Fill = Callable[[Mapping[str, Lot], torch.device], None]
CPU = torch.device("cpu")


class Micro(Protocol):
    """A micro-batch on its way through the model.

    Attributes:
        seed: of its random draws.
    """

    seed: int

    def begin(self) -> Batch | None:
        """Its tensors, with random numbers set; None when nothing in it counts."""
        ...

    def widened(self, batch: Batch, rows: int, tokens: int) -> Batch:
        """The batch with padding, to so many lines of so many tokens; its loss is the same."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """Its share of the loss, by a forward pass of the model."""
        ...

    def backward(self, loss: Tensor, batch: Batch) -> None:
        """What is done with the loss: a backward pass, where it trains."""
        ...

    def idle(self) -> Tensor:
        """A loss that is none of the data's, by a forward pass: for a process that must make one and has no rows."""
        ...


class Mesh(Protocol):
    """What a training loop needs to know of the processes it is one of.

    Attributes:
        plan: how they share the run.
        rank: of this process.
    """

    plan: Plan
    rank: int

    @property
    def computes(self) -> torch.device | None:
        """The device that passes run on; None where that is the one that the model's tensors lie on."""
        ...

    @property
    def writes(self) -> bool:
        """Whether this process writes the run's files."""
        ...

    def begin(self) -> None:
        """Meets the other processes; nothing else works before."""
        ...

    def at(self, step: int) -> None:
        """This process begins a step, counted from 1."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """Inside the block a process that is missed is told by name, with the step."""
        ...

    def hold(self, model: nn.Module, tensors: Named, fill: Fill | None = None) -> None:
        """From here on this process holds its own part of what trains.

        Args:
            model: with the same values in all processes, or without any, on the meta device.
            tensors: that train, by name.
            fill: gives the model its values, told what of each parameter is here, and where buffers go; None where it
                has them.
        """
        ...

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """What this process moves: the tensors themselves, or its pieces of them under the same names."""
        ...

    def parts(self, model: nn.Module) -> dict[str, Lot]:
        """What this process has of each of the model's parameters, by name."""
        ...

    def within(self, call: Callable[[], T]) -> T:
        """What a pass through the model gives, which happens inside of this."""
        ...

    def opened(self) -> AbstractContextManager[None]:
        """Inside the block the model may be called by anyone, without a gradient and in all processes alike."""
        ...

    def through(
        self, micros: Sequence[Micro], tensors: Named, *, train: bool = True
    ) -> list[float | None]:
        """Takes micro-batches through the model, and back where they train; the processes talk as they have to.

        Args:
            micros: of this process, as many as `rounds` said.
            tensors: that train.
            train: False for forward passes alone.

        Returns:
            The share of the loss of each; None where nothing counts.
        """
        ...

    def alone(self, run: Callable[[], Tensor]) -> Tensor:
        """A number to run backward from, by this process's own part of the model: a trial, which tells nobody.

        Args:
            run: a forward pass that comes to a loss.
        """
        ...

    def at_end(self, run: Callable[[], T]) -> T | None:
        """What `run` gives where the model's end is, what comes in drawn; None in processes without it."""
        ...

    def reduce(self, tensors: Named) -> None:
        """After a window's last pass: what `own` gives has the gradients, summed over all rows of the window."""
        ...

    def norm(self, own: Named) -> Tensor:
        """Norm of the whole gradient, over what all processes own."""
        ...

    def publish(self, tensors: Named) -> None:
        """What each process owns has moved: all tensors have their new values."""
        ...

    def share(self, rows: list[T]) -> list[T]:
        """This process's part of the rows of a step."""
        ...

    def rounds(self, micro_batches: int) -> int:
        """How many passes every process makes, if this one has so many micro-batches."""
        ...

    def number(self, micro_batch: int) -> int:
        """Of a micro-batch among those of all processes."""
        ...

    def sum(self, value: float) -> float:
        """The sum of a number over the processes that see different rows."""
        ...

    def each(self, values: Tensor) -> list[Tensor]:
        """What every process that sees other rows gives (N,), in their order; N may differ, the type may not."""
        ...

    def least(self, value: float) -> float:
        """The least of a number over all processes."""
        ...

    def everywhere(self, names: Iterable[str], among: Iterable[str]) -> frozenset[str]:
        """Those of some names which no process leaves out that holds something of that name.

        Args:
            names: here.
            among: those of which this process holds something.
        """
        ...

    def told(self, make: Callable[[], T]) -> T:
        """What `make` gives in the process that writes, told to all."""
        ...

    def gathered(self, value: Any) -> list[Any]:
        """What each process gives, by rank, told to all."""
        ...

    def barrier(self) -> None:
        """Waits for every process."""
        ...

    def end(self) -> None:
        """Parts from the other processes."""
        ...


class OneProcess:
    """The mesh of a run in one process.

    Args:
        devices: that share the model's blocks; see `placement`.
    """

    plan = Plan()
    rank = 0

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self.devices = tuple(devices)
        self._placement: Placement | None = None

    @property
    def computes(self) -> torch.device | None:
        """Where the tensors lie."""
        return None

    @property
    def writes(self) -> bool:
        """Always."""
        return True

    def begin(self) -> None:
        """There is nobody to meet."""

    def at(self, step: int) -> None:
        """There is nobody to tell."""

    def watched(self) -> AbstractContextManager[None]:
        """There is nobody to miss."""
        return nullcontext()

    def hold(self, model: nn.Module, tensors: Named, fill: Fill | None = None) -> None:
        """Everything is held; blocks go to their devices."""
        if self.devices:
            self._placement = place(model, self.devices)
        if fill is not None:
            materialise(model, placed(model, lambda name: True), CPU)
            fill(self.parts(model), CPU)

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """All of it."""
        return dict(tensors)

    def parts(self, model: nn.Module) -> dict[str, Lot]:
        """All of them."""
        return parts_of(model, placed(model, lambda name: True))

    def within(self, call: Callable[[], T]) -> T:
        """What it gives."""
        return call()

    def opened(self) -> AbstractContextManager[None]:
        """Nothing to open."""
        return nullcontext()

    def through(
        self, micros: Sequence[Micro], tensors: Named, *, train: bool = True
    ) -> list[float | None]:
        """One after the other, so that only one is ever in memory."""
        return [taken(micro) for micro in micros]

    def alone(self, run: Callable[[], Tensor]) -> Tensor:
        """The loss itself."""
        return run()

    def at_end(self, run: Callable[[], T]) -> T | None:
        """What it gives."""
        return run()

    def reduce(self, tensors: Named) -> None:
        """Nothing to add."""

    def norm(self, own: Named) -> Tensor:
        """Of the gradients that are there; 0 for none."""
        return torch.nn.utils.get_total_norm([p.grad for p in own.values() if p.grad is not None])

    def publish(self, tensors: Named) -> None:
        """They moved where they are."""

    def share(self, rows: list[T]) -> list[T]:
        """All rows."""
        return rows

    def rounds(self, micro_batches: int) -> int:
        """As many as there are micro-batches."""
        return micro_batches

    def number(self, micro_batch: int) -> int:
        """Its own."""
        return micro_batch

    def sum(self, value: float) -> float:
        """The value itself."""
        return value

    def each(self, values: Tensor) -> list[Tensor]:
        """Its own alone."""
        return [values]

    def least(self, value: float) -> float:
        """The value itself."""
        return value

    def everywhere(self, names: Iterable[str], among: Iterable[str]) -> frozenset[str]:
        """All of them."""
        return frozenset(names)

    def told(self, make: Callable[[], T]) -> T:
        """What it gives."""
        return make()

    def gathered(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def end(self) -> None:
        """Nobody to part from; the model is on one device again."""
        if self._placement is not None:
            self._placement.lift()
            self._placement = None


def taken(micro: Micro) -> float | None:
    """Takes a micro-batch through the whole model, and back; its share of the loss, None where nothing counts."""
    batch = micro.begin()
    return None if batch is None else there_and_back(micro, batch)


def there_and_back(micro: Micro, batch: Batch) -> float:
    """The same with its tensors."""
    loss = micro.loss(batch)
    micro.backward(loss, batch)
    return float(loss.detach())


def dealt(rows: Sequence[T], part: int, parts: int) -> list[T]:
    """Every `parts`-th row from the `part`-th on: parts differ by at most one row.

    Args:
        rows: of a step, in the order of the run.
        part: counted from 0.
        parts: how many there are.
    """
    return list(rows[part::parts])
