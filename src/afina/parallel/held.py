"""What a process holds of what trains, and what the processes tell each other about it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn

from afina.errors import ConfigError
from afina.parallel.copies import Copies, Groups
from afina.parallel.full_shard import FullShards
from afina.parallel.plan import Plan
from afina.parallel.runtime import Micro, Named
from afina.parallel.zero import Shards

T = TypeVar("T")

if TYPE_CHECKING:
    from afina.parallel.processes import Processes


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

    def within(self, call: Callable[[], T]) -> T:
        """What a pass gives."""
        ...

    def opened(self) -> AbstractContextManager[None]:
        """Inside the block the model may be called by anyone, without a gradient and in all processes alike."""
        ...

    def kept(self, *, train: bool) -> AbstractContextManager[None]:
        """Inside the block passes of a window follow each other as they like; processes make any number of them.

        Args:
            train: they are run backward.
        """
        ...

    def begin(self) -> None:
        """Before the first pass of a window."""
        ...

    def taken(self, micro: Micro) -> float | None:
        """Takes a micro-batch through the model, and back where it trains; None where nothing in it counts."""
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

    Raises:
        ConfigError: tensors, or a device, that the plan does not go with.
    """
    groups = Groups(*(mesh.group(name) for name in Groups._fields))
    plan = mesh.plan
    if not plan.zero or plan.shard == 1:
        return Copies(groups.data)
    if plan.zero == 3:
        refuse_offload(plan, mesh.device)
        return FullShards(
            model, tensors, groups, mesh.mesh["shard"], offload=plan.offload, holds=mesh.holds
        )
    return Shards(tensors, groups, every_round=plan.zero > 1, early=plan.pipeline == 1)


def refuse_offload(plan: Plan, device: torch.device) -> None:
    """Raises where pieces are to lie in the CPU and are there anyway.

    Raises:
        ConfigError: saying so.
    """
    if plan.offload and device.type == "cpu":
        raise ConfigError(
            "parallel.offload keeps in the CPU what a GPU computes with, and there is no GPU here",
            got="offload true, computing on the CPU",
            cure="leave parallel.offload out",
        )
