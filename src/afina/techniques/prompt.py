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
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.techniques.front import FrontDelta, InFront, trunk_of
from afina.tree import Edit, Side, seed_of


class PromptTuning(InFront):
    """Learnt vectors in front of every row."""

    key: ClassVar[str] = "prompt"

    start: Literal["vocabulary", "text", "random"] = Field(
        default="vocabulary",
        description="what the vectors start as: embeddings of drawn tokens, of `text`, or random",
    )
    text: str | None = Field(default=None, description="the text to start from")
    text_ids: tuple[int, ...] = Field(
        default=(), description="its tokens; the tokenizer gives them where they are left out"
    )

    @model_validator(mode="after")
    def _check(self) -> PromptTuning:
        given = self.text is not None or bool(self.text_ids)
        if given != (self.start == "text"):
            raise ValueError(
                "start=text needs text (or text_ids)" if not given else "text needs start=text"
            )
        return self

    def told(self, tokenizer: Any) -> PromptTuning:
        """See `Technique.told`.

        Raises:
            TechniqueError: the text has no tokens.
        """
        if self.text is None or self.text_ids:
            return self
        ids = tokenizer(self.text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise TechniqueError(f"{self.key}.text has no tokens", got=repr(self.text))
        return self.model_copy(update={"text_ids": tuple(ids)})

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the model cannot have anything in front of its rows, or nobody told the text's tokens.
        """
        if self.start == "text" and not self.text_ids:
            raise TechniqueError(
                f"{self.key}.text must be taken apart into tokens, and no tokenizer is there",
                got=repr(self.text),
                cure="afina.apply(model, [...], tokenizer=tokenizer), or give text_ids",
            )
        trunk = trunk_of(model, self.key)
        weight = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
        self._refuse_strange(weight.shape[0])
        with Edit(model, [self]).whole() as edit:
            edit.attach(trunk, self, PromptDelta(self.tokens, weight))
            self.train_whole(edit, undoable=undoable)
        return edit

    def _refuse_strange(self, vocabulary: int) -> None:
        strange = [id for id in self.text_ids if not 0 <= id < vocabulary]
        if strange:
            raise TechniqueError(
                f"{self.key}.text_ids has a token that the model has no embedding for",
                got=strange[0],
                wanted=f"ids from 0 to {vocabulary - 1}",
            )

    @torch.no_grad()
    def init(self, edit: Edit, *, seed: int) -> None:
        """See `Technique.init`."""
        embedding = edit.model.get_submodule(seams.input_embedding(edit.model))
        weight = seams.weight_of(embedding)
        for name, delta in edit.deltas.items():
            assert isinstance(delta, PromptDelta)
            drawn = torch.Generator().manual_seed(seed_of(seed, name))
            if self.start == "random":
                normal = torch.randn(delta.weight.shape, generator=drawn)
                delta.weight.copy_(normal * weight.double().std().item())
                continue
            ids = torch.randint(0, weight.shape[0], (self.tokens,), generator=drawn)
            if self.text_ids:
                ids = repeated(self.text_ids, self.tokens)
            delta.weight.copy_(embedding(ids.to(weight.device)))


# --- mathematics -----------------------------------------------------------------------------------------------


def repeated(ids: tuple[int, ...], count: int) -> Tensor:
    """`ids` again and again, or cut, until there are `count`: (count,), int64."""
    return torch.tensor([ids[i % len(ids)] for i in range(count)])


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
