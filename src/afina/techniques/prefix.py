"""Prefix tuning: in every layer, attention sees n keys and values that are learnt in front of every row's own.

    y = attention(q; [K; k], [V; v])

Nothing else is trained. They start as the keys and values that the model itself has for drawn tokens or for a text, or
normal. With `projection` a network makes them while they train,

    [K, V of all layers] = B tanh(A e)

and what it gives does not depend on the row: an adapter's folder holds the keys and values alone, and one that is
loaded from there trains these directly. A row's own tokens stand at the positions behind the n.

Legend: K, V learnt, n of each in every layer, as many heads as the model has for keys; q, k, v the model's own;
e as many inputs, of the width of one layer's keys.

Source: Li & Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", arXiv 2101.00190, sections 4.2
and 4.3 (the projection), 7.4 (the start from real words).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina import seams
from afina.errors import ModelError, TechniqueError
from afina.ops.prefix import KEYWORD, Entered, Prefix
from afina.techniques.front import FromText, FrontDelta, start_network
from afina.tree import Edit, Reads, Side, seed_of

Start = Literal["vocabulary", "text", "random", "zero"]


class PrefixTuning(FromText):
    """Learnt keys and values in front of every row's own, in every layer."""

    key: ClassVar[str] = "prefix"

    start: Start | None = Field(
        default=None,
        description="what they start as: the model's own for drawn tokens (vocabulary) or for `text`, random, or "
        "zero; None is vocabulary, but random for an encoder or a projection",
    )
    projection: bool = Field(default=False, description="a network makes them while they train")
    hidden: int | None = Field(
        default=None, ge=1, description="inner width of that network; None is the model's"
    )

    @model_validator(mode="after")
    def _check(self) -> PrefixTuning:
        if self.projection and self.start not in (None, "random"):
            raise ValueError(
                "what a projection gives starts at random: leave start out, or projection"
            )
        return self

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: the model cannot have anything in front of its rows, or no room for so much; its
                attention cannot be reached; or nobody told the text's tokens.
        """
        trunk = self.trunk(model)
        form = form_of(model)
        weight = model.get_submodule(seams.input_embedding(model)).get_parameter("weight")
        self.refuse_text(weight.shape[0])
        with Edit(model, [self]).whole() as edit:
            edit.attach(trunk, self, PrefixDelta(self, form, weight))
            self.train_whole(edit, undoable=undoable)
        edit.notes.extend(self.unused())
        return edit

    def start_reads(self, model: nn.Module) -> Reads:
        """Keys and values of tokens take a pass of the model."""
        drawn = self.start in ("random", "zero") or (
            self.start is None and not self._by_itself(model)
        )
        return "input" if drawn else "model"

    @torch.no_grad()
    def init(self, edit: Edit, *, seed: int) -> None:
        """See `Technique.init`."""
        weight_VD = edit.model.get_submodule(seams.input_embedding(edit.model)).get_parameter(
            "weight"
        )
        for name, delta in edit.deltas.items():
            assert isinstance(delta, PrefixDelta)
            seeded = seed_of(seed, name)
            delta.reset(seeded)
            if self.start == "zero":
                delta.weight.zero_()
            elif self.start in ("vocabulary", "text") or self._by_itself(edit.model):
                ids = self.start_ids(weight_VD.shape[0], seeded)
                delta.weight.copy_(flat(own_pairs(edit.model, delta, ids)))

    def _by_itself(self, model: nn.Module) -> bool:
        """Whether tokens are the start where none is chosen."""
        can = getattr(model, "can_generate", None)
        return self.start is None and not self.projection and can is not None and bool(can())


@dataclass(frozen=True)
class Form:
    """Of a model's keys and values.

    Attributes:
        layers: with attention.
        heads: that keys and values have.
        size: of a head.
    """

    layers: int
    heads: int
    size: int

    @property
    def width(self) -> int:
        """Of the keys of one layer."""
        return self.heads * self.size


def form_of(model: nn.Module) -> Form:
    """What a model's config says of its keys and values.

    Raises:
        TechniqueError: its attention cannot be reached.
    """
    speaker: Any = model
    config = speaker.config.get_text_config()
    crossed = getattr(config, "add_cross_attention", False)
    if not getattr(model, "_supports_attention_backend", False) or crossed:
        raise TechniqueError(
            "prefix: this model's attention cannot be given keys and values from outside",
            got=type(model).__name__ + (" with attention to an encoder" if crossed else ""),
            wanted="a model that takes all of its attention from Transformers' AttentionInterface",
            cure="use prompt or p_tuning, which act before the first layer",
        )
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Form(config.num_hidden_layers, heads, size)


def own_pairs(model: nn.Module, delta: PrefixDelta, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The keys and values (H, n, D) that a decoder itself has for n tokens at the beginning of a row, layer by layer.

    Raises:
        ModelError: its cache does not hold those of every layer.
    """
    speaker: Any = model
    modes = [(module, module.training) for module in model.modules()]
    was, delta.enabled = delta.enabled, False
    try:
        model.eval()
        device = speaker.get_input_embeddings().weight.device
        out = speaker(input_ids=ids[None].to(device), use_cache=True)
    finally:
        delta.enabled = was
        for module, mode in modes:
            module.training = mode
    cache = getattr(out, "cache", None) or out.past_key_values
    pairs = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    short = [k for k, _ in pairs if k.shape[1] != ids.shape[0]]
    if short or len(pairs) != delta.form.layers:
        raise ModelError(
            "prefix: this model's cache does not hold the keys of every layer",
            got=type(model).__name__,
            cure="set prefix.start=random",
        )
    return pairs


# --- mathematics -----------------------------------------------------------------------------------------------


def flat(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Keys and values (H, n, D) of all layers as one tensor (n, 2 · layers · H · D), layer by layer, keys first."""
    both = torch.stack([x for pair in pairs for x in pair])
    return both.permute(2, 0, 1, 3).reshape(both.shape[2], -1)


def unflat(all_nW: Tensor, form: Form) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `flat`."""
    both = all_nW.view(all_nW.shape[0], 2 * form.layers, form.heads, form.size).permute(1, 2, 0, 3)
    return [(both[2 * i], both[2 * i + 1]) for i in range(form.layers)]


# --- module ----------------------------------------------------------------------------------------------------


class PrefixDelta(FrontDelta):
    """Keys and values of all layers, or what makes them, in fp32 whatever the model's dtype (fp64 beside fp64)."""

    follows: ClassVar[Mapping[str, Side]] = {}

    def __init__(self, settings: PrefixTuning, form: Form, embedding_VD: Tensor) -> None:
        super().__init__(settings.tokens)
        self.form = form
        self.heads = form.heads
        self.width = embedding_VD.shape[1]
        dtype = torch.promote_types(embedding_VD.dtype, torch.float32)
        made: dict[str, Any] = {"dtype": dtype, "device": embedding_VD.device}
        every = 2 * form.layers * form.width
        inputs = form.width if settings.projection else every
        self.weight = nn.Parameter(torch.zeros(settings.tokens, inputs, **made))
        self.maps: nn.Sequential | None = None
        if settings.projection:
            hidden = settings.hidden or self.width
            self.maps = nn.Sequential(
                nn.Linear(form.width, hidden, **made),
                nn.Tanh(),
                nn.Linear(hidden, every, **made),
            )

    @property
    def direct(self) -> bool:
        """Whether keys and values train themselves."""
        return self.maps is None

    def made(self) -> Tensor:
        """Keys and values, as `flat` lays them."""
        return self.weight if self.maps is None else self.maps(self.weight)

    def vectors(self, embedding: nn.Module) -> Tensor:
        """Nothing: what goes through the layers at these places is seen by nobody."""
        return self.weight.new_zeros(self.front, self.width)

    def told(self, named: dict[str, Any], past: int) -> None:
        """Sends keys and values along to the attention."""
        given = named.get("inputs_embeds")
        given = named["input_ids"] if given is None else given
        pairs = unflat(self.made(), self.form)
        if self.share is not None:
            mine = slice(self.share.first, self.share.end)
            pairs = [(k[mine], v[mine]) for k, v in pairs]
        named[KEYWORD] = Prefix(pairs, past + given.shape[1])

    def checked(self, named: dict[str, Any]) -> None:
        """Raises where a layer did not take what it was sent.

        Raises:
            ModelError: see above.
        """
        missed = set(range(self.form.layers)) - named[KEYWORD].used
        if missed:
            raise ModelError(
                "the prefix did not arrive in this model's attention",
                got=f"layers {sorted(missed)} without it",
                cure="choose another attention implementation before the prefix is applied, not after; where none "
                "was chosen, this model does not hand it on: use prompt or p_tuning",
            )

    def hooks(self, module: nn.Module, key: str) -> list[RemovableHandle]:
        """As `FrontDelta`, and in the attention."""
        return [*super().hooks(module, key), Entered(module)]

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Normal, a network as torch starts its parts; `PrefixTuning.init` knows the better starts."""
        drawn = torch.Generator().manual_seed(seed_of(seed, "weight"))
        self.weight.copy_(torch.randn(self.weight.shape, generator=drawn))
        start_network(self, seed)
