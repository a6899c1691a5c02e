"""A model whose outputs are not numbers answers with garbage and scores nothing: that is an error, said at once.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from afina.errors import RunError, counted
from afina.models.stops import Stopper


def not_finite(model: Any, where: str) -> RunError:
    """The error of a model whose outputs are not finite; `where` says what was met, and at what."""
    narrow = model.dtype == torch.float16
    return RunError(
        "the model's outputs are not finite numbers, so they mean nothing",
        got=f"{where}, in {str(model.dtype).removeprefix('torch.')}",
        wanted="finite logits",
        cure="fp16 overflows beyond 65504: load the model with --dtype fp32 (in Python dtype='fp32')"
        if narrow
        else "the weights are damaged, or training went astray: take an earlier checkpoint of the run, or get the "
        "model's files again",
    )


class Finite(LogitsProcessor):
    """Lets logits pass as they are, and raises where a row that still goes on has none that are numbers.

    Args:
        model: named in the error by its number format.
        stopper: knows which rows have ended; what these say no longer counts.
    """

    def __init__(self, model: Any, stopper: Stopper) -> None:
        self.model, self.stopper = model, stopper

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (B, V) of the next token, after everything so far (B, T).

        Raises:
            RunError: see above.
        """
        # A row's largest entry is NaN when any is; minus infinity is how a model rules out some tokens, never all.
        for largest, length in zip(scores.amax(dim=-1), self.stopper.lengths, strict=True):
            if length is None and not largest.isfinite():
                made = input_ids.shape[1] - self.stopper.prompt_tokens
                raise not_finite(self.model, f"{largest.item()} after {counted(made, 'token')}")
        return scores
