"""What one call of a model prunes: its tokens, their rows, the step; and the child of the trunk that begins it.

It travels with the call as a keyword, so that a block that is recomputed in backward finds what was chosen, and
chooses nothing anew.

Legend: B rows, T tokens, L = B · T, R rows as they are counted where several lie in one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina.errors import ModelError
from afina.ops.pruning import ramped
from afina.techniques.pruned_kept import CACHES, KEYWORD, Kept
from afina.techniques.pruned_scores import LossTable
from afina.tree import Delta, front_of
from afina.types import IGNORE, Batch, Context, Layout

if TYPE_CHECKING:
    from afina.techniques.token_pruning import TokenPruning


@dataclass(frozen=True)
class Told:
    """What the training loop says of a micro-batch.

    Attributes:
        step: counted from 0.
        rows: ids of the rows.
        trained_BT: tokens whose state a loss is made of.
    """

    step: int
    rows: tuple[int, ...]
    trained_BT: Tensor

    @staticmethod
    def of(batch: Batch, step: int) -> Told:
        """Of the micro-batch that comes next."""
        if batch.labels_B is not None:
            return Told(step, batch.rows, torch.zeros_like(batch.tokens_BT, dtype=torch.bool))
        return Told(step, batch.rows, batch.targets_BT != IGNORE)


@dataclass(frozen=True)
class Line:
    """All tokens of a call, row after row.

    Attributes:
        shape: rows and tokens of the call.
        packed: rows lie end to end in one line.
        segments_L: number of the row; -1 is padding.
        places_L: place in its row, from 0.
        rows_L: id of the row.
        ids_L: of the vocabulary; below 0 where there is none; None where the call has no ids.
        front: places in front of every row that something put there.
    """

    shape: tuple[int, int]
    packed: bool
    segments_L: Tensor
    places_L: Tensor
    rows_L: Tensor
    ids_L: Tensor | None
    front: int

    @property
    def real_L(self) -> Tensor:
        """Where there is a token."""
        return self.segments_L >= 0

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.places_L.max()) + 1

    @property
    def last_L(self) -> Tensor:
        """Where a row ends."""
        real_L = self.real_L
        order_L = torch.arange(len(real_L), device=real_L.device)
        ends = torch.full((int(self.segments_L.max()) + 1,), -1, device=real_L.device)
        ends.scatter_reduce_(0, self.segments_L[real_L], order_L[real_L], "amax")
        last_L = torch.zeros_like(real_L)
        last_L[ends[ends >= 0]] = True
        return last_L


@dataclass
class Pass:
    """One call of the model in training.

    Attributes:
        line: its tokens.
        stays_L: tokens that no block may drop.
        share: of its own tokens that a row keeps where it is pruned.
        step: of the run, from 0.
        told: whether the training loop knows of this call.
        hard_L: running loss of each token's id; None where it is not kept.
        layouts: by the lengths of the rows.
        chosen: by block, what it was given and what it keeps; None where that is everything.
        reached: blocks that were.
        here: what is left after a cut; None before.
        aside_BTD: the states of all tokens when the last cut was made.
    """

    line: Line
    stays_L: Tensor
    share: float
    step: int
    told: bool
    hard_L: Tensor | None = None
    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict[tuple[int, ...], Layout])
    chosen: dict[int, tuple[Kept | None, Kept | None]] = field(
        default_factory=dict[int, "tuple[Kept | None, Kept | None]"]
    )
    reached: set[int] = field(default_factory=set[int])
    here: Kept | None = None
    aside_BTD: Tensor | None = None

    def kept(self, mask_L: Tensor) -> Kept | None:
        """Those that a mask over all tokens keeps; None where it keeps every one."""
        if bool((mask_L == self.line.real_L).all()):
            return None
        return Kept.of(mask_L, self.line.shape, packed=self.line.packed, layouts=self.layouts)

    @property
    def segments_L(self) -> Tensor:
        """Number of the row of each token that is still there; -1 of others."""
        if self.here is None:
            return self.line.segments_L
        left_L = torch.full_like(self.line.segments_L, -1)
        places_N = self.here.places_N
        return left_L.index_copy(0, places_N, self.line.segments_L[places_N])


class Entry(Delta):
    """Begins a pass at the trunk's every call in training.

    Attributes:
        by_row: rows are computed apart, for what is dropped of one is not what is dropped of another.
        settings: of the technique.
        blocks: numbers of those that have children.
        total_steps: of the run; None outside of one, where the share does not change.
        told: of the next call.
        table: the running loss of each id, where that is the score.
    """

    by_row: ClassVar[bool] = True
    alone: ClassVar[str] = "each chooses the tokens that stay"
    scalable: ClassVar[bool] = False

    def __init__(
        self,
        settings: TokenPruning,
        blocks: Sequence[int],
        table: LossTable | None,
        *,
        cuts: bool,
        ends_stay: bool,
    ) -> None:
        """Nothing was told yet.

        Args:
            settings: of the technique.
            blocks: numbers of those that have children.
            table: the running loss of each id; None where it is no score.
            cuts: tokens stay out, so that those that train must be known.
            ends_stay: the last token of a row stays too: a classifier of rows reads it.
        """
        super().__init__()
        self.only_in_training = True
        self.settings, self.blocks = settings, tuple(blocks)
        self.cuts, self.ends_stay = cuts, ends_stay
        self.table = table
        self.told: Told | None = None
        self.total_steps: int | None = None

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """What the trunk gave: it is changed further down."""
        return y

    def reset(self, seed: int) -> None:
        """The running losses begin anew."""
        if self.table is not None:
            self.table.reset()

    def hooks(self, module: nn.Module, key: str) -> Sequence[RemovableHandle]:
        """Before the trunk, and in front of those who put something in front of rows; and behind it."""
        begins, ends = _Begins(key), _Ends(key)
        return [
            module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
            module.register_forward_hook(ends, with_kwargs=True),
        ]

    def kept(self, step: int) -> float:
        """Of its own tokens what a row keeps at a step, from 0."""
        ramp = self.settings.ramp * (self.total_steps or 0)
        return ramped(step, ramp, self.settings.ramp_from, self.settings.keep)

    def begin(self, module: nn.Module, named: dict[str, Any]) -> Pass | None:
        """The pass of a call; None where nothing is pruned in it.

        Raises:
            ModelError: the call has a cache.
        """
        told, self.told = self.told, None
        _refuse_cache(named)
        # What is cut off has no loss, and outside of a run nobody says which tokens have one.
        line = None if self.cuts and told is None else _line(module, named, told)
        if line is None:
            return None
        context: Context | None = named.get("afina_context")
        step = 0 if told is None else told.step
        if told is None and context is not None and context.step is not None:
            step = int(context.step)
        stays_L = line.places_L < line.front + self.settings.always
        if self.ends_stay:
            stays_L = stays_L | line.last_L
        if self.cuts and told is not None:
            # Places that are put in front of this call come before all that it has.
            added = line.shape[1] - told.trained_BT.shape[1]
            stays_L = stays_L | F.pad(told.trained_BT, (added, 0)).flatten()
        hard_L = None if self.table is None else self.table.of(line.ids_L)
        share = self.kept(step)
        return Pass(line, stays_L & line.real_L, share, step, told is not None, hard_L)


def _refuse_cache(named: dict[str, Any]) -> None:
    if any(named.get(name) is not None for name in CACHES):
        raise ModelError(
            "a model that prunes tokens in training has no use for a cache: what it drops is not in it",
            got="a call in training mode with a cache",
            cure="model.eval() first: a decoder that is asked runs whole",
        )


def _line(module: nn.Module, named: dict[str, Any], told: Told | None) -> Line | None:
    """The tokens of a call; None where it has none."""
    ids_BT, states_BTD = named.get("input_ids"), named.get("inputs_embeds")
    given = states_BTD if ids_BT is None else ids_BT
    if given is None or given.numel() == 0:
        return None
    context: Context | None = named.get("afina_context")
    front = front_of(module)
    packed = context is not None and context.layout is not None
    if context is not None:
        segments_BT, places_BT = context.segments_BT, context.positions_BT
        segments_L = (segments_BT if packed else _numbered(segments_BT >= 0)).flatten()
        places_L = (places_BT if packed else _places(segments_BT >= 0)).flatten()
    else:
        real_BT = _real(named.get("attention_mask"), given)
        # Places in front are put there behind this, at the beginning of every line.
        real_BT = F.pad(real_BT, (front, 0), value=True)
        ids_BT = None if ids_BT is None else F.pad(ids_BT, (front, 0), value=-1)
        segments_L, places_L = _numbered(real_BT).flatten(), _places(real_BT).flatten()
    shape = (given.shape[0], segments_L.numel() // given.shape[0])
    rows_L = segments_L
    if told is not None:
        names_R = torch.tensor(told.rows, device=segments_L.device)
        rows_L = names_R[segments_L.clamp(min=0)]
    ids_L = None if ids_BT is None else ids_BT.flatten()
    return Line(shape, packed, segments_L, places_L, rows_L, ids_L, front)


def _real(mask: Any, given: Tensor) -> Tensor:
    """Where a call has tokens (B, T); everywhere, unless its mask has one number a token."""
    shape = given.shape[:2]
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask > 0
    return torch.ones(shape, dtype=torch.bool, device=given.device)


def _numbered(real_BT: Tensor) -> Tensor:
    """The number of each line at its tokens; -1 at padding."""
    numbers = torch.arange(real_BT.shape[0], device=real_BT.device)[:, None]
    return torch.where(real_BT, numbers, -1)


def _places(real_BT: Tensor) -> Tensor:
    """The place of each token in its row, padding not counted."""
    return (real_BT.long().cumsum(1) - 1).clamp(min=0)


class _Begins:
    """Looks the child up in the module it is given, so that a deep copy uses its own."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        entry: Entry = getattr(module, self.key)
        if not entry.acts or not module.training:
            return None
        names = list(inspect.signature(module.forward).parameters)
        begun = entry.begin(module, {**dict(zip(names, args, strict=False)), **kwargs})
        return None if begun is None else (args, {**kwargs, KEYWORD: begun})


class _Ends:
    """Looks whether the pass has reached every block that prunes, and gives out no cache of some of the tokens."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        begun: Pass | None = kwargs.get(KEYWORD)
        if begun is None:
            return output
        missing = sorted(set(getattr(module, self.key).blocks) - begun.reached)
        if missing:
            raise ModelError(
                "this model does not hand on to its blocks what they are to prune",
                got=f"{type(module).__name__}: blocks {', '.join(map(str, missing))} were not told",
                wanted="a model that hands its keywords down",
                cure="leave token_pruning out",
            )
        for name in CACHES:
            if getattr(output, name, None) is not None:
                output[name] = None
        return output
