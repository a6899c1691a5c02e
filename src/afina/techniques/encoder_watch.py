"""What a block's attention is given: queries, keys and mask, as they come to Transformers' `AttentionInterface`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from afina.errors import TechniqueError

_NAME = "afina_watched"
CALL = "afina_watch"
"""The name under which a `Watch` comes to the attention function."""


@dataclass
class Watch:
    """What the attention of one call of a block was given.

    Attributes:
        own: the name of the attention function that computes.
        q_BHTD: queries; None until it was called.
        k_BHSD: keys.
        mask: as the function takes it.
        scale: of the scores.
    """

    own: str
    q_BHTD: Tensor | None = None
    k_BHSD: Tensor | None = None
    mask: Tensor | None = None
    scale: float = 1.0

    @property
    def given(self) -> tuple[Tensor, Tensor]:
        """Queries and keys.

        Raises:
            TechniqueError: the block's attention did not come by.
        """
        if self.q_BHTD is None or self.k_BHSD is None:
            raise TechniqueError(
                "token_pruning: the attention of this model is not taken from Transformers' interface, so how much "
                "tokens are looked at is not known",
            )
        return self.q_BHTD, self.k_BHSD


@contextmanager
def watched(block: nn.Module) -> Generator[Watch, None, None]:
    """Inside the block the attention of a model's block tells the watch what it is given, and computes as before.

    The watch must go with the call, as the keyword `CALL`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _interface)  # pyright: ignore[reportUnknownMemberType]
    configs: list[Any] = list(
        {
            id(module.config): module.config
            for module in block.modules()
            if hasattr(getattr(module, "config", None), "_attn_implementation")
        }.values()
    )
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield Watch(before[0] if before else "")
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _interface(
    module: nn.Module,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> Any:
    """What Transformers calls."""
    watch: Watch | None = others.pop(CALL, None)
    if watch is None:
        raise TechniqueError(
            "token_pruning: this model does not hand down to its attention what its blocks are called with",
            got=type(module).__name__,
        )
    unknown = [name for name in ("position_bias", "softcap") if others.get(name) is not None]
    if unknown:
        raise TechniqueError(
            "token_pruning: this model's attention has a part that is not known here",
            got=", ".join(unknown),
        )
    if watch.q_BHTD is None:
        watch.q_BHTD, watch.k_BHSD, watch.mask = q_BHTD, k_BHSD, attention_mask
        scale = others.get("scaling")
        watch.scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    return _own(module, watch.own)(module, q_BHTD, k_BHSD, v_BHSD, attention_mask, **others)


def _own(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function of that name; the eager one each family of models has for itself."""
    from transformers import AttentionInterface

    known: dict[str, Callable[..., Any]] = dict(cast("Any", AttentionInterface()))
    return known.get(name) or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
