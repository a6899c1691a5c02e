"""What each row costs the model before it is trained: measured once, and kept.

    RUN/difficulty.json                 of the run, so that it goes on by the same numbers
    CACHE/difficulty/<hash>.json        by content (base, rows, dtype), for other runs on the same rows

The cache is asked only where nothing of the base trains, for then the base's fingerprint says all that a loss depends
on. Losses are of each row alone, so they do not depend on how rows are put together, but for their last bits; these may
decide which of two rows comes first, and therefore a run that goes on reads its own file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from afina.data.order import cut
from afina.data.report import fingerprint
from afina.errors import AfinaError, ConfigError, DataError, RunError, counted
from afina.models import cache
from afina.models.blocks import plainly
from afina.parallel.runtime import Mesh, OneProcess
from afina.train import durable, micro
from afina.train.passes import Passes
from afina.train.report import Reporter
from afina.tree import Edit
from afina.types import Row

FILE = "difficulty.json"
"""In the run's folder."""


@dataclass(frozen=True)
class BaseLosses:
    """The losses of a run's rows under its base.

    Attributes:
        out: the run's folder.
        edit: of the model.
        passes: how rows go through the model, inside `models.forward.packing`.
        rows: that train.
        step: that the run goes on after, 0 at its beginning.
        say: who is told.
        base: fingerprint of the model as it was loaded.
        mesh: the processes, which measure alike; one of them keeps what was found.
    """

    out: Path
    edit: Edit
    passes: Passes
    rows: Sequence[Row]
    step: int
    say: Reporter
    base: str
    mesh: Mesh = field(default_factory=OneProcess)

    def __call__(self) -> list[float]:
        """Mean loss of each row over its trained tokens, in nats; 0 for a row that has none.

        Raises:
            DataError: one is not finite.
            RunError: they cannot be written, or were lost and cannot be measured again.
            ConfigError: they are not there, and the blocks are shared out.
        """
        kept = [self.out / FILE, *self._cached()]
        found = self.mesh.told(
            lambda: next((v for v in map(self._read, kept) if v is not None), None)
        )
        losses = self._measured() if found is None else found
        for path in kept:
            if self.mesh.writes and not path.exists():
                self._write(path, losses)
        return losses

    def _measured(self) -> list[float]:
        if self.mesh.plan.pipeline > 1:
            raise ConfigError(
                "an order by the base's losses does not go with parallel.pipeline: they are measured row by row by the "
                "whole model, and no process has it",
                got=f"pipeline {self.mesh.plan.pipeline}",
                cure="order by length or rarity, or leave parallel.pipeline out",
            )
        tokens = sum(len(row.tokens) for row in self.rows)
        self.say.say(
            f"measuring how hard each row is for the base, once: a forward pass over {tokens:,} tokens"
        )
        try:
            with self._base():
                found = row_losses(self.passes, self.rows)
        except AfinaError as error:
            if not self.step or isinstance(error, DataError):
                raise
            raise RunError(
                f"the losses by which this run chose its rows are gone: {self.out / FILE}",
                got=error.what,
                cure=f"put the file back, or begin anew: {error.cure}",
            ) from None
        return found

    def _base(self) -> AbstractContextManager[None]:
        """The model as it was before training, inside the block."""
        return self.edit.disabled() if self.step else _children_off(self.edit)

    @property
    def _header(self) -> dict[str, str]:
        return {
            "base": self.base,
            "rows": fingerprint(self.rows),
            "dtype": str(next(self.edit.model.parameters()).dtype),
        }

    def _cached(self) -> list[Path]:
        if self.edit.in_place:
            return []
        key = sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:32]
        return [cache.root() / "difficulty" / f"{key}.json"]

    def _read(self, path: Path) -> list[float] | None:
        """The losses in a file; None where there is none of this base and these rows."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            losses = [float(loss) for loss in found["losses"]]
            same = found["header"] == self._header
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return losses if same and len(losses) == len(self.rows) else None

    def _write(self, path: Path, losses: Sequence[float]) -> None:
        value = {"header": self._header, "losses": list(losses)}
        if path.parent == self.out:
            with durable.writing(FILE, self.out):
                durable.write_json(path, value)
            return
        with suppress(OSError):  # a cache that cannot be written is none
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = durable.temporary_of(path)
            temporary.write_text(json.dumps(value), encoding="utf-8")
            os.replace(temporary, path)


@contextmanager
def _children_off(edit: Edit) -> Generator[None, None, None]:
    before = {name: delta.enabled for name, delta in edit.deltas.items()}
    try:
        for delta in edit.deltas.values():
            delta.enabled = False
        yield
    finally:
        for name, delta in edit.deltas.items():
            delta.enabled = before[name]


@torch.no_grad()
def row_losses(passes: Passes, rows: Sequence[Row]) -> list[float]:
    """Mean loss of each row over its trained tokens, in nats; 0 for a row that has none.

    The model is set to evaluation for the time (no dropout) and put back.

    Args:
        passes: how rows go through the model; beginnings are not shared here.
        rows: in any order.

    Raises:
        DataError: a loss is not finite, with the row's place.
    """
    apart = replace(passes, shared=False)
    lengths = [len(row.tokens) for row in rows]
    # Rows of about one length together waste least where they are padded.
    ordered = sorted(
        (n for n, row in enumerate(rows) if row.trained_tokens), key=lengths.__getitem__
    )
    found = [0.0] * len(rows)
    training = passes.model.training
    passes.model.eval()
    try:
        with plainly(passes.model):
            for part in cut(ordered, lengths, tokens_per_step=micro.MOST_TOKENS):
                batch = apart.batch([rows[place] for place in part])
                counts = [rows[place].trained_tokens for place in part]
                each = apart.losses(batch).double().cpu().split(counts)
                for place, own in zip(part, each, strict=True):
                    found[place] = float(own.mean())
    finally:
        passes.model.train(training)
    _refuse_not_finite(rows, found)
    return found


def _refuse_not_finite(rows: Sequence[Row], losses: Sequence[float]) -> None:
    bad = [row for row, loss in zip(rows, losses, strict=True) if not math.isfinite(loss)]
    if bad:
        raise DataError(
            f"{bad[0].source or f'row {bad[0].id}'}: the base's loss is not finite, so it cannot be put in order",
            got=counted(len(bad), "such row"),
            cure="order by length or rarity, load the model in fp32, or take these rows out",
        )
