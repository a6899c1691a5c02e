"""The values that travel between rooms.

Legend of the shape suffixes used everywhere in afina:
B rows, T tokens, D width, H heads, R rank, E experts, V vocabulary, N trained positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

IGNORE = -100
"""The target of a position whose prediction is not trained (the value torch's cross-entropy skips)."""


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
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    id: int
    source: str = ""
    prompt_tokens: int = 0
    label: int | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def trained_tokens(self) -> int:
        """Labels that count in the loss: the first token has nothing before it to be predicted from."""
        return sum(self.trained[1:])


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


@dataclass(frozen=True)
class Context:
    """What a micro-batch tells whoever acts inside the model's forward pass.

    It travels as the keyword argument `afina_context` of the model call, which Transformers hands down to the
    attention function.

    Attributes:
        segments_BT: as in `Batch`.
        positions_BT: as in `Batch`.
        gather_NL: for packed rows, the place in the line of token l of row n, padded by repeating; None when not
            packed.
        scatter_T: the inverse: the place of each token of the line in the flattened gather_NL.
        valid_NL: which places of gather_NL hold a token of their own, not a repeat.
        step: number of the optimiser step, as a tensor so that a compiled graph does not change with it.
        seed: of this micro-batch's random draws.
        auxiliaries: what the pass brings back (router losses, key mass), by name.
    """

    segments_BT: Tensor
    positions_BT: Tensor
    gather_NL: Tensor | None = None
    scatter_T: Tensor | None = None
    valid_NL: Tensor | None = None
    step: Tensor | None = None
    seed: int = 0
    auxiliaries: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
