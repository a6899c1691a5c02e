"""Bottleneck adapters: a small network beside a sublayer of each block adds a change to what that sublayer says.

    o' = o + s · (U f(D z + d) + u)

| kind | beside | z | f | s |
|---|---|---|---|---|
| houlsby | attention and feed-forward | o | SiLU | 1 |
| pfeiffer | feed-forward | o | ReLU | 1 |
| parallel | feed-forward | x | ReLU | 1 |
| scaled_parallel | feed-forward | x | ReLU | 4 |

U (out × width) and u start at zero, so the model starts as the base, bit for bit. In a mixture of experts one adapter
lies beside all of a block's experts together.

Legend: x what the sublayer is computed from, o what it adds to the residual stream r, D (width × in) and
U (out × width) the adapter's maps with their biases d and u, f the non-linearity, s the scale.

Source: Houlsby et al. 2019, arXiv 1902.00751, section 2.1; Pfeiffer et al. 2020, arXiv 2005.00247 and 2005.00052;
He et al. 2022, "Towards a Unified View of Parameter-Efficient Transfer Learning", arXiv 2110.04366, sections 3.3 and
4.6; leaving out the lower blocks: Rücklé et al. 2021, "AdapterDrop", arXiv 2010.11918.

In AdapterHub's words (`BnConfig`; its adapter's published formula is h + s · (U f(D z))): houlsby is
`DoubleSeqBnConfig`; pfeiffer is `SeqBnConfig(original_ln_before=False)`, which reads o, while that class by its own
default reads r + o, in post-norm encoders LN(r + o); parallel is `ParBnConfig` where x is r, as in post-norm encoders.
All add before the residual sum and its norm: a post-norm encoder says LN(r + o'), a pre-norm decoder r + o'.
The adapter acts behind the base's own dropout where the sublayer is one module, and in front of it in BERT's kin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina import seams
from afina.errors import TechniqueError
from afina.techniques.bottleneck_hooks import Adds, Reads, Slot
from afina.techniques.maps import Beside
from afina.techniques.sublayers import Sublayer, sublayers
from afina.tree import Delta, Edit, Side, seed_of

BottleneckKind = Literal["houlsby", "pfeiffer", "parallel", "scaled_parallel"]
NonLinearity = Literal["relu", "gelu", "silu", "tanh"]

FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}
SPREAD = 0.02
"""Standard deviation of D at the start beside an output, as AdapterHub's; a parallel one starts as a linear does."""


class Bottleneck(Beside):
    """Small networks beside the sublayers of blocks."""

    key: ClassVar[str] = "bottleneck"

    kind: BottleneckKind = Field(
        default="houlsby",
        description="houlsby: behind attention and feed-forward; pfeiffer: behind the feed-forward; parallel, "
        "scaled_parallel: beside the feed-forward",
    )
    reduction_factor: float = Field(
        default=16.0, gt=0, allow_inf_nan=False, description="the stream's width over the adapter's"
    )
    width: int | None = Field(
        default=None, ge=1, description="the adapter's width itself, in place of reduction_factor"
    )
    non_linearity: NonLinearity | None = Field(
        default=None, description="f; None is that of the kind: silu for houlsby, else relu"
    )
    scaling: float | Literal["learned"] | None = Field(
        default=None,
        description="s, or 'learned': a number that trains, from 1; None is that of the kind",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the adapter's output dropped"
    )
    layers: tuple[int, ...] | str | None = Field(
        default=None, description="block numbers, as a list or '0-5,28,-1'; None is all"
    )
    exclude: tuple[int, ...] | str | None = Field(
        default=None, description="block numbers left out, such as the lowest (AdapterDrop)"
    )
    cross: bool = Field(
        default=False, description="houlsby: beside attention to an encoder's states too"
    )

    @field_validator("scaling")
    @classmethod
    def _check_scaling(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not (math.isfinite(value) and value > 0):
            raise ValueError("scaling is a positive number, or 'learned'")
        return value

    @model_validator(mode="after")
    def _check_layers(self) -> Bottleneck:
        seams.parse_layers(self.layers)
        seams.parse_layers(self.exclude)
        return self

    @property
    def parallel(self) -> bool:
        """Whether the adapter reads what its sublayer reads, and not what it says."""
        return self.kind in ("parallel", "scaled_parallel")

    def places(self, model: nn.Module) -> list[Sublayer]:
        """The sublayers this value acts beside.

        Raises:
            TechniqueError: there are none in a chosen block, or no block is left.
        """
        seams.require_stack(model, self.key)
        chosen = seams.chosen_layers(model, self.layers, setting=f"{self.key}.layers")
        if self.exclude is not None:
            chosen -= seams.chosen_layers(model, self.exclude, setting=f"{self.key}.exclude")
        found = [s for s in self.candidates(model) if s.block in chosen]
        bare = sorted(chosen - {s.block for s in found})
        if bare or not found:
            raise TechniqueError(
                f"{self.key}: "
                + ("no sublayer is found in some blocks" if bare else "no block is left"),
                got=f"blocks {', '.join(map(str, bare))}" if bare else f"exclude {self.exclude}",
                wanted="attention and feed-forward" if self.kind == "houlsby" else "a feed-forward",
                cure="set bottleneck.layers to others, or use lora, which needs no sublayers",
            )
        return found

    def candidates(self, model: nn.Module) -> list[Sublayer]:
        """The sublayers of every block beside which this kind can act."""
        roles = {"feed-forward"}
        if self.kind == "houlsby":
            roles |= {"attention", "cross-attention"} if self.cross else {"attention"}
        return [s for s in sublayers(model) if s.role in roles]

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """Attaches an adapter at each place, and trains `modules_to_save` where they are."""
        with Edit(model, [self]).whole() as edit:
            for place in self.places(model):
                edit.attach(place.name, self, BottleneckDelta(place, self))
            self.train_whole(edit, undoable=undoable)
        return edit

    def width_at(self, place: Sublayer) -> int:
        """The adapter's width: at least 1."""
        return self.width or max(1, int(place.width // self.reduction_factor))

    @property
    def function(self) -> NonLinearity:
        """f."""
        return self.non_linearity or ("silu" if self.kind == "houlsby" else "relu")

    @property
    def scale(self) -> float | None:
        """s; None where it is learned."""
        if self.scaling == "learned":
            return None
        given = 4.0 if self.kind == "scaled_parallel" else 1.0
        return given if self.scaling is None else self.scaling


# --- mathematics -----------------------------------------------------------------------------------------------


def bottleneck(
    z: Tensor,
    down_WI: Tensor,
    down_bias_W: Tensor,
    up_OW: Tensor,
    up_bias_O: Tensor,
    function: NonLinearity,
) -> Tensor:
    """U f(D z + d) + u.

    Args:
        z: (..., in), of any floating type; the maps are cast to it.
        down_WI: D.
        down_bias_W: d.
        up_OW: U.
        up_bias_O: u.
        function: f.

    Returns:
        (..., out), in z's dtype.
    """
    inner = F.linear(z, down_WI.to(z.dtype), down_bias_W.to(z.dtype))
    return F.linear(FUNCTIONS[function](inner), up_OW.to(z.dtype), up_bias_O.to(z.dtype))


# --- module ----------------------------------------------------------------------------------------------------


class BottleneckDelta(Delta):
    """D, U and their biases beside one sublayer, in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = dict.fromkeys(
        ("down", "down_bias", "up", "up_bias", "scale"), "none"
    )

    def __init__(self, place: Sublayer, settings: Bottleneck) -> None:
        super().__init__()
        near = next(p for p in place.reader.parameters() if p.is_floating_point())
        kind: dict[str, Any] = {
            "dtype": torch.promote_types(near.dtype, torch.float32),
            "device": near.device,
        }
        width = settings.width_at(place)
        self.parallel = settings.parallel
        self.function: NonLinearity = settings.function
        self.scaling = settings.scale
        self.dropout = settings.dropout
        self.down = nn.Parameter(torch.zeros(width, place.width, **kind))
        self.down_bias = nn.Parameter(torch.zeros(width, **kind))
        self.up = nn.Parameter(torch.zeros(place.width, width, **kind))
        self.up_bias = nn.Parameter(torch.zeros(place.width, **kind))
        self.scale = nn.Parameter(torch.ones(1, **kind)) if settings.scale is None else None
        apart = self.parallel and place.reader is not place.module
        # In a tuple, for a module that is an attribute would become a child.
        self._reader = (place.reader,) if apart else ()
        self.slot = Slot()

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The sublayer's output `y`, and the change beside it.

        Args:
            x: what the sublayer is computed from; only a parallel adapter reads it.
            y: what it adds to the stream.
            base: not read.
        """
        return y + self._change(x, y).to(y.dtype)

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The same with `strength` times the change."""
        return y + (self._change(x, y) * self.strength).to(y.dtype)

    def _change(self, x: Tensor, y: Tensor) -> Tensor:
        z = x if self.parallel else y
        change = bottleneck(z, self.down, self.down_bias, self.up, self.up_bias, self.function)
        if self.scale is not None:
            change = change * self.scale.to(change.dtype)
        elif self.scaling is not None:
            change = change * self.scaling
        return F.dropout(change, self.dropout, self.training)

    def listens(self) -> tuple[nn.Module, ...]:
        """Where the sublayer begins."""
        return self._reader

    def hooks(self, module: nn.Module, key: str) -> list[RemovableHandle]:
        """Acts on the first output of `module`; a parallel one reads where the sublayer begins."""
        made = [module.register_forward_hook(Adds(key), with_kwargs=True)]
        for reader in self._reader:
            # First of all, so that it reads what the sublayer is given and not what others make of it.
            made.append(
                reader.register_forward_pre_hook(Reads(self), prepend=True, with_kwargs=True)
            )
        return made

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """D random, all else zero; drawn on the CPU in fp32 so that every device gets the same."""
        generator = torch.Generator().manual_seed(seed_of(seed, "down"))
        if self.parallel:
            uniform = torch.rand(self.down.shape, generator=generator)
            self.down.copy_((uniform * 2 - 1) / math.sqrt(self.down.shape[1]))
        else:
            self.down.copy_(torch.randn(self.down.shape, generator=generator) * SPREAD)
        for parameter in (self.down_bias, self.up, self.up_bias):
            parameter.zero_()
        if self.scale is not None:
            self.scale.fill_(1.0)

    def silent_at_start(self) -> frozenset[str]:
        """What meets the zero of U, or of all that is scaled."""
        learned = {"scale"} if self.scale is not None else set[str]()
        return frozenset({"down", "down_bias"} | learned)
