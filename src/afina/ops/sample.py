"""A few values of a tensor that tell it from another: what fingerprints are made of, and what a packed weight keeps."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 64
"""Values of each tensor that are looked at; of a tensor that is no larger, all."""

_STRIDE = 2654435761
"""A large prime: its multiples, modulo the size of a tensor, fall into all rows and columns."""


def sample(tensor: Tensor) -> Tensor:
    """Up to `SAMPLES` values of a tensor, spread over it, on its device."""
    places = torch.arange(min(SAMPLES, tensor.numel()), device=tensor.device) * _STRIDE
    return tensor.reshape(-1)[places % max(1, tensor.numel())]
