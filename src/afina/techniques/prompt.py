"""Prompt tuning: vectors that are learnt stand in front of every row, where a prompt's embeddings would.

    [p_1 … p_n; E x_1 … E x_T]

Nothing else is trained. The vectors start as embeddings of tokens drawn from the vocabulary, as those of a text
(repeated or cut to n), or at random with the embedding's own spread. In few vectors much is learnt only at a high
learning rate: 1e-3 to 1e-1.

Legend: p vectors in front, n their number, E the embedding, x the row's T tokens.

Source: Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", arXiv 2104.08691, sections 2
and 3.2 (the starts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from afina import seams
from afina.techniques.front import FromText, FrontDelta
from afina.tree import Edit, Reads, Side, seed_of


class PromptTuning(FromText):
    """Learnt vectors in front of every row."""

    key: ClassVar[str] = "prompt"

    start: Literal["vocabulary", "text", "random"] = Field(
        default="vocabulary",
        description="what the vectors start as: embeddings of drawn tokens, of `text`, or random",
    )

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the model cannot have anything in front of its rows, or no room for so much; or nobody
                told the text's tokens.
        """
        trunk = self.trunk(model)
        weight = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
        self.refuse_text(weight.shape[0])
        with Edit(model, [self]).whole() as edit:
            edit.attach(trunk, self, PromptDelta(self.tokens, weight))
            self.train_whole(edit, undoable=undoable)
        edit.notes.extend(self.unused())
        return edit

    def start_reads(self, model: nn.Module) -> Reads:
        """The embedding of its first tokens, or how wide it is spread."""
        return "input"

    @torch.no_grad()
    def init(self, edit: Edit, *, seed: int) -> None:
        """See `Technique.init`."""
        embedding = edit.model.get_submodule(seams.input_embedding(edit.model))
        weight_VD = seams.weight_of(embedding)
        for name, delta in edit.deltas.items():
            assert isinstance(delta, PromptDelta)
            seeded = seed_of(seed, name)
            if self.start == "random":
                delta.reset(seeded)
                delta.weight.mul_(weight_VD.double().std().item())
            else:
                ids = self.start_ids(weight_VD.shape[0], seeded)
                delta.weight.copy_(embedding(ids.to(weight_VD.device)))


# --- module ----------------------------------------------------------------------------------------------------


class PromptDelta(FrontDelta):
    """The vectors (n, D), in fp32 whatever the embedding's dtype (fp64 beside fp64)."""

    follows: ClassVar[Mapping[str, Side]] = {"weight": "none"}

    def __init__(self, front: int, embedding_VD: Tensor) -> None:
        super().__init__(front)
        dtype = torch.promote_types(embedding_VD.dtype, torch.float32)
        shape = (front, embedding_VD.shape[1])
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=embedding_VD.device))

    def vectors(self, embedding: nn.Module) -> Tensor:
        """The vectors themselves."""
        return self.weight

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Normal; `PromptTuning.init` knows the better starts, which read the embedding."""
        drawn = torch.Generator().manual_seed(seed)
        self.weight.copy_(torch.randn(self.weight.shape, generator=drawn))
