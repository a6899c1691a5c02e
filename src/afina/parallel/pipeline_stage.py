"""One stage of a pipeline: a stretch of a model's blocks, run inside of the model's own forward pass.

The model itself makes masks, rotary embeddings, layer types and scaling, as ever. Blocks before the stretch are
exchanged for ones that hand on what they get; the first of the stretch is given what the stage before sent, in place of
what the model gives it; and behind the last of the stretch the pass ends, unless it is the model's last. So names,
hooks, adapters, recomputation and compiled blocks stay as they are: a block is called, or it is not.

Legend: B lines, T tokens of a line, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.ops.prefix import KEYWORD as PREFIX
from afina.seams.calls import Call, instead


class Left(BaseException):
    """A pass ends here. No error of the model's code: nothing in it may take it for one.

    Attributes:
        hidden_BTD: what leaves.
    """

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__()
        self.hidden_BTD = hidden_BTD


@dataclass(frozen=True)
class Chunk:
    """A stretch of blocks.

    Attributes:
        number: of the stage, from 0.
        stages: of the whole pipeline.
        first: number of its first block.
        end: number behind its last.
    """

    number: int
    stages: int
    first: int
    end: int

    @property
    def begins(self) -> bool:
        """Whether the model begins here."""
        return self.number == 0

    @property
    def ends(self) -> bool:
        """Whether the model ends here."""
        return self.number == self.stages - 1


class Blocks:
    """The stack of one model, as stages see it.

    Args:
        blocks: in the order of the model.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        # What a block gives beside the states: nothing in training, in models that have a place for it; not known yet.
        self._beside: tuple[None, ...] | None = None
        self._known = False

    @contextmanager
    def only(
        self, chunk: Chunk, entering: Callable[[Tensor], Tensor] | None
    ) -> Generator[None, None, None]:
        """Inside the block a pass of the model runs this stretch alone.

        Args:
            chunk: what runs.
            entering: what the model gives the stretch -> what it is given in place of that; None where the model
                begins.

        Raises:
            Left: behind the stretch, unless it is the last.
        """
        own = self.blocks[chunk.first]
        ways: dict[nn.Module, Callable[[Call], Call]] = {
            block: self._idle(number, own._call_impl)
            for number, block in enumerate(self.blocks[: chunk.first])
        }
        for block in self.blocks[chunk.first : chunk.end]:
            enters = entering if block is own else None
            leaves = not chunk.ends and block is self.blocks[chunk.end - 1]
            if enters is not None or leaves:
                ways[block] = partial(partial, _run, enters, leaves)
        with instead(ways):
            yield

    def _idle(self, number: int, own: Call) -> Callable[[Call], Call]:
        """A block that does nothing."""
        return lambda call: partial(self._hand_on, number, own)

    def _hand_on(self, number: int, own: Call, *args: Any, **kwargs: Any) -> Any:
        """What a block gives that does nothing, in the form in which this model's blocks give it.

        Args:
            number: of the block.
            own: the call of one that runs here.
            args: as it was called.
            kwargs: as it was called.
        """
        hidden = hidden_of(args, kwargs)
        prefix = kwargs.get(PREFIX)
        if prefix is not None:
            prefix.used.add(number)  # by the stage that has this block
        if not self._known:
            devices = [hidden.device] if hidden.device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                args, kwargs = replaced(torch.zeros_like(hidden), args, kwargs)
                self._learn(own(*args, **kwargs))
        return hidden if self._beside is None else (hidden, *self._beside)

    def _learn(self, given: Any) -> None:
        beside = given[1:] if isinstance(given, tuple) else ()
        if any(part is not None for part in beside):
            raise TechniqueError(
                "parallel.pipeline: this model's blocks hand on more than one tensor",
                got=type(self.blocks[0]).__name__,
                cure="leave parallel.pipeline out",
            )
        self._beside = beside if isinstance(given, tuple) else None
        self._known = True


def _run(
    enters: Callable[[Tensor], Tensor] | None, leaves: bool, call: Call, *args: Any, **kwargs: Any
) -> Any:
    """A block that is entered from outside, or behind which the pass ends."""
    if enters is not None:
        args, kwargs = replaced(enters(hidden_of(args, kwargs)), args, kwargs)
    out = call(*args, **kwargs)
    if leaves:
        raise Left(out[0] if isinstance(out, tuple) else out)
    return out


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The states that a block is called with (B, T, D).

    Raises:
        TechniqueError: it is called otherwise.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise TechniqueError(
            "parallel.pipeline: what this model's blocks are given is not known",
            got=type(hidden).__name__,
            wanted="a tensor of states, first or as hidden_states",
            cure="leave parallel.pipeline out",
        )
    return hidden


def replaced(
    hidden_BTD: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's call with other states."""
    if args:
        return (hidden_BTD, *args[1:]), dict(kwargs)
    return (), {**kwargs, "hidden_states": hidden_BTD}


class Whole(torch.autograd.Function):
    """Its input; the gradient lies in memory without gaps, as messages must."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient, copied if it is an expanded one or a transposed one."""
        return gradients[0].contiguous()


class Stage(nn.Module):
    """What torch's schedules call: (what was received, number of the micro-batch) -> what is sent, or the loss.

    It has no children: the model stays one, of which several stages of a process run their own stretch.

    Args:
        run: (number, what was received) -> what leaves.
        own: the parameters of this stretch.
    """

    def __init__(
        self, run: Callable[[int, Tensor | None], Tensor], own: Sequence[nn.Parameter]
    ) -> None:
        super().__init__()
        self._run, self._own = run, list(own)

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """See above; the first stage receives nothing but the number."""
        given = received[0]
        states: Any = Whole.apply(given) if given.is_floating_point() else None  # pyright: ignore[reportUnknownMemberType]
        return self._run(int(number), states)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this stretch alone, which the backward pass of weights goes through."""
        return iter(self._own)
