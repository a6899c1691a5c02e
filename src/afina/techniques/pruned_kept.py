"""Kept tokens in the form that a block is called with, packed in one line or padded in several; and the way back.

In padded lines rows keep different numbers of tokens. The shorter ones are filled up behind their last token with
copies of it, which no real token sees, and which are nowhere put back.

Legend: B rows, T tokens, L = B · T, N kept tokens, K the most that a row keeps, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from afina.errors import ModelError
from afina.ops import prefix
from afina.ops.pruning import shortened
from afina.types import Context, Layout

KEYWORD = "afina_pruning"
"""The keyword of the model call under which what it prunes travels to the blocks."""

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class Kept:
    """Tokens of a call that are kept.

    Attributes:
        places_N: in the call's tokens, row after row; in order.
        shape: rows and tokens of the call.
        at_BK: of padded lines, which of the kept tokens stands where; None where rows lie packed.
        real_BK: where no filling stands.
        layouts: by the lengths of the rows; all lines of a call share them.
        made: what was shortened already, by identity, with what it was made of.
    """

    places_N: Tensor
    shape: tuple[int, int]
    at_BK: Tensor | None
    real_BK: Tensor | None
    layouts: dict[tuple[int, ...], Layout]
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, "tuple[Any, Any]"])

    @staticmethod
    def of(
        mask_L: Tensor,
        shape: tuple[int, int],
        *,
        packed: bool,
        layouts: dict[tuple[int, ...], Layout],
    ) -> Kept:
        """Those that a mask over the call's tokens keeps."""
        places_N = mask_L.nonzero()[:, 0]
        if packed:
            return Kept(places_N, shape, None, None, layouts)
        counts_B = mask_L.view(shape).sum(1)
        steps_K = torch.arange(max(1, int(counts_B.max())), device=mask_L.device)
        real_BK = steps_K < counts_B[:, None]
        within_BK = torch.minimum(steps_K, (counts_B[:, None] - 1).clamp(min=0))
        firsts_B = counts_B.cumsum(0) - counts_B
        at_BK = (firsts_B[:, None] + within_BK).clamp(max=len(places_N) - 1)
        return Kept(places_N, shape, at_BK, real_BK, layouts)

    # --- tensors of tokens -----------------------------------------------------------------------------------------

    def form(self, tokens_ND: Tensor) -> Tensor:
        """What belongs to the kept tokens, as the block takes it: (1, N, …) or (B, K, …)."""
        if self.at_BK is None:
            return tokens_ND[None]
        lines = tokens_ND.index_select(0, self.at_BK.flatten())
        return lines.view(*self.at_BK.shape, *tokens_ND.shape[1:])

    def tokens(self, formed: Tensor) -> Tensor:
        """The reverse of `form` (N, …)."""
        return formed[0] if self.real_BK is None else formed[self.real_BK]

    def take(self, x_BTD: Tensor) -> Tensor:
        """Of all tokens the kept ones, as the block takes them."""
        return self.form(x_BTD.flatten(0, 1).index_select(0, self.places_N))

    def put(self, x_BTD: Tensor, formed: Tensor) -> Tensor:
        """All tokens, with these in the places of the kept ones."""
        flat_LD = x_BTD.flatten(0, 1)
        return flat_LD.index_copy(0, self.places_N, self.tokens(formed)).view(x_BTD.shape)

    # --- what else a block is called with ----------------------------------------------------------------------------

    def arguments(self, base: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        """What a block is called with beside its states, for the kept tokens alone.

        Raises:
            ModelError: there is something of which it is not known how to shorten it.
        """
        return {name: self._argument(base, name, value) for name, value in named.items()}

    def _argument(self, base: nn.Module, name: str, value: Any) -> Any:
        if name in CACHES:
            return None  # not read in training, and of other tokens in every block
        if name == "use_cache":
            return False
        if isinstance(value, prefix.Prefix):
            # A call of some of its tokens is not one whose cache forgot the others.
            return replace(value, seen=0)
        if not _is_made(value):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = (value, self._shorten(base, name, value))
        return self.made[id(value)][1]

    def _shorten(self, base: nn.Module, name: str, value: Any) -> Any:
        if isinstance(value, Context):
            return self._context(value)
        if isinstance(value, tuple):
            return tuple(self._shorten(base, name, part) for part in cast("tuple[Any, ...]", value))
        if not isinstance(value, Tensor):
            return value
        rows, length = self.shape
        if name == "attention_mask" and value.dim() == 4 and value.shape[2:] == (length, length):
            return self._square(value)
        if name == "attention_mask" and value.shape == (rows, length):
            return self._flat(value)
        by_token = name in ("position_ids", "position_embeddings") and value.dim() >= 2
        if by_token and value.shape[1] == length and value.shape[0] in (1, rows):
            return self.take(value.expand(rows, *value.shape[1:]))
        if length not in value.shape:
            return value
        raise ModelError(
            "token pruning does not know something that this model's blocks are called with",
            got=f"{type(base).__name__}: {name} of shape {tuple(value.shape)}",
            wanted="masks, positions and what is made of them",
            cure="leave token_pruning out",
        )

    def _context(self, context: Context) -> Context:
        if context.layout is not None:
            return shortened(context, self.places_N, self.layouts)
        segments_BK = self.take(context.segments_BT)
        if self.real_BK is not None:
            segments_BK = segments_BK.masked_fill(~self.real_BK, -1)
        positions_BK = self.take(context.positions_BT)
        return replace(context, segments_BT=segments_BK, positions_BT=positions_BK)

    def _flat(self, mask_BT: Tensor) -> Tensor:
        mask_BK = self.take(mask_BT)
        return mask_BK if self.real_BK is None else mask_BK * self.real_BK.to(mask_BK.dtype)

    def _square(self, mask: Tensor) -> Tensor:
        """A mask of queries and keys (B or 1, 1 or H, T, T), bool or a term of the scores."""
        rows, length = self.shape
        columns_BK = self.form(self.places_N % length)
        lines_B = torch.arange(rows, device=mask.device)[:, None, None]
        square = mask.expand(rows, -1, -1, -1).transpose(0, 1)
        small = square[:, lines_B, columns_BK[:, :, None], columns_BK[:, None, :]].transpose(0, 1)
        if self.real_BK is None:
            return small
        # Filling is seen by itself alone: each of its softmaxes is finite, and no other knows of it.
        hidden = ~self.real_BK[:, None, None, :]
        own = torch.diag_embed(~self.real_BK)[:, None]
        if small.dtype == torch.bool:
            return (small & ~hidden) | own
        least = torch.finfo(small.dtype).min
        return small.masked_fill(hidden, least).masked_fill(own, 0.0)


def _is_made(value: Any) -> bool:
    """Whether something may hold a number a token."""
    return isinstance(value, Tensor | tuple | Context)


# --- a block's call --------------------------------------------------------------------------------------------------


def named_arguments(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The states that a block is called with, and all else by name.

    Raises:
        ModelError: what it is called with first is no tensor of states.
    """
    names = _names(type(base))
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden = named.pop(names[0], None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise ModelError(
            "what this model's blocks are called with is not known",
            got=type(base).__name__,
            wanted="states of (rows, tokens, width) before all else",
            cure="leave token_pruning out",
        )
    return hidden, named


@cache
def _names(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def exchanged(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a block gives, with its states changed."""
    if isinstance(output, tuple):
        several = cast("tuple[Any, ...]", output)
        return (change(several[0]), *several[1:])
    return change(output)


def states_of(output: Any) -> Tensor:
    """The states that a block gives."""
    return cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) else output
