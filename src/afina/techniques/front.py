"""What methods that put something in front of every row share: the places before a row's own first token.

The child hangs on the trunk (the model without its head) and acts there, so that head, loss and generation know
nothing of it: they see as many positions as the row has tokens. A row's own tokens stand behind the n places that were
put in front, also in a batch that is padded on the left. In a batch whose rows lie packed the places are in the line
already, as ids below 0 (see `tree.front_of`); so rows that begin alike share them.

Encoders that pool in their trunk (BERT) pool the first place, as they do in PEFT. Those that pool in their head
(RoBERTa), and decoders that classify, pool the row's own tokens.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina import seams
from afina.errors import ModelError, TechniqueError
from afina.techniques.maps import Beside
from afina.tree import Delta, seed_of


class BeforeRows(Beside):
    """A method that puts places in front of every row."""

    tokens: int = Field(default=20, ge=1, description="n, places in front of every row")


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
        front = _Front(key)
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


class _Front:
    """Puts the places into what the trunk is called with, and takes them out of what it gives.

    Looks the child up in the module it is given, so that a deep copy uses its own child.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.added = 0
        """Places in this call that its caller knows nothing of."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        delta = getattr(module, self.key)
        self.added = 0
        if not delta.enabled:
            return None
        names = list(inspect.signature(module.forward).parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        embedding = cast("Any", module).get_input_embeddings()
        past = _cached(named, self.key)
        if named.get("afina_context") is not None:
            ids_BT = named.pop("input_ids")
            named["inputs_embeds"] = delta(ids_BT, embedding(ids_BT.clamp(min=0)), embedding)
        else:
            self.added = 0 if past else delta.front
            _make_room(module, named, names, delta.front, past)
        if self.added:
            y_BTD = named.get("inputs_embeds")
            y_BTD = embedding(named.pop("input_ids")) if y_BTD is None else y_BTD
            vectors_nD = delta.vectors(embedding).to(y_BTD.dtype)
            front_BnD = vectors_nD.expand(y_BTD.shape[0], -1, -1)
            named["inputs_embeds"] = torch.cat((front_BnD, y_BTD), dim=1)
        delta.told(named, past)
        return (), named

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        delta = getattr(module, self.key)
        if delta.enabled:
            delta.checked(kwargs)
        if not self.added:
            return output
        if isinstance(output, tuple):
            return tuple(_behind(part, self.added) for part in cast("tuple[Any, ...]", output))
        for name, part in list(output.items()):
            output[name] = _behind(part, self.added)
        return output


def _cached(named: dict[str, Any], key: str) -> int:
    """Positions in the cache, those in front among them.

    Raises:
        ModelError: its size is fixed, and has no room for them.
    """
    cache = next((named[n] for n in ("cache", "past_key_values") if named.get(n) is not None), None)
    if cache is None:
        return 0
    if getattr(cache, "is_compileable", False):
        raise ModelError(
            f"{key} needs a cache that grows, and this one is of a fixed size",
            got=type(cache).__name__,
            cure="with generate, leave cache_implementation at 'dynamic'",
        )
    return int(cache.get_seq_length())


def _make_room(
    module: nn.Module, named: dict[str, Any], names: list[str], front: int, past: int
) -> None:
    """Mask, positions and types of a call, changed as the places in front ask for."""
    given = named.get("input_ids")
    given = named["inputs_embeds"] if given is None else given
    rows, length = given.shape[:2]
    mask_BS, positions_BT = named.get("attention_mask"), named.get("position_ids")
    for name, what, dims in (
        ("attention_mask", mask_BS, (2,)),
        ("position_ids", positions_BT, (1, 2)),
    ):
        if what is not None and (not isinstance(what, Tensor) or what.dim() not in dims):
            raise ModelError(
                f"places in front of the rows need {name} with one number a token",
                got=tuple(what.shape) if isinstance(what, Tensor) else type(what).__name__,
                wanted="(rows, tokens)",
            )
    if past and mask_BS is not None and mask_BS.shape[1] + front != past + length:
        raise ModelError(
            "the mask is not as long as the cache and the tokens behind it, the places in front left out",
            got=mask_BS.shape[1],
            wanted=past + length - front,
            cure="fill the cache with the same techniques on",
        )
    first = seams.first_position(module)
    if positions_BT is None and mask_BS is not None and "position_ids" in names:
        # A row's own tokens stand right behind the front, on whichever side it is padded.
        counted_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
        positions_BT = counted_BS[:, -length:] + first
    if mask_BS is not None:
        named["attention_mask"] = F.pad(mask_BS, (front, 0), value=1)
    if positions_BT is not None:
        behind_BT = positions_BT.expand(rows, -1) + front
        places = torch.arange(first, first + front, device=behind_BT.device).expand(rows, -1)
        named["position_ids"] = behind_BT if past else torch.cat((places, behind_BT), dim=1)
    if named.get("token_type_ids") is not None and not past:
        named["token_type_ids"] = F.pad(named["token_type_ids"], (front, 0), value=0)


def _behind(part: Any, front: int) -> Any:
    """The same without the places in front: states (B, T, D), or of each layer; attention keeps them among its keys."""
    if isinstance(part, tuple):
        return tuple(_behind(one, front) for one in cast("tuple[Any, ...]", part))
    if not isinstance(part, Tensor) or part.dim() not in (3, 4):
        return part
    return part[:, front:] if part.dim() == 3 else part[:, :, front:]
