"""The shorter rows of an encoder's blocks: which tokens they hold, and what each block is given in place of whole rows.

Between blocks rows are whole: what a block computed is written to the places of its tokens, and what left keeps the
state that it had. So every head finds its tokens where they are, and only the blocks are given less.

Legend: B rows, T tokens, S = T places of a row or T + 1 with the fused token's, R columns of shorter rows, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.ops.merging import read

CALL = "afina_journey"
"""The name under which a pass's `Journey` comes to the blocks."""

_HIDDEN, _MASK = "hidden_states", "attention_mask"
_BY_POSITION = ("position_ids", "position_embeddings")


@dataclass(frozen=True)
class Columns:
    """The tokens that a block is given.

    Attributes:
        place_BR: where each is read in its row; T is the fused token's place.
        position_BR: the position that masks and rotary embeddings know it by.
        real_BR: False in padding.
        column_BS: of each place of a row the column that is written there; -1 leaves it.
        size_BR: how many tokens each stands for, where that counts in attention; else None.
        fused: the last column is the fused token.
    """

    place_BR: Tensor
    position_BR: Tensor
    real_BR: Tensor
    column_BS: Tensor
    size_BR: Tensor | None = None
    fused: bool = False


@dataclass(frozen=True)
class Change:
    """What happens behind a block: computed once, and used again where the block is recomputed.

    Attributes:
        after: what the next blocks are given.
        weight_BR: of the columns that are fused into one; None where none are.
        column_BR: the column that each goes into, where some are merged; else None.
        size_BR: how many tokens each column stood for then.
    """

    after: Columns
    weight_BR: Tensor | None = None
    column_BR: Tensor | None = None
    size_BR: Tensor | None = None


@dataclass
class Journey:
    """One pass of a batch through the blocks. It holds no tensor with a gradient.

    Attributes:
        keep: share of the tokens that is left in the end.
        protected: first tokens of a row that are kept whatever comes.
        seed: of what is drawn.
        tokens: of a row, with its padding.
        real_BT: which tokens are no padding; None until the first block.
        given: what each block is given, by number; None for whole rows.
        masks: the mask of each block that is given shorter rows.
        changes: what happened behind blocks.
    """

    keep: float
    protected: int
    seed: int = 0
    tokens: int = 0
    real_BT: Tensor | None = None
    given: dict[int, Columns | None] = field(default_factory=dict[int, "Columns | None"])
    masks: dict[int, Tensor | None] = field(default_factory=dict[int, "Tensor | None"])
    changes: dict[int, Change] = field(default_factory=dict[int, "Change"])

    @property
    def count_B(self) -> Tensor:
        """How many tokens each row has."""
        assert self.real_BT is not None
        return self.real_BT.sum(1)


@dataclass(frozen=True)
class Given:
    """How a block was called, by the names of its arguments."""

    values: Mapping[str, Any]
    block: nn.Module

    @staticmethod
    def of(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        """The arguments of `block(*args, **kwargs)`."""
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        return Given({**dict(zip(names, args, strict=False)), **kwargs}, block)

    @property
    def rows_BSD(self) -> Tensor:
        """The states that enter the block."""
        return self.values[_HIDDEN]

    @property
    def mask(self) -> Tensor | None:
        """What the block's queries see."""
        return self.values.get(_MASK)

    def run(self, call: Callable[..., Any], more: Mapping[str, Any]) -> Tensor:
        """The block's result for the rows as they came, called with some keywords more."""
        return self._result(call, {**self.values, **more})

    def run_short(
        self,
        call: Callable[..., Any],
        columns: Columns,
        mask: Tensor | None,
        more: Mapping[str, Any],
    ) -> Tensor:
        """The block's result for shorter rows (B, R, D).

        Raises:
            TechniqueError: the block is given something by token that is not known here.
        """
        made: dict[str, Any] = dict(more)
        for name, value in self.values.items():
            if name == _HIDDEN:
                value = read(value, columns.place_BR)
            elif name == _MASK:
                value = mask
            elif name in _BY_POSITION:
                value = _at_positions(value, columns.position_BR)
            elif isinstance(value, Tensor):
                raise TechniqueError(
                    "token_pruning: a block is given something that may go by token, and how is not known",
                    got=f"{name}, of {type(self.block).__name__}",
                    cure="leave token_pruning out, or call the model without it",
                )
            made[name] = value
        return self._result(call, made)

    def _result(self, call: Callable[..., Any], values: Mapping[str, Any]) -> Tensor:
        result = call(**values)
        if not isinstance(result, Tensor):
            raise TechniqueError(
                "token_pruning knows blocks that return their states alone",
                got=f"{type(result).__name__} of {type(self.block).__name__}",
            )
        return result


def _at_positions(value: Any, position_BR: Tensor) -> Any:
    """Something by token, (B or 1, T, …) or a tuple of such, for the tokens of these positions."""
    if isinstance(value, tuple):
        return tuple(_at_positions(each, position_BR) for each in cast("tuple[Any, ...]", value))
    if not isinstance(value, Tensor):
        return value
    rows = value.expand(position_BR.shape[0], *value.shape[1:])
    index = position_BR.view(*position_BR.shape, *(1,) * (value.dim() - 2))
    return rows.gather(1, index.expand(*position_BR.shape, *value.shape[2:]))


# --- masks ---------------------------------------------------------------------------------------------------------


def real_tokens(mask: Tensor | None, rows_BTD: Tensor) -> Tensor:
    """Which tokens are no padding, as a mask for whole rows says: those that some token sees (B, T)."""
    b, tokens = rows_BTD.shape[:2]
    if mask is None:
        return torch.ones(b, tokens, dtype=torch.bool, device=rows_BTD.device)
    if mask.dim() == 2:
        return mask.bool().expand(b, tokens)
    return _seen(mask).any(dim=2).any(dim=1).expand(b, tokens)


def _seen(mask: Tensor) -> Tensor:
    """A mask as booleans: models that add it to scores say hidden with the type's lowest number, or nearly."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def short_mask(
    mask: Tensor | None, columns: Columns, rows_BSD: Tensor, *, flat: bool
) -> Tensor | None:
    """The mask of a block that is given shorter rows, of the kind that its attention takes.

    A matrix of all queries by all keys is made only where the model's own mask needs one: where queries differ in
    what they see, as under a window.

    Args:
        mask: for whole rows.
        columns: what the block is given.
        rows_BSD: for their type.
        flat: the attention takes masks of (B, R), as flash attention does.

    Raises:
        TechniqueError: attention that takes no term of its scores is to count merged tokens.
    """
    real, size = columns.real_BR, columns.size_BR
    if mask is None and size is None and bool(real.all()):
        return None
    if flat:
        if size is not None:
            raise TechniqueError(
                "token_pruning: merged tokens count in attention by how many they are, which this attention cannot be "
                "told",
                got="flash attention",
                wanted="sdpa",
                cure="load the model with attn_implementation='sdpa', or set token_pruning.score=attention",
            )
        return real.long()
    seen = real[:, None, None]
    if mask is not None and not _alike(mask):
        seen = _window(_seen(mask), columns)
    if size is None and mask is not None and mask.dtype == torch.bool:
        return seen
    lowest = torch.finfo(rows_BSD.dtype).min
    term = torch.zeros((), dtype=rows_BSD.dtype, device=rows_BSD.device)
    if size is not None:
        term = torch.where(real, size, 1).log().to(rows_BSD.dtype)[:, None, None]
    return torch.where(seen, term, lowest)


def takes_flat_masks(block: nn.Module) -> bool:
    """Whether a block's attention takes masks of (B, T)."""
    configs = (getattr(module, "config", None) for module in block.modules())
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return "flash" in next((name for name in names if name), "")


def _alike(mask: Tensor) -> bool:
    """Whether all queries see the same."""
    return mask.shape[2] == 1 or mask.stride(2) == 0 or bool((mask == mask[:, :, :1]).all())


def _window(seen_B1TT: Tensor, columns: Columns) -> Tensor:
    """What columns see of each other (B, 1, R, R), by their positions; padding sees all that is real."""
    position, real = columns.position_BR, columns.real_BR
    rows = seen_B1TT[:, 0].expand(position.shape[0], -1, -1)
    rows = rows.gather(1, position[:, :, None].expand(-1, -1, rows.shape[2]))
    rows = rows.gather(2, position[:, None].expand(-1, rows.shape[1], -1))
    return ((rows | ~real[:, :, None]) & real[:, None])[:, None]
