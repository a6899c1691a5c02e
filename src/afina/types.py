"""The values that travel between rooms.

Legend of the shape suffixes used everywhere in afina:
B rows, T tokens, D width, H heads, R rank, E experts, V vocabulary, N trained positions, M rows computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The target of a position whose prediction is not trained (the value torch's cross-entropy skips)."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who speaks in a conversation, as chat templates call them: in rows of data and in messages to answer."""


@dataclass(frozen=True)
class Row:
    """One tokenised row of data.

    Attributes:
        tokens: ids, template included.
        trained: one flag a token: whether this token is a label (something the model must learn to emit).
        id: position of the row in its source, counted from 0.
        source: where it came from, as "file:line".
        prompt_tokens: how many leading tokens are prompt (what `generate` is given at evaluation).
        label: the class number, for classification data.
        meta: the original columns (messages, prompt, reference), for evaluation and reports.
        tags: the class number of each token, IGNORE where it has none, for data that tags tokens.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    id: int
    source: str = ""
    prompt_tokens: int = 0
    label: int | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    tags: tuple[int, ...] | None = None

    @property
    def trained_tokens(self) -> int:
        """Labels that count in the loss.

        A row's class is one, a token's class each one. Of tokens to predict the first has nothing before it.
        """
        if self.label is not None:
            return 1
        if self.tags is not None:
            return sum(tag != IGNORE for tag in self.tags)
        return sum(self.trained[1:])


@dataclass(frozen=True)
class Run:
    """Tokens that lie one after the other in a packed line and belong to one row, or to all rows that begin alike.

    Attributes:
        start: place of its first token in the line.
        length: tokens.
        before: the runs that come before it in its rows, from their beginning, as (start, length).
    """

    start: int
    length: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> int:
        """Place of its first token in its rows."""
        return sum(length for _, length in self.before)


@dataclass(frozen=True)
class Places:
    """Where the queries and keys of rows that are computed together stand.

    Query i of row m stands at place `first_M[m] + i` of its row, key j at place j.

    Attributes:
        first_M: place of a row's first query; int64.
        keys_M: how many keys a row has; those behind are padding; int64.
        first_least: the smallest of first_M.
        first_most: the largest of first_M.
        keys_least: the smallest of keys_M.
    """

    first_M: Tensor
    keys_M: Tensor
    first_least: int
    first_most: int
    keys_least: int

    @property
    def bounds(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.first_least, self.first_most, self.keys_least

    @staticmethod
    def of(first_M: Tensor, keys_M: Tensor) -> Places:
        """From the tensors alone."""
        least, most = (int(x) for x in first_M.aminmax())
        return Places(first_M, keys_M, least, most, int(keys_M.min()))


@dataclass(frozen=True)
class Runs:
    """The runs of a packed line as numbers, for kernels; int64, always in the host's memory.

    What comes before run i are the pieces `offsets[i]` to `offsets[i + 1]`, from the beginning of its rows.

    Attributes:
        starts: place in the line of each run's first token.
        lengths: tokens of each run.
        offsets: one more than runs.
        piece_starts: place in the line of each piece's first token.
        piece_lengths: tokens of each piece.
    """

    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    piece_starts: Tensor
    piece_lengths: Tensor

    @staticmethod
    def of(runs: Sequence[Run]) -> Runs:
        """From the runs."""
        offsets = [0, *accumulate(len(run.before) for run in runs)]
        pieces = [piece for run in runs for piece in run.before]
        numbers = [
            [run.start for run in runs],
            [run.length for run in runs],
            offsets,
            [start for start, _ in pieces],
            [length for _, length in pieces],
        ]
        return Runs(*(torch.tensor(x, dtype=torch.int64, device="cpu") for x in numbers))


@dataclass(frozen=True)
class Layout:
    """A packed line taken apart into blocks of rows of about one length, each padded to its longest.

    Attributes:
        queries_P: places in the line of all blocks' queries, block after block; padding repeats a row's last.
        keys_Q: the same of the keys.
        back_T: for each token of the line its index in queries_P.
        blocks: of each block its rows, queries and keys a row, and where they stand.
        shared: whether a key belongs to several rows.
        runs: that the line consists of, as numbers.
        masks: what the queries of a block see, once it was asked for; all layers of a pass share it.
        made: what a way of computing attention makes of the line, likewise.
    """

    queries_P: Tensor
    keys_Q: Tensor
    back_T: Tensor
    blocks: tuple[tuple[int, int, int, Places], ...]
    shared: bool
    runs: Runs
    masks: dict[Any, Tensor | None] = field(
        default_factory=dict[Any, "Tensor | None"], compare=False
    )
    made: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)


@dataclass(frozen=True)
class Batch:
    """The tensors of one forward and backward pass.

    Attributes:
        tokens_BT: ids; int64.
        targets_BT: the id that position t must predict, or IGNORE. Shifted inside each row already,
            so that a packed batch never predicts across rows.
        positions_BT: 0, 1, 2 … restarting in each row.
        segments_BT: number of the row inside the batch; -1 is padding.
        packed: rows lie end to end in one line (B = 1), instead of one row a line.
        rows: ids of the rows, in order of their segment number.
        real_tokens: tokens that are not padding.
        trained_tokens: positions whose target is not IGNORE.
        labels_B: class numbers, where every row has one.
        runs: of a packed line.
        entries: of a line in which rows share their beginnings, what is predicted where and for how many rows:
            places in the line (N,), targets (N,), counts (N,); targets_BT is IGNORE throughout then.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    packed: bool
    rows: tuple[int, ...]
    real_tokens: int
    trained_tokens: int
    labels_B: Tensor | None = None
    runs: tuple[Run, ...] = ()
    entries: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Context:
    """What a micro-batch tells whoever acts inside the model's forward pass.

    It travels as the keyword argument `afina_context` of the model call, which Transformers hands down to the
    attention function.

    Attributes:
        segments_BT: as in `Batch`.
        positions_BT: as in `Batch`.
        layout: for packed rows, how attention takes them apart; None when not packed.
        step: number of the optimiser step, as a tensor so that a compiled graph does not change with it.
        seed: of this micro-batch's random draws.
        auxiliaries: what the pass brings back (router losses, key mass), by name.
    """

    segments_BT: Tensor
    positions_BT: Tensor
    layout: Layout | None = None
    step: Tensor | None = None
    seed: int = 0
    auxiliaries: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
