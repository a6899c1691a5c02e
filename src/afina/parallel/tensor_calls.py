"""What processes that share each matrix say to each other within a pass, and the hooks by which they do.

    enter    x -> x,            backward: the gradient is summed over the parts
    leave    y -> Σ y,          backward: each part gets the whole gradient
    join     parts -> whole,    backward: each part gets the gradient of its own
    split    whole -> part,     backward: the gradients of the parts are joined

Maps that share their input (query, key and value; gate and up) enter together: the gradient of that input is summed
once. What leaves a map that is cut along its input is summed behind all that adapters do to it, so that an adapter
beside it costs no message of its own.

These are ordinary autograd functions over plain tensors. A compiled graph breaks at them: what is said is no part of
it.

Source: the functions f and g of Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from afina.errors import RunError
from afina.parallel.copies import all_gather
from afina.parallel.tensor_place import Which


class Parts:
    """The processes that share each matrix.

    Attributes:
        group: they.
        which: of them this is.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.which = Which(group.rank(), group.size())

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        return self

    @torch.no_grad()
    def total(self, value: Tensor) -> Tensor:
        """The sum over the parts, in memory of its own."""
        summed = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    @torch.no_grad()
    def most(self, value: Tensor) -> Tensor:
        """The largest over the parts, in memory of its own."""
        found = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    @torch.no_grad()
    def joined(self, part: Tensor) -> Tensor:
        """The parts of the last dimension put together."""
        count = self.which.count
        message = part.new_empty(count * part.numel())
        all_gather(message, part.reshape(-1), self.group)
        whole = message.view(count, *part.shape).movedim(0, -2)
        return whole.reshape(*part.shape[:-1], count * part.shape[-1])

    def own(self, whole: Tensor) -> Tensor:
        """This process's part of the last dimension."""
        first, end = self.which.span(whole.shape[-1])
        return whole[..., first:end].contiguous()

    def enter(self, x: Tensor) -> Tensor:
        """See above."""
        return _call(_Enter, x, self) if torch.is_grad_enabled() and x.requires_grad else x

    def leave(self, y: Tensor) -> Tensor:
        """See above."""
        return _call(_Leave, y, self)

    def join(self, y: Tensor) -> Tensor:
        """See above."""
        return _call(_Join, y, self)

    def split(self, x: Tensor) -> Tensor:
        """See above."""
        return _call(_Split, x, self)


def _call(function: type[torch.autograd.Function], x: Tensor, parts: Parts) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(x, parts)  # pyright: ignore[reportUnknownMemberType]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.parts.total(grads[0]), None


class _Leave(torch.autograd.Function):
    # The sum is made in memory of its own: whoever keeps results of products (selective recomputation) keeps these.
    @staticmethod
    def forward(ctx: Any, y: Tensor, parts: Parts) -> Tensor:
        return parts.total(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return parts.joined(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.parts.own(grads[0]), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        return parts.own(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.parts.joined(grads[0]), None


# --- hooks -----------------------------------------------------------------------------------------------------


class Entrance:
    """What maps of one parent that are given the same tensor enter by together.

    Args:
        parts: the processes.
        maps: how many of them there are.
    """

    def __init__(self, parts: Parts, maps: int) -> None:
        self.parts, self.maps = parts, maps
        self._left = 0
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """The tensor as it enters: of one tensor the same for all maps."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if x is not self._given or self._entered is None:
            self._given, self._entered, self._left = x, self.parts.enter(x), self.maps
        entered = self._entered
        self._left -= 1
        if not self._left:  # all have it: it is kept alive no longer
            self._given = self._entered = None
        return entered


class Enters:
    """In front of a map that is cut along its output."""

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance

    @torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The input, entered."""
        return (self.entrance.of(args[0]), *args[1:])


class Splits:
    """In front of a map that is cut along its input and is given all of it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """This process's part of the input."""
        return (self.parts.split(args[0]), *args[1:])


class Looks:
    """At an embedding of which each process has some tokens' rows: others look up nothing.

    Args:
        parts: the processes.
        tokens: of the whole vocabulary.

    Attributes:
        silent: nobody uses what is looked up just now.
    """

    def __init__(self, parts: Parts, tokens: int) -> None:
        self.parts = parts
        self.first, self.end = parts.which.span(tokens)
        self._here: Tensor | None = None
        self.silent = False

    @torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The ids that they have here; any for tokens of others."""
        ids: Tensor = args[0]
        here = (ids >= self.first) & (ids < self.end)
        self._here = here
        return (torch.where(here, ids - self.first, 0), *args[1:])

    def found(self, y: Tensor) -> Tensor:
        """What all processes have looked up, of what this one has."""
        here, self._here = self._here, None
        assert here is not None
        if self.silent:
            return y
        return self.parts.leave(y.masked_fill(~here[..., None], 0.0))


class EntersExperts:
    """In front of fused experts of which each process has some: another's have the number behind the last."""

    def __init__(self, parts: Parts, experts: int) -> None:
        self.parts = parts
        self.first, self.end = parts.which.span(experts)

    @torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tokens and their weights, entered, and the numbers that experts have here."""
        x_ND, index_NK, weights_NK, *others = args
        here_NK = (index_NK >= self.first) & (index_NK < self.end)
        own_NK = torch.where(here_NK, index_NK - self.first, self.end - self.first)
        # What is elsewhere counts nothing here, whatever a grouped product makes of it.
        weights_NK = self.parts.enter(weights_NK) * here_NK
        return self.parts.enter(x_ND), own_NK, weights_NK, *others


class Behind:
    """Behind a map, and behind all that acts on what it gives.

    Args:
        put_together: the parts -> the whole.
    """

    def __init__(self, put_together: Callable[[Tensor], Tensor]) -> None:
        self.put_together = put_together

    @torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The whole output.

        Raises:
            RunError: something else would act behind it.
        """
        if next(reversed(module._forward_hooks.values())) is not self:
            raise RunError(
                "something was attached to a map after processes had shared it out: it would act behind their sum",
                got=type(module).__name__,
                cure="apply all techniques before the run begins",
            )
        return self.put_together(output)


def without_bias(module: nn.Module, x: Tensor) -> Tensor:
    """A linear's `forward` in the processes that leave its bias to the first."""
    return F.linear(x, module.get_parameter("weight"))
