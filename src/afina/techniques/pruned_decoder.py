"""Token pruning of decoders: which blocks, and what is told to their children in training."""

from __future__ import annotations

from torch import nn

from afina import seams
from afina.errors import TechniqueError


def is_causal(model: nn.Module, key: str) -> bool:
    """Whether a token sees no later one.

    Args:
        model: any.
        key: of the technique that asks.

    Raises:
        TechniqueError: the model's attention does not say.
    """
    seams.require_stack(model, key)
    said = {
        flag
        for block in seams.blocks(model)
        for module in block.module.modules()
        if isinstance(flag := getattr(module, "is_causal", None), bool)
    }
    if not said:
        raise TechniqueError(
            f"{key}: whether a token of this model sees later ones is not known",
            got=type(model).__name__,
            wanted="attention that has is_causal, as Transformers' own models have",
        )
    # Attention to an encoder's states is never causal; attention to the row itself tells.
    return True in said
