"""How the rows of a micro-batch go through the model: as which tensors, to which losses.

Training, validation, trial passes and the pre-flight all go this way, so that their losses mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from afina import seams
from afina.data.packing import collate, pack, widen
from afina.data.prefix import collate_shared, pack_shared, unique_tokens
from afina.data.settings import DataSettings
from afina.models.forward import to_device, trained_losses
from afina.models.head import Head, head_of
from afina.parallel.runtime import Mesh, OneProcess
from afina.train.moving import drop, hooked
from afina.tree import Edit, front_of
from afina.types import Batch, Row


def _itself(call: Callable[[], Tensor]) -> Tensor:
    return call()


@dataclass(frozen=True)
class Passes:
    """The way through one model.

    Attributes:
        model: a causal language model; inside `models.forward.packing` when `packed`.
        packed: rows lie end to end in one line.
        shared: rows that begin alike share their beginning; only when packed.
        pad_id: what padding positions hold.
        head: whose loss needs no logits; None makes them.
        within: what a pass happens inside of; see `parallel.runtime.Mesh`.
        alone: what a trial happens inside of; see there.
        computes: the device that passes run on; None is the model's.
    """

    model: nn.Module
    packed: bool
    shared: bool
    pad_id: int
    head: Head | None
    within: Callable[[Callable[[], Tensor]], Tensor] = _itself
    alone: Callable[[Callable[[], Tensor]], Tensor] = _itself
    computes: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self.computes or next(self.model.parameters()).device

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The rows' tensors, where passes run; where rows lie packed, with the places in front of them."""
        placed = self._placed(rows)
        if self.shared:
            made = collate_shared(placed, self.pad_id)
        else:
            made = collate(placed, self.packed, self.pad_id)
        tokens = sum(len(row.tokens) for row in rows)
        return to_device(replace(made, real_tokens=tokens), self.device)

    def widened(self, batch: Batch, rows: int, tokens: int) -> Batch:
        """The batch with padding, to so many lines of so many tokens; its losses are the same."""
        return widen(batch, rows, tokens, self.pad_id)

    def _placed(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the places that something puts in front of them; alone, each gets them in the model."""
        front = front_of(self.model) if self.packed else 0
        if not front or not all(row.tokens for row in rows):
            return list(rows)
        places = tuple(range(-1, -1 - front, -1))
        # A row's first token is never predicted: alone it has nothing before it, and its loss is the same here.
        none = (False,) * (front + 1)
        return [
            replace(row, tokens=places + row.tokens, trained=none + row.trained[1:]) for row in rows
        ]

    def losses(self, batch: Batch, *, step: int = 0, seed: int = 0) -> Tensor:
        """Loss of each trained position (N,); of a shared one, of one of the rows that it stands for."""
        return self.within(
            lambda: trained_losses(self.model, batch, self.head, step=step, seed=seed)
        )

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the losses of all rows' trained tokens."""
        return counted(self.losses(batch), batch).sum()

    def idle(self) -> Batch:
        """A batch of a row that is none of the data's, for a pass that must be made and counts for nothing."""
        kind = seams.classifies(self.model)
        tags = (0, 0) if kind == "tokens" else None
        row = Row((0, 0), (False, True), -1, label=0 if kind == "rows" else None, tags=tags)
        return self.batch([row])

    def tokens(self, rows: Sequence[Row]) -> int:
        """Tokens that are computed for some rows in one micro-batch."""
        placed = self._placed(rows)
        return unique_tokens(placed) if self.shared else sum(len(row.tokens) for row in placed)

    def cut(
        self, rows: Sequence[Row], *, rows_each: int | None, tokens_each: int | None
    ) -> list[list[Row]]:
        """A step's rows as micro-batches, of so many rows or of at most so many tokens; all at once for neither."""
        if tokens_each is not None:
            placed = self._placed(rows)
            own = {id(one): row for one, row in zip(placed, rows, strict=True)}
            groups = (pack_shared if self.shared else pack)(placed, tokens_each)
            return [[own[id(one)] for one in group] for group in groups]
        # Neighbours in the order of their tokens have the longest beginnings in common.
        ordered = sorted(rows, key=lambda row: row.tokens) if self.shared else rows
        each = rows_each or max(1, len(rows))
        return [list(ordered[i : i + each]) for i in range(0, len(rows), each)]

    def trial(self, rows: Sequence[Row], edit: Edit, *, dropping: bool = False) -> None:
        """A forward and backward pass that leaves no gradient behind.

        Args:
            rows: of a micro-batch.
            edit: what trains.
            dropping: each gradient goes as soon as it is there, as in a run whose tensors move in backward.
        """
        batch = self.batch(rows)
        if batch.trained_tokens:
            with hooked(edit.trainable(), drop) if dropping else nullcontext():
                loss = self.alone(lambda: self.loss(batch))
                if (
                    loss.requires_grad
                ):  # of a process in whose part of the model nothing trains, it does not
                    loss.backward()
        for parameter in edit.trainable().values():
            parameter.grad = None


def counted(losses_N: Tensor, batch: Batch) -> Tensor:
    """The losses, each times the number of rows that it stands for."""
    return losses_N if batch.entries is None else losses_N * batch.entries[2]


def passes_of(
    model: nn.Module,
    edit: Edit,
    settings: DataSettings,
    *,
    pad_id: int = 0,
    by_row: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Passes, str | None]:
    """The way of a run, and why rows do not share their beginnings though the settings say so; inside `packing`.

    Args:
        model: in training mode or not.
        edit: of the model.
        settings: of the data.
        pad_id: what padding positions hold.
        by_row: something changes batches, or weighs losses, row by row.
        mesh: the processes, all of which ask; None for this one alone.
    """
    mesh = mesh or OneProcess()
    reason = (
        unshared(model, edit, by_row=by_row)
        if settings.packing and settings.share_prefixes
        else None
    )
    shared = settings.packing and settings.share_prefixes and reason is None
    if seams.classifies(model) is not None:
        # A decoder finds a row's last token by the id that its own config calls padding.
        speaker: Any = model
        own = speaker.config.get_text_config().pad_token_id
        pad_id = pad_id if own is None else own
    with mesh.opened():
        head = mesh.at_end(lambda: head_of(model))
    ways = (mesh.within, mesh.alone, mesh.computes)
    return Passes(model, settings.packing, shared, pad_id, head, *ways), reason


def unshared(model: nn.Module, edit: Edit, *, by_row: bool) -> str | None:
    """Why rows that begin alike must be computed apart; None when they need not."""
    if any(getattr(delta, "dropout", 0) for delta in edit.deltas.values()):
        return "the adapter's dropout draws for each row on its own"
    apart = {getattr(delta, "apart", "") for delta in edit.deltas.values()} - {""}
    if apart:
        return "; ".join(sorted(apart))
    if drops(model):
        return "the model's dropout draws for each row on its own"
    if by_row or any(delta.by_row for delta in edit.deltas.values()):
        return "a technique changes batches or losses row by row"
    return None


def drops(model: nn.Module) -> bool:
    """Whether the model drops something in training, as a module or inside its attention."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    settings: dict[str, Any] = {} if config is None else vars(config.get_text_config())
    values = [v for name, v in settings.items() if "drop" in name and "layerdrop" not in name]
    return any(isinstance(v, float) and v > 0 for v in values)
