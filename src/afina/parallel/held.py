"""What a process holds of what trains, and what the processes tell each other about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afina.errors import ConfigError
from afina.parallel.runtime import Named

if TYPE_CHECKING:
    from afina.parallel.processes import Processes

BUCKET_BYTES = 64 * 2**20
"""Gradients are summed so many bytes at a time: few large messages, and little memory beside the gradients."""


class Held(Protocol):
    """How one stage of sharing out holds what trains; the methods are those of `Mesh`.

    Attributes:
        whole: this process owns every tensor whole.
        in_rounds: the processes talk in every pass, so that all must make equally many.
    """

    whole: bool
    in_rounds: bool

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """What this process moves."""
        ...

    def passed(self, tensors: Named) -> None:
        """After the backward pass of each round."""
        ...

    def reduce(self, tensors: Named) -> None:
        """After a window's last pass."""
        ...

    def publish(self, tensors: Named) -> None:
        """After what is owned has moved."""
        ...


def held(mesh: Processes, model: nn.Module, tensors: Named) -> Held:
    """What a process holds by the mesh's plan.

    Args:
        mesh: the processes, which have met.
        model: with its values, the same in all of them.
        tensors: that train, by name.
    """
    if mesh.plan.zero:
        raise ConfigError("parallel.zero is not there yet", got=mesh.plan.zero, wanted="0")
    return Copies(mesh.group("data"))


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

    def passed(self, tensors: Named) -> None:
        """Nothing is told before the window's end."""

    def reduce(self, tensors: Named) -> None:
        """Sums gradients in place; a tensor that got none here takes part with zeros, if another process has one."""
        if self.group is None or self.group.size() == 1:
            return
        names = list(tensors)
        there = torch.tensor([float(tensors[n].grad is not None) for n in names])
        dist.all_reduce(there, group=self.group)
        for name, many in zip(names, there.tolist(), strict=True):
            if many and tensors[name].grad is None:
                tensors[name].grad = torch.zeros_like(tensors[name])
        found = [p.grad for p in tensors.values() if p.grad is not None]
        for bucket in buckets(found):
            summed = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(summed, group=self.group)
            for gradient, part in zip(
                bucket, summed.split([g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))

    def publish(self, tensors: Named) -> None:
        """Every process moved them alike."""


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
