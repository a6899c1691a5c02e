"""What the backward pass needs lies in the host's memory while the forward pass goes on, and comes back when asked for.

Moved are the activations that autograd saves; weights stay where they are. Copies go by the device's own stream, so
the device does not wait for them to begin, and what is written there is read back in order.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857, section 5.2.2 (activations on the CPU).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from afina.errors import ConfigError

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: their copy costs more than their place."""


class Offload:
    """Activations of one model's passes.

    Args:
        model: whose weights stay.
        device: where it computes.
        least_bytes: of a tensor that is moved.

    Attributes:
        moved_bytes: of all that was moved so far.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, least_bytes: int = LEAST_BYTES
    ) -> None:
        self._model, self._device, self._least = model, device, least_bytes
        self._pinned = device.type == "cuda"
        self._stay: set[int] = set()
        self.moved_bytes = 0

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Inside the block, what passes with a gradient save is moved."""
        held = [*self._model.parameters(), *self._model.buffers()]
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in held}
        with saved_tensors_hooks(self._away, self._back):
            yield

    def _away(self, tensor: Tensor) -> Tensor:
        """What is kept of a saved tensor."""
        stays = (
            tensor.device != self._device
            or tensor.nbytes < self._least
            or tensor.untyped_storage().data_ptr() in self._stay
        )
        if stays:
            # Not the tensor itself, which would hold its own graph and never be freed.
            return tensor.detach()
        self.moved_bytes += tensor.nbytes
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return kept.copy_(tensor.detach(), non_blocking=True)

    def _back(self, kept: object) -> Tensor:
        """The saved tensor."""
        return cast("Tensor", kept).to(self._device, non_blocking=True)


@contextmanager
def offloaded(
    model: nn.Module, device: torch.device, *, wanted: bool = True
) -> Generator[None, None, None]:
    """Inside the block activations of the model's passes are moved; with `wanted` False nothing changes."""
    if not wanted:
        yield
        return
    with Offload(model, device).running():
        yield


def refuse_idle_offload(device: torch.device) -> None:
    """Raises where there is no other memory to move to.

    Raises:
        ConfigError: the run computes on a CPU.
    """
    if device.type == "cpu":
        raise ConfigError(
            "train.offload_activations would do nothing: on a CPU the host's memory is the device's",
            got=str(device),
            wanted="a GPU",
            cure="leave it out; train.recompute=true keeps less on a CPU too",
        )
