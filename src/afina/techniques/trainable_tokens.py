"""Trainable tokens: chosen rows of the embedding learn, such as those of new special tokens; all others stay frozen.

    y = c · V[id] for a chosen id, else c · E[id];    where the head is tied: logit[id] += (V[id] − E[id]) · x

V starts as the rows that it stands for, so the model starts as the base, bit for bit. Where head and embedding are one
tensor, one V serves both ends and its gradient is the sum of both.

Legend: E (vocabulary × width) frozen embedding, V (chosen × width), c what some embeddings multiply by (Gemma's), x
what enters the head.

Source: the rows are absolute, and the tied head takes part, as in PEFT 0.21.2 (`TrainableTokensModel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, StringConstraints, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.techniques.maps import Beside
from afina.tree import Delta, Edit, Reads, Seams, Side

Id = Annotated[int, Field(ge=0, strict=True)]
Text = Annotated[str, StringConstraints(min_length=1)]


class TrainableTokens(Beside):
    """Chosen tokens, by id or by text, whose rows of the embedding (and of a tied head) learn."""

    key: ClassVar[str] = "trainable_tokens"

    tokens: tuple[Id | Text, ...] = Field(
        default=(), description="the tokens, at least one: ids, or texts that are one token each"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainableTokens:
        twice = sorted({str(token) for token in self.tokens if self.tokens.count(token) > 1})
        if twice:
            raise ValueError(f"tokens: given twice: {', '.join(twice)}")
        return self

    def told(self, tokenizer: Any) -> TrainableTokens:
        """The same tokens by their ids.

        Raises:
            TechniqueError: a text is no single token, or two tokens are one.
        """
        if all(isinstance(token, int) for token in self.tokens):
            return self
        known: Mapping[str, int] = tokenizer.get_vocab()
        ids = [t if isinstance(t, int) else _id_of(t, known, tokenizer) for t in self.tokens]
        if len(set(ids)) < len(ids):
            raise TechniqueError(
                "trainable_tokens.tokens names one token twice",
                got=", ".join(
                    f"{token!r} = {i}" for token, i in zip(self.tokens, ids, strict=True)
                ),
                wanted="each token once",
            )
        return self.model_copy(update={"tokens": tuple(ids)})

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: a token is beyond the vocabulary, or given by text without a tokenizer.
        """
        name = seams.input_embedding(model)
        embedding = model.get_submodule(name)
        weight = embedding.get_parameter("weight")
        ids = self._ids(weight.shape[0])
        whole = self.whole_modules(model)
        trained = next((n for n in whole if model.get_parameter(n) is weight), None)
        if trained is not None:
            raise TechniqueError(
                "the embedding trains whole, so that there is nothing to choose from it",
                got=f"{trained} in trainable_tokens.modules_to_save",
                cure="leave one of the two out",
            )
        with Edit(model, [self]).whole() as edit:
            rows = TokenRows(ids, weight)
            edit.attach(name, self, rows)
            head = seams.head(model)
            if head.tied and head.name is not None:
                edit.attach(head.name, self, TokenLogits(rows))
            self.train_whole(edit, undoable=undoable)
        return edit

    def _ids(self, vocabulary: int) -> tuple[int, ...]:
        if not self.tokens:
            raise TechniqueError(
                "trainable_tokens.tokens names no token",
                wanted="ids, or texts that are one token each",
                cure="trainable_tokens: {tokens: ['<|call|>', 7]}, in Python TrainableTokens(tokens=('<|call|>', 7))",
            )
        texts = [token for token in self.tokens if isinstance(token, str)]
        if texts:
            raise TechniqueError(
                "tokens by their text need the tokenizer",
                got=", ".join(map(repr, texts[:4])),
                cure="afina.apply(model, [...], tokenizer=tokenizer), or give ids",
            )
        ids = tuple(token for token in self.tokens if isinstance(token, int))
        beyond = [i for i in ids if i >= vocabulary]
        if beyond:
            raise TechniqueError(
                "the model has no such token",
                got=", ".join(map(str, beyond[:4])),
                wanted=f"ids from 0 to {vocabulary - 1}",
                cure="give the model room for new tokens first: model.resize_token_embeddings(len(tokenizer))",
            )
        return ids

    def start_reads(self, model: nn.Module) -> Reads:
        """The rows that train."""
        return "place"

    def init(self, edit: Edit, *, seed: int) -> None:
        """The rows start as those of the base."""
        for name, delta in edit.deltas_of(self).items():
            if isinstance(delta, TokenRows):
                delta.start(seams.weight_of(edit.model.get_submodule(name)))

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """Notes that steps were made."""
        found = [delta for delta in edit.deltas_of(self).values() if isinstance(delta, TokenRows)]

        def note(step: int) -> None:
            for delta in found:
                delta.trained = True

        return Seams(after_step=(note,))

    def outcome(self, edit: Edit) -> list[str]:
        """The tokens that no row of a run had, so that they stayed what they were."""
        still: list[int] = []
        for name, delta in edit.deltas_of(self).items():
            if isinstance(delta, TokenRows) and delta.trained:
                still += delta.unmoved(seams.weight_of(edit.model.get_submodule(name)))
        if not still:
            return []
        return [
            f"trainable_tokens: {counted(len(still), 'token')} of {len(self.tokens)} did not change, for no row "
            f"that was seen has them: {', '.join(map(str, still[:8]))}{', …' if len(still) > 8 else ''}"
        ]


def _id_of(text: str, known: Mapping[str, int], tokenizer: Any) -> int:
    """The id of a text that is one token."""
    if text in known:
        return known[text]
    pieces: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(pieces) == 1:
        return pieces[0]
    raise TechniqueError(
        "trainable_tokens.tokens: this text is not one token",
        got=f"{text!r}, which is {len(pieces)}",
        wanted="a token of the tokenizer",
        cure="add it first: tokenizer.add_special_tokens({'additional_special_tokens': [...]}), and "
        "model.resize_token_embeddings(len(tokenizer))",
    )


# --- mathematics -----------------------------------------------------------------------------------------------


def chosen_rows(ids: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the chosen tokens each id is.

    Args:
        ids: any shape, int64.
        chosen: (n,), each once, in any order.

    Returns:
        Its place in `chosen`, and whether it has one; both of the shape of `ids`.
    """
    ordered, places = chosen.sort()
    found = torch.searchsorted(ordered, ids.contiguous()).clamp_(max=len(chosen) - 1)
    return places[found], ordered[found] == ids


# --- module ----------------------------------------------------------------------------------------------------


class TokenRows(Delta):
    """V, beside the embedding, in fp32 whatever the base's dtype (fp64 beside an fp64 base).

    Attributes:
        ids: the tokens, one a row.
        trained: a run made a step with it.
    """

    follows: ClassVar[Mapping[str, Side]] = {"rows": "in"}
    foldable: ClassVar[bool] = True

    def __init__(self, ids: tuple[int, ...], weight: Tensor) -> None:
        super().__init__()
        self.transposed = True
        self.trained = False
        self.ids = ids
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.rows = nn.Parameter(
            torch.zeros(len(ids), weight.shape[1], dtype=dtype, device=weight.device)
        )

    def places(self) -> Tensor:
        """The ids as a tensor beside the rows."""
        return torch.tensor(self.ids, device=self.rows.device)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The base's output `y`, with the rows of the chosen ids in it."""
        place, hit = chosen_rows(x, self.places())
        factor: Any = getattr(base, "embed_scale", None)
        mine = F.embedding(place, self.rows.to(y.dtype))
        if factor is not None:
            mine = mine * (factor.to(y.dtype) if isinstance(factor, Tensor) else factor)
        return torch.where(hit[..., None], mine, y)

    @torch.no_grad()
    def start(self, weight_VD: Tensor) -> None:
        """The values of the rows that it stands for."""
        self.rows.copy_(weight_VD[self.places().to(weight_VD.device)])

    def unmoved(self, weight_VD: Tensor) -> list[int]:
        """The ids whose rows are those that they stand for."""
        theirs = weight_VD[self.places().to(weight_VD.device)].to(self.rows)
        moved = (self.rows.detach() != theirs).any(dim=1)
        return [i for i, row in zip(self.ids, moved, strict=True) if not row]

    def reset(self, seed: int) -> None:
        """Nothing is drawn: see `TrainableTokens.init`."""

    def silent_at_times(self) -> frozenset[str]:
        """The rows, in a step without any of their tokens, unless the head is tied."""
        return frozenset({"rows"})

    def refused_beside(self, others: Sequence[Delta]) -> str:
        """Other tokens are other rows; a token has one row."""
        theirs = {i for other in others if isinstance(other, TokenRows) for i in other.ids}
        return "each has a row of its own for the same tokens" if theirs & set(self.ids) else ""

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """The weight (width, vocabulary) with the rows in their columns."""
        columns = self.rows.detach().to(weight_OI.dtype).t()
        return weight_OI.index_copy(1, self.places(), columns)


class TokenLogits(Delta):
    """The same rows at a head that is one tensor with the embedding; it holds none of its own."""

    foldable: ClassVar[bool] = True

    def __init__(self, rows: TokenRows) -> None:
        super().__init__()
        # In a list, so that it is no child of the head: its parameter is the embedding's, counted and saved there.
        self._rows = [rows]

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The base's logits `y`, those of the chosen ids as from the rows."""
        rows = self._rows[0]
        places = rows.places()
        # As a difference, which is nought at the start: few columns by themselves are rounded otherwise than in y.
        apart = rows.rows - seams.weight_of(base)[places].to(rows.rows.dtype)
        return y.index_add(-1, places, F.linear(x, apart.to(x.dtype)).to(y.dtype))

    def reset(self, seed: int) -> None:
        """It has nothing to draw."""

    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """The weight (vocabulary, width) with the rows in it."""
        rows = self._rows[0]
        return weight_OI.index_copy(0, rows.places(), rows.rows.detach().to(weight_OI.dtype))

    def origin(self) -> Delta:
        """The embedding's."""
        return self._rows[0]
