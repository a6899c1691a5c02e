"""Keys and values that are learnt, in the place of those of a row's first positions.

It happens inside attention, behind rotary positions and the cache, which both know nothing of it: mask, cache and
recomputation go on as if these were a row's tokens. Entered through Transformers' `AttentionInterface`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina.errors import ModelError
from afina.types import Context

KEYWORD = "afina_prefix"
"""The keyword of the model call under which a `Prefix` travels to the attention function."""

_END = "_with_prefix"


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the first n positions of every row.

    Attributes:
        pairs: of each layer, keys and values (H, n, D), H those that a model has of them.
        seen: positions of a row up to the end of this call, those in a cache among them; for packed rows 0.
        used: layers that took theirs in this call.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    seen: int
    used: set[int] = field(default_factory=set[int])

    def into(
        self, module: nn.Module, k: Tensor, v: Tensor, context: Context | None
    ) -> tuple[Tensor, Tensor]:
        """The keys and values (B, H, S, D) of a layer with these in their places.

        Args:
            module: the layer's attention.
            k: its keys; from a cache that forgets, the last S positions.
            v: its values.
            context: of packed rows (B = 1); None where each line is a row, whose cache begins at its first position.

        Raises:
            ModelError: this model's keys or values are of another form.
        """
        layer = int(cast("Any", module).layer_idx)
        own = self.pairs[layer]
        self.used.add(layer)
        for mine, theirs in zip(own, (k, v), strict=True):
            if (mine.shape[0], mine.shape[2]) != (theirs.shape[1], theirs.shape[3]):
                raise ModelError(
                    "this model's keys or values are of another form than its config says",
                    got=f"{theirs.shape[1]} heads of {theirs.shape[3]}",
                    wanted=f"{mine.shape[0]} heads of {mine.shape[2]}",
                )
        if context is not None:
            return tuple(  # type: ignore[return-value]
                in_rows(mine, x, context) for mine, x in zip(own, (k, v), strict=True)
            )
        forgotten = max(0, self.seen - k.shape[2])
        return tuple(  # type: ignore[return-value]
            in_front(mine[:, forgotten:], x) for mine, x in zip(own, (k, v), strict=True)
        )


def in_front(own_HnD: Tensor, x_BHSD: Tensor) -> Tensor:
    """Keys or values with these in the place of the first."""
    count = own_HnD.shape[1]
    front = own_HnD.to(x_BHSD.dtype).expand(x_BHSD.shape[0], -1, -1, -1)
    return torch.cat((front, x_BHSD[:, :, count:]), dim=2)


def in_rows(own_HnD: Tensor, x_1HTD: Tensor, context: Context) -> Tensor:
    """The same for rows that lie end to end in one line."""
    count = own_HnD.shape[1]
    positions_T = context.positions_BT[0]
    first_T = (positions_T < count) & (context.segments_BT[0] >= 0)
    # Picked before it is rounded, so that what comes back from all rows is summed in the prefix's own dtype.
    picked = own_HnD.index_select(1, positions_T.clamp(max=count - 1)).to(x_1HTD.dtype)
    return torch.where(first_T[:, None], picked, x_1HTD)


# --- through Transformers ------------------------------------------------------------------------------------------


class Entered(RemovableHandle):
    """A model whose attention looks for a `Prefix`; `remove` gives it back its own."""

    def __init__(self, model: nn.Module) -> None:
        """Exchanges the attention function.

        Raises:
            ModelError: the model does not take it from Transformers' interface.
        """
        super().__init__(OrderedDict[int, Any]())
        self.model: Any = model
        self.before = self.model.config._attn_implementation
        name = knowing(self.before)
        self.model.set_attn_implementation(name)
        if self.model.config._attn_implementation != name:
            raise ModelError(
                "this model's attention cannot be given keys and values from outside",
                got=type(model).__name__,
                wanted="a model that takes its attention from Transformers' AttentionInterface",
            )

    def remove(self) -> None:
        """The model's own attention again, unless somebody chose another since."""
        if self.model.config._attn_implementation == knowing(self.before):
            self.model.set_attn_implementation(self.before)


def knowing(inner: str) -> str:
    """The name of the attention function that looks for a `Prefix`, and then does as the one called `inner` does."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{inner}{_END}"
    functions: Any = AttentionInterface()
    masks: Any = AttentionMaskInterface()
    if name not in functions:
        AttentionInterface.register(name, partial(_attend, inner))  # pyright: ignore[reportUnknownMemberType]
        if inner in masks:
            AttentionMaskInterface.register(name, masks[inner])  # pyright: ignore[reportUnknownMemberType]
    return name


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
def _attend(
    inner: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """What Transformers calls: the function `inner`, with the prefix in its place."""
    prefix = kwargs.pop(KEYWORD, None)
    if prefix is not None:
        k, v = prefix.into(module, k, v, None)
    return _function(inner, module)(module, q, k, v, *args, **kwargs)


def _function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of that name; the written-out one is each model's own."""
    from transformers import AttentionInterface

    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    functions: Any = AttentionInterface()
    return functions.get_interface(name, own)
