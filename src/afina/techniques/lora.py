"""LoRA: a frozen map W learns a low-rank change beside it.

    y = W x + s · B (A x),    s = alpha / r   (alpha / sqrt(r) with `rslora`)

A (r × in) starts uniform in ±1/sqrt(in) and B (out × r) at zero, so the model starts as the base, bit for bit. On an
embedding the roles turn: A (r × vocabulary) starts at zero and B (width × r) normal.

Legend: W (out × in) frozen weight, x input, r rank, s scale.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
The scale alpha / sqrt(r): Kalajdzievski 2023, arXiv 2312.03732. A larger learning rate for B: Hayou et al. 2024,
"LoRA+", arXiv 2402.12354. Defaults (all linears, alpha 32, alpha / r, no dropout):
Thinking Machines 2025, "LoRA Without Regret".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.ops.lowrank import low_rank_add
from afina.tree import Delta, Edit, Side, Technique, match, matches, seed_of

Number = TypeVar("Number", int, float)


class LoRA(Technique):
    """Low-rank changes beside frozen linears, `Conv1D`s and embeddings.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "lora"

    rank: int = Field(default=16, ge=1, description="inner dimension r of the change")
    alpha: float = Field(
        default=32.0, gt=0, allow_inf_nan=False, description="numerator of the scale s = alpha / r"
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the input dropped before A"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead of alpha / r")
    loraplus_ratio: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="learning rate of B as a multiple of A's (LoRA+ suggests 16)",
    )
    target: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="patterns, or a preset: all-linear (all linears of the blocks), attention (q and v)",
    )
    exclude: tuple[str, ...] = Field(default=(), description="patterns of targets to leave alone")
    layers: tuple[int, ...] | str | None = Field(
        default=None, description="block numbers, as a list or '0-5,28,-1'; None is all"
    )
    rank_pattern: dict[str, int] = Field(default={}, description="pattern -> rank of those modules")
    alpha_pattern: dict[str, float] = Field(
        default={}, description="pattern -> alpha of those modules"
    )
    modules_to_save: tuple[str, ...] = Field(
        default=(), description="patterns of whole modules trained beside, such as lm_head"
    )

    @model_validator(mode="after")
    def _check(self) -> LoRA:
        if any(rank < 1 for rank in self.rank_pattern.values()):
            raise ValueError("every rank in rank_pattern must be at least 1")
        if not all(0 < alpha < math.inf for alpha in self.alpha_pattern.values()):
            raise ValueError("every alpha in alpha_pattern must be above 0, and a number")
        seams.parse_layers(self.layers)
        return self

    def scale(self, alpha: float, rank: int) -> float:
        """The factor s of the change."""
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: when a pattern matches nothing, or a rank exceeds its map.
        """
        sites = self.sites(model)
        names = [site.name for site in sites]
        ranks = _per_site(names, self.rank_pattern, self.rank, "lora.rank_pattern")
        alphas = _per_site(names, self.alpha_pattern, self.alpha, "lora.alpha_pattern")
        _refuse_large_ranks(sites, ranks)
        with Edit(model, [self]).whole() as edit:
            for site in sites:
                rank = ranks[site.name]
                scaling = self.scale(alphas[site.name], rank)
                edit.attach(site.name, self, LoRADelta(site, rank, scaling, self.dropout))
            for name in self.whole_modules(model):
                edit.train_in_place(name, self, undoable=undoable)
        experts = seams.expert_modules(model)
        if experts and "all-linear" in self.target:
            edit.warnings.append(
                f"{counted(len(experts), 'group')} of fused experts ({experts[0]}, …) stay frozen: they are tensors "
                "and not linears, which LoRA does not reach yet"
            )
        return edit

    def lr_scale(self, name: str) -> float:
        """LoRA+: B learns `loraplus_ratio` times as fast as A."""
        return self.loraplus_ratio if self.loraplus_ratio and name.endswith(".lora.b") else 1.0

    def sites(self, model: nn.Module) -> list[seams.MapSite]:
        """The maps this value changes in `model`."""
        sites = seams.map_sites(model)
        presets = [preset for preset in ("all-linear", "attention") if preset in self.target]
        if presets:
            seams.require_stack(model, f"lora.target: {presets[0]}")
        chosen = {name for pattern in self.target for name in _targets(sites, pattern)}
        whole = set(_modules(model, self.modules_to_save))
        chosen -= set(match(chosen, self.exclude, setting="lora.exclude")) | whole
        layers = seams.chosen_layers(model, self.layers, setting="lora.layers")
        # What was named outside the blocks (an embedding, the head) is not a matter of layers.
        chosen = {s.name for s in sites if s.name in chosen and s.block in {*layers, None}}
        if not chosen:
            raise TechniqueError(
                "lora: nothing is left to change",
                got=f"target {self.target}, exclude {self.exclude}, layers {self.layers}",
                cure="widen target or layers, or exclude less",
            )
        return [site for site in sites if site.name in chosen]

    def whole_modules(self, model: nn.Module) -> list[str]:
        """Names of the base tensors that `modules_to_save` trains, each tied tensor once, under its own name."""
        wanted = {
            id(p)
            for module in _modules(model, self.modules_to_save)
            for p in model.get_submodule(module).parameters()
        }
        return [name for name, p in model.named_parameters() if id(p) in wanted]


# --- mathematics -----------------------------------------------------------------------------------------------


def low_rank_rows(ids: Tensor, a_RV: Tensor, b_DR: Tensor, scaling: float) -> Tensor:
    """The change of an embedding: s · B A[:, id] for each id. That of a linear is `ops.lowrank.low_rank_add`.

    Args:
        ids: any shape, int64.
        a_RV: (r, vocabulary).
        b_DR: (width, r).
        scaling: s.

    Returns:
        (*ids.shape, width), in a's dtype.
    """
    return F.linear(F.embedding(ids, a_RV.t()) * scaling, b_DR)


# --- module ----------------------------------------------------------------------------------------------------


class LoRADelta(Delta):
    """A and B of one map, in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = {"a": "in", "b": "out"}

    def __init__(self, site: seams.MapSite, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        weight = site.module.get_parameter("weight")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.kind = site.kind
        self.transposed = site.kind != "linear"
        self.scaling = scaling
        self.dropout = dropout
        # Some embeddings (Gemma's) multiply what they look up; the change lies beside the weight, under that factor.
        factor = getattr(site.module, "scalar_embed_scale", None)
        self.multiplier = float(
            getattr(site.module, "embed_scale", 1.0) if factor is None else factor
        )
        self.a = nn.Parameter(
            torch.zeros(rank, site.in_features, dtype=dtype, device=weight.device)
        )
        self.b = nn.Parameter(
            torch.zeros(site.out_features, rank, dtype=dtype, device=weight.device)
        )

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output `y` and the change beside it."""
        if self.kind == "embedding":
            scaling = self.scaling * self.multiplier
            return y + low_rank_rows(x, self.a, self.b, scaling).to(y.dtype)
        dropout = self.dropout if self.training else 0.0
        return low_rank_add(x, y, self.a, self.b, self.scaling, dropout=dropout)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Zero on one side, random on the other; drawn on the CPU in fp32 so that every device gets the same."""
        if self.kind == "embedding":
            self.a.zero_()
            self.b.copy_(torch.randn(self.b.shape, generator=_generator(seed, "b")))
            return
        bound = 1 / math.sqrt(self.a.shape[1])
        uniform = torch.rand(self.a.shape, generator=_generator(seed, "a"))
        self.a.copy_((uniform * 2 - 1) * bound)
        self.b.zero_()

    def weight_delta(self) -> Tensor:
        """s · B A as (out, in); for an embedding (width, vocabulary)."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return self.scaling * (self.b.detach().to(wide) @ self.a.detach().to(wide))

    def silent_at_start(self) -> frozenset[str]:
        """The side that meets a zero factor: A beside a linear, B beside an embedding."""
        return frozenset({"b" if self.kind == "embedding" else "a"})


# --- targets ---------------------------------------------------------------------------------------------------


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, name))


def _targets(sites: list[seams.MapSite], pattern: str) -> list[str]:
    inside = [s.name for s in sites if s.block is not None and s.kind != "embedding"]
    if pattern == "all-linear":
        return inside
    if pattern == "attention":
        found = [n for n in inside if n.rsplit(".", 1)[-1] in seams.QUERY_VALUE]
        if not found:
            raise TechniqueError(
                "the preset 'attention' found no query or value projection",
                got=", ".join(sorted({n.rsplit(".", 1)[-1] for n in inside})),
                cure="name the modules in lora.target",
            )
        return found
    return match([s.name for s in sites], [pattern], setting="lora.target")


def _modules(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    return match(seams.holders(model), patterns, setting="lora.modules_to_save")


def _per_site(
    names: list[str], patterns: Mapping[str, Number], default: Number, setting: str
) -> dict[str, Number]:
    match(names, patterns, setting=setting)
    chosen = dict.fromkeys(names, default)
    for pattern, value in patterns.items():
        chosen.update({name: value for name in names if matches(name, pattern)})
    return chosen


def _refuse_large_ranks(sites: list[seams.MapSite], ranks: Mapping[str, int]) -> None:
    large = [s for s in sites if ranks[s.name] > min(s.in_features, s.out_features)]
    if large:
        site = large[0]
        raise TechniqueError(
            f"lora.rank exceeds the map it changes ({site.name} and {len(large) - 1} more)",
            got=ranks[site.name],
            wanted=f"at most {min(site.in_features, site.out_features)}",
            cure="lower rank, or set rank_pattern for the small modules",
        )
