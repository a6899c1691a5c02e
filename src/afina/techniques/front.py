"""What methods that put something in front of every row share: the places before a row's own first token.

The child hangs on the trunk (the model without its head) and acts there, so that head, loss and generation know
nothing of it: they see as many positions as the row has tokens. A row's own tokens stand behind the n places that were
put in front, also in a batch that is padded on the left. In a batch whose rows lie packed the places are in the line
already, as ids below 0 (see `tree.front_of`); so rows that begin alike share them.

Encoders that pool in their trunk (BERT) pool the first place, as they do in PEFT. Those that pool in their head
(RoBERTa), and decoders that classify, pool the row's own tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina.errors import TechniqueError, counted
from afina.seams.whole import positions
from afina.techniques.front_calls import FrontCalls
from afina.techniques.maps import Beside
from afina.tree import Delta, seed_of

SHORTEST = 2
"""Tokens of the shortest row from which anything can be learnt: one, and one to predict."""


class BeforeRows(Beside):
    """A method that puts places in front of every row."""

    tokens: int = Field(default=20, ge=1, description="n, places in front of every row")

    def trunk(self, model: nn.Module) -> str:
        """The name of the model without its head, which has room for the places and a row behind them.

        Raises:
            TechniqueError: see `trunk_of`; or the places leave rows no room.
        """
        name, most = trunk_of(model, self.key), positions(model)
        if most is not None and most - self.tokens < SHORTEST:
            raise TechniqueError(
                f"{self.key}.tokens leaves no room for rows: its places are among those that the model has",
                got=f"{self.tokens}, of {counted(most, 'place')}",
                wanted=f"at most {most - SHORTEST}, and far fewer for rows of any length",
                cure=f"lower {self.key}.tokens",
            )
        return name


class FromText(BeforeRows):
    """One that can start from tokens: drawn ones, or those of a text."""

    text: str | None = Field(default=None, description="the text to start from")
    text_ids: tuple[int, ...] = Field(
        default=(), description="its tokens; the tokenizer gives them where they are left out"
    )

    @model_validator(mode="after")
    def _check_text(self) -> FromText:
        given = self.text is not None or bool(self.text_ids)
        if given != (getattr(self, "start", None) == "text"):
            raise ValueError(
                "text needs start=text" if given else "start=text needs text (or text_ids)"
            )
        return self

    def told(self, tokenizer: Any) -> FromText:
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

    def refuse_text(self, vocabulary: int) -> None:
        """Raises for a text whose tokens nobody told, or that a model has no embedding for.

        Args:
            vocabulary: tokens that the model has embeddings for.

        Raises:
            TechniqueError: see above.
        """
        if self.text is not None and not self.text_ids:
            raise TechniqueError(
                f"{self.key}.text must be taken apart into tokens, and no tokenizer is there",
                got=repr(self.text),
                cure=f"afina.apply(model, [...], tokenizer=tokenizer), or give {self.key}.text_ids",
            )
        strange = [id for id in self.text_ids if not 0 <= id < vocabulary]
        if strange:
            raise TechniqueError(
                f"{self.key}.text_ids has a token that the model has no embedding for",
                got=strange[0],
                wanted=f"ids from 0 to {vocabulary - 1}",
            )

    def unused(self) -> list[str]:
        """Says that not all of the text's tokens are a start, where there are more of them than places."""
        over = len(self.text_ids) - self.tokens
        if over <= 0:
            return []
        return [
            f"{self.key}: the last {counted(over, 'token') if over > 1 else 'token'} of its text "
            f"{'are' if over > 1 else 'is'} not used: it has "
            f"{len(self.text_ids)}, and {self.key}.tokens is {self.tokens}"
        ]

    def start_ids(self, vocabulary: int, seed: int) -> Tensor:
        """The n tokens to start from (n,): those of the text again and again, or cut; or drawn."""
        if self.text_ids:
            count = len(self.text_ids)
            return torch.tensor([self.text_ids[i % count] for i in range(self.tokens)])
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(0, vocabulary, (self.tokens,), generator=drawn)


def trunk_of(model: nn.Module, key: str) -> str:
    """The name of the model without its head.

    Args:
        model: any.
        key: of the technique that needs it.

    Raises:
        TechniqueError: this model has none, or is one whose rows have two beginnings.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise TechniqueError(
            f"{key} does not know models of an encoder and a decoder, whose rows begin in both",
            got=type(model).__name__,
            wanted="a decoder such as Llama, or an encoder such as BERT",
        )
    trunk = getattr(model, "base_model", None)
    for name, module in _named(model):
        if module is trunk and name:
            return name
    raise TechniqueError(
        f"{key} needs a model with a head, and this is one without",
        got=type(model).__name__,
        wanted="such as LlamaForCausalLM or BertForSequenceClassification",
    )


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return list(named)


class FrontDelta(Delta):
    """What stands at the places in front of a row."""

    alone: ClassVar[str] = "which of them comes first is not said"
    scalable: ClassVar[bool] = False

    def __init__(self, front: int) -> None:
        super().__init__()
        self.front = front

    @abstractmethod
    def vectors(self, embedding: nn.Module) -> Tensor:
        """What enters the trunk at the places (n, D), in any dtype."""

    def told(self, named: dict[str, Any], past: int) -> None:
        """Adds to what the trunk is called with; `past` tokens are in its cache, those in front among them."""

    def checked(self, named: dict[str, Any]) -> None:
        """Looks, behind the trunk, whether what `told` added has arrived."""

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Puts the vectors at the places that wait for them.

        Args:
            x: ids (B, T), below 0 at the places.
            y: embeddings of the ids (B, T, D), of any id at the places.
            base: the embedding.
        """
        vectors_nD = self.vectors(base)
        # Looked up before they are rounded, so that what comes back from all rows is summed in their own dtype.
        put_BTD = F.embedding((-1 - x).clamp(min=0), vectors_nD).to(y.dtype)
        return torch.where((x < 0)[..., None], put_BTD, y)

    def hooks(self, module: nn.Module, key: str) -> list[RemovableHandle]:
        """Acts before and after the trunk `module`."""
        front = FrontCalls(key)
        return [
            module.register_forward_pre_hook(front.before, with_kwargs=True),
            module.register_forward_hook(front.after, with_kwargs=True),
        ]


@torch.no_grad()
def start_network(network: nn.Module, seed: int) -> None:
    """Gives linears and LSTMs the values that torch would: uniform in ±1/sqrt of what enters a unit.

    Drawn on the CPU in fp32, tensor by tensor, so that every device gets the same.
    """
    for name, module in _named(network):
        if not isinstance(module, nn.Linear | nn.LSTM):
            continue
        entering = module.in_features if isinstance(module, nn.Linear) else module.hidden_size
        for own, parameter in module.named_parameters():
            drawn = torch.Generator().manual_seed(seed_of(seed, f"{name}.{own}"))
            uniform = torch.rand(parameter.shape, generator=drawn)
            parameter.copy_((uniform * 2 - 1) / math.sqrt(entering))
