"""What a linear map is, and how its weight lies."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from afina.ops.packed import dense

MapKind = Literal["linear", "conv1d", "embedding"]


def map_kind(module: nn.Module) -> MapKind | None:
    """What kind of map a module is; None for all that is none."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    # Transformers' Conv1D is a linear map whose weight is stored (in, out); asked by shape, not by import.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    return None


def features(module: nn.Module, kind: MapKind) -> tuple[int, int]:
    """How many numbers a map takes (an embedding: how many ids) and gives."""
    weight = module.get_parameter("weight")
    first, second = weight.shape
    return (first, second) if kind in ("conv1d", "embedding") else (second, first)


ELSEWHERE = "afina_bias_elsewhere"
"""The attribute of a map whose bias another process adds: where several share the map out, each has a part of a sum."""

PART = "afina_part"
"""The attribute of a head that processes share out: which part of the vocabulary is here (`ops.loss.Part`)."""


def bias_of(module: nn.Module) -> Tensor | None:
    """The bias that a map adds here; None where it has none, or where another process adds it."""
    return None if getattr(module, ELSEWHERE, False) else getattr(module, "bias", None)


def weight_of(module: nn.Module) -> Tensor:
    """The weight that a map computes with, as it is stored, without its gradient: what to read a base's values by.

    Args:
        module: a linear, `Conv1D` or embedding; a quantised weight is computed back.

    Returns:
        A floating-point tensor: of a linear (out, in), of a `Conv1D` (in, out). To be read and not written, for it may
        be the model's own.
    """
    return dense(module.get_parameter("weight"))
