"""ZeRO, stage 0: every process holds all of what trains; and the messages that other stages need too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afina.parallel.runtime import Micro, Named, taken

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20
"""Gradients are summed so many bytes at a time: few large messages, and little memory beside the gradients."""


class Groups(NamedTuple):
    """The processes with different rows: those that share one copy out, those that hold the same piece, and all.

    Attributes:
        shard, replicate, data: see `plan.Plan`.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    data: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """Whether this process stands for those that hold the same piece."""
        return self.replicate.rank() == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over the pieces of a tensor."""
        summed = carried(value.clone(), self.shard)
        dist.all_reduce(summed, group=self.shard)
        return summed.to(value.device)


class Copies:
    """Every process holds all of it, and gradients are summed once a step.

    Args:
        group: the processes that see different rows; None for one process.
    """

    whole = True
    in_rounds = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """All of it."""
        return dict(tensors)

    def within(self, call: Callable[[], T]) -> T:
        """All is there."""
        return call()

    def opened(self) -> AbstractContextManager[None]:
        """All is there."""
        return nullcontext()

    def kept(self, *, train: bool) -> AbstractContextManager[None]:
        """All is there."""
        return nullcontext()

    def begin(self) -> None:
        """Nothing to prepare."""

    def taken(self, micro: Micro) -> float | None:
        """A pass of its own."""
        return taken(micro)

    def passed(self, tensors: Named) -> None:
        """Nothing is told before the window's end."""

    def reduce(self, tensors: Named) -> None:
        """Sums gradients in place; a tensor that got none here takes part with zeros, if another process has one."""
        if self.group is None or self.group.size() == 1 or not tensors:
            return
        names = list(tensors)
        there = carried(
            torch.tensor([float(tensors[n].grad is not None) for n in names]), self.group
        )
        dist.all_reduce(there, group=self.group)
        for name, many in zip(names, there.tolist(), strict=True):
            if many and tensors[name].grad is None:
                tensors[name].grad = torch.zeros_like(tensors[name])
        sum_up([p.grad for p in tensors.values() if p.grad is not None], self.group)

    def publish(self, tensors: Named) -> None:
        """Every process moved them alike."""


def sum_up(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors over the processes of a group, where they are; all have the same ones."""
    for bucket in buckets(tensors):
        summed = carried(torch.cat([tensor.reshape(-1) for tensor in bucket]), group)
        if not summed.numel():  # empty pieces, in every process of the group
            continue
        dist.all_reduce(summed, group=group)
        for tensor, part in zip(bucket, summed.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def carried(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor where the messages of a group go from: NCCL's from the process's GPU, gloo's from where it is."""
    return tensor.cuda() if dist.get_backend(group) == "nccl" else tensor


def buckets(tensors: Iterable[Tensor], most_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, in their order, at most so many bytes each unless one alone is more."""
    found: list[list[Tensor]] = []
    filled: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        kind = (tensor.dtype, tensor.device)
        bucket, bytes_ = filled.get(kind, ([], most_bytes + 1))
        if bytes_ + size > most_bytes:
            bucket, bytes_ = [], 0
            found.append(bucket)
        bucket.append(tensor)
        filled[kind] = (bucket, bytes_ + size)
    return found


def each(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """What every process of a group gives (N,), in their order; N may differ."""
    mine = torch.tensor([len(values)], device=values.device)
    sizes = mine.new_empty(group.size())
    all_gather(sizes, mine, group)
    longest = int(sizes.max())
    if not longest:
        return [values] * group.size()
    filled = values.new_zeros(longest)
    filled[: len(values)] = values
    found = values.new_empty(group.size() * longest)
    all_gather(found, filled, group)
    parts = zip(found.view(-1, longest), sizes.tolist(), strict=True)
    return [part[:size] for part, size in parts]


def reduce_scatter(share: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
    """Sums the messages (parts · width,) of the processes; each gets its share (width,)."""
    _named("reduce_scatter_single", "reduce_scatter_tensor")(share, message, group=group)


def all_gather(message: Tensor, share: Tensor, group: dist.ProcessGroup) -> None:
    """Puts the shares (width,) of the processes one behind the other: (parts · width,), in each."""
    _named("all_gather_single", "all_gather_into_tensor")(message, share, group=group)


def _named(now: str, before: str) -> Any:
    """A function of torch.distributed by the name that it has since torch 2.13, or by that before."""
    return getattr(dist, now, None) or getattr(dist, before)
