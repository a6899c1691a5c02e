"""Models that prune known tokens, and the same by whole blocks in which those tokens' keys are hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from afina import seams
from afina.data.packing import collate
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.head import head_of
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.pruned_blocks import PrunedBlock
from afina.techniques.pruned_kept import named_arguments
from afina.techniques.pruned_pass import Entry, Pass
from afina.techniques.pruned_scores import Chooser
from afina.techniques.token_pruning import TokenPruning
from afina.train.passes import Passes
from afina.tree import Around, Edit, Technique
from afina.types import Row
from tests import battery

Choice = Mapping[int, Sequence[int]]
"""Row -> the places that are kept of it."""

ROWS = (
    battery._row(4, (3, 9, 27, 14, 8, 31, 22, 10, 5), 3),
    battery._row(9, (12, 33, 4, 21), 1),
    battery._row(2, (7, 7, 30, 2, 19, 38, 1), 2),
    battery._row(5, (11,) * 6, 4),
)
CHOICE: Choice = {4: (0, 1, 4, 7, 8), 9: (0, 3), 2: (0, 2, 3, 5), 5: (0, 1, 2, 3, 4, 5)}


class Fixed(Chooser):
    """Keeps what it is told to, whatever comes in."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice

    def choose(self, states_LD: Tensor, here: Pass) -> Tensor:
        line = here.line
        wanted = {(row, place) for row, places in self.choice.items() for place in places}
        pairs = zip(line.rows_L.tolist(), line.places_L.tolist(), strict=True)
        chosen_L = torch.tensor([pair in wanted for pair in pairs]) | here.stays_L
        return (here.segments_L >= 0) & chosen_L


class Hidden(Around):
    """The whole block on one row, with the dropped tokens' keys hidden, and those tokens passing it by."""

    def __init__(self, kept: Sequence[int]) -> None:
        super().__init__()
        self.kept = kept

    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, named = named_arguments(base, args, kwargs)
        length = hidden.shape[1]
        kept_T = torch.zeros(length, dtype=torch.bool)
        kept_T[list(self.kept)] = True
        seen_TT = torch.ones(length, length, dtype=torch.bool).tril()
        seen_TT &= kept_T | torch.eye(length, dtype=torch.bool)
        term = torch.zeros(1, 1, length, length, dtype=hidden.dtype)
        named["attention_mask"] = term.masked_fill(~seen_TT, torch.finfo(hidden.dtype).min)
        return torch.where(kept_T[:, None], call(hidden, **named), hidden)


class OnHidden(Technique):
    """`Hidden` on some blocks."""

    key: ClassVar[str] = "hidden"
    kept: tuple[int, ...]
    blocks: tuple[str, ...]

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        edit = Edit(model, [self])
        for name in self.blocks:
            edit.attach(name, self, Hidden(self.kept))
        return edit


def built(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model in training mode that drops nothing."""
    made: dict[str, Callable[..., Any]] = {**battery.MODELS}
    torch.manual_seed(0)
    model = made[name](**changes).to(dtype).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for setting in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(model.config, setting):
            setattr(model.config, setting, 0.0)
    return model


def moved(edit: Edit) -> None:
    """Values at which every gradient counts."""
    with torch.no_grad():
        for number, tensor in enumerate(t for n, t in edit.trainable().items() if n.endswith(".b")):
            draw = torch.Generator().manual_seed(number)
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * 0.2)


def pruned(model: Any, settings: TokenPruning, *others: Technique) -> Edit:
    """The model with it, beside LoRA that has moved."""
    edit = apply(model, [LoRA(rank=3), settings, *others], seed=3)
    moved(edit)
    edit.seams(10)
    return edit


def entry_of(edit: Edit) -> Entry:
    return next(d for d in edit.deltas.values() if isinstance(d, Entry))


def blocks_of(edit: Edit) -> list[PrunedBlock]:
    return [d for d in edit.deltas.values() if isinstance(d, PrunedBlock)]


def fix(edit: Edit, choice: Choice = CHOICE) -> None:
    """Every block that chooses keeps this."""
    for block in blocks_of(edit):
        if block.by is not None:
            block.by = Fixed(choice)


def learnt(
    edit: Edit,
    rows: Sequence[Row] = ROWS,
    *,
    packed: bool,
    step: int = 0,
    recompute: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each trained token, and the gradients of their sum, as the loop makes them."""
    model = edit.model
    with packing(model, packed), Blocks(model, recompute).running():
        passes = Passes(model, packed, False, 0, head_of(model))
        batch = passes.batch(rows)
        for change in edit.seams(10).on_batch:
            batch = change(batch, step)
        torch.manual_seed(3)
        losses = passes.losses(batch, step=step)
        losses.sum().backward()
    return losses.detach(), gradients(edit)


def gradients(edit: Edit) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in edit.trainable().items() if p.grad is not None}
    edit.model.zero_grad()
    return found


def hidden(
    model: Any, blocks: Sequence[str], choice: Choice = CHOICE, rows: Sequence[Row] = ROWS
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of the reference, row by row."""
    edit = apply(model, [LoRA(rank=3)], seed=3)
    moved(edit)
    losses: list[Tensor] = []
    passes = Passes(model, False, False, 0, head_of(model))
    for row in rows:
        other = OnHidden(kept=tuple(choice[row.id]), blocks=tuple(blocks)).apply(model)
        batch = collate([row], False, 0)
        mine = passes.losses(batch)
        mine.sum().backward()
        losses.append(mine.detach())
        other.undo()
    return torch.cat(losses), gradients(edit)


def names(model: Any) -> list[str]:
    """Of the blocks."""
    return [block.name for block in seams.blocks(cast("nn.Module", model))]
