"""LoRA: a frozen map W learns a low-rank change beside it.

    y = W x + s · B (A x),    s = alpha / r   (alpha / sqrt(r) with `rslora`)

A (r × in) starts uniform in ±1/sqrt(in) and B (out × r) at zero, so the model starts as the base, bit for bit. On an
embedding the roles turn: A (r × vocabulary) starts at zero and B (width × r) normal.

Other starts read the weights (`start`): A₀, B₀ are the largest singular directions of W (`pissa`), s B₀ A₀ = U S V, or
the first columns and rows of its QR decomposition (`olora`). The papers take that part out of the base; here it is
taken out of the change, so that the base is never edited, and is what an adapter leaves that is off:

    y = W x + s · (B A - B₀ A₀) x = W x + s · [B, B - B₀] [A - A₀; A₀] x

The second form is zero at the start, bit for bit, and is how such an adapter is saved: a plain LoRA of twice the rank.
The gradients of A and B are those of the papers' W - s B₀ A₀ beside s B A.

Beside a quantised base A and B can start as what rounding took off (`loftq`): s B₀ A₀ is the best of rank r for W - Q,
found while the weights were packed (`quantize.loftq_rank`). This start moves the model towards the base that was not
rounded; an adapter that is off leaves Q, and it is saved as the plain LoRA beside Q that it is.

Legend: W (out × in) frozen weight, Q the same rounded, x input, r rank, s scale.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
The scale alpha / sqrt(r): Kalajdzievski 2023, arXiv 2312.03732. A larger learning rate for B: Hayou et al. 2024,
"LoRA+", arXiv 2402.12354. Defaults (all linears, alpha 32, alpha / r, no dropout):
Thinking Machines 2025, "LoRA Without Regret". Starts: Meng et al. 2024, "PiSSA", arXiv 2404.02948, section 3;
Büyükakyüz 2024, "OLoRA", arXiv 2406.01775, section 3; Li et al. 2023, "LoftQ", arXiv 2310.08659, section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.ops.lowrank import Within, low_rank_add
from afina.techniques.lora_on_experts import ExpertPath, ExpertsDelta, ExpertSite, expert_sites
from afina.techniques.lora_starts import Start, begin, refuse_start
from afina.techniques.maps import OnMaps, per_site, refuse_large_ranks
from afina.tree import Delta, Edit, Reads, Side, matches, seed_of
from afina.tree.pieces import Share


class LoRA(OnMaps):
    """Low-rank changes beside frozen linears, `Conv1D`s and embeddings.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something. The preset `experts`,
    or the name of such a tensor (`down_proj`), reaches the fused experts of a mixture: a low-rank path for each.
    """

    key: ClassVar[str] = "lora"
    reaches_experts: ClassVar[bool] = True

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
    rank_pattern: dict[str, int] = Field(default={}, description="pattern -> rank of those modules")
    alpha_pattern: dict[str, float] = Field(
        default={}, description="pattern -> alpha of those modules"
    )

    start: Start = Field(
        default="default",
        description="of A and B: random and zero; directions of the weight itself, by SVD (pissa) or QR (olora); or "
        "what rounding took off a quantised one (loftq, with quantize.loftq_rank)",
    )

    @model_validator(mode="after")
    def _check(self) -> LoRA:
        if any(rank < 1 for rank in self.rank_pattern.values()):
            raise ValueError("every rank in rank_pattern must be at least 1")
        if not all(0 < alpha < math.inf for alpha in self.alpha_pattern.values()):
            raise ValueError("every alpha in alpha_pattern must be above 0, and a number")
        return self

    def scale(self, alpha: float, rank: int) -> float:
        """The factor s of the change."""
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: when a pattern matches nothing, or a rank exceeds its map.
        """
        experts = self.expert_sites(model)
        sites = self.sites(model)
        names = [site.name for site in (*sites, *experts)]
        ranks = per_site(names, self.rank_pattern, self.rank, f"{self.key}.rank_pattern")
        alphas = per_site(names, self.alpha_pattern, self.alpha, f"{self.key}.alpha_pattern")
        refuse_large_ranks(self.key, sites, ranks)
        refuse_start(self.key, self.start, sites, ranks, experts=bool(experts))
        with Edit(model, [self]).whole() as edit:
            for site in sites:
                rank = ranks[site.name]
                scaling = self.scale(alphas[site.name], rank)
                edit.attach(site.name, self, self.delta(site, rank, scaling))
            for module in dict.fromkeys(site.module for site in experts):
                paths = {
                    site.projection: ExpertPath(
                        site,
                        ranks[site.name],
                        self.scale(alphas[site.name], ranks[site.name]),
                        self.dropout,
                    )
                    for site in experts
                    if site.module == module
                }
                edit.attach(module, self, ExpertsDelta(paths))
            self.train_whole(edit, undoable=undoable)
        frozen = seams.expert_modules(model)
        if frozen and not experts and "all-linear" in self.target:
            edit.warnings.append(
                f"{counted(len(frozen), 'group')} of fused experts ({frozen[0]}, …) stay frozen: all-linear is the "
                "linears; lora has a low-rank path beside each expert where 'experts' is in lora.target too"
            )
        return edit

    def sites(self, model: nn.Module) -> list[seams.MapSite]:
        """The maps that this value changes; none where it names experts alone."""
        maps = [site.name for site in seams.map_sites(model)]
        names = [site.name for site in expert_sites(model)] if self.reaches_experts else []
        mine = {
            field: tuple(p for p in getattr(self, field) if not _of_experts(p, names, maps))
            for field in ("target", "exclude")
        }
        if not mine["target"]:
            return []
        return OnMaps.sites(self.model_copy(update=mine), model)

    def expert_sites(self, model: nn.Module) -> list[ExpertSite]:
        """The experts' projections that this value changes.

        Raises:
            TechniqueError: it asks for experts, and there are none that can be reached.
        """
        every = expert_sites(model) if self.reaches_experts else []
        if EXPERTS in self.target and not every:
            fused = seams.expert_modules(model)
            raise TechniqueError(
                f"{self.key}.target: the preset 'experts' found no fused experts that {self.key} reaches",
                got=f"{fused[0]}, which does not go through Transformers' ExpertsInterface"
                if fused
                else type(model).__name__,
                cure=f"leave 'experts' out of {self.key}.target",
            )
        layers = seams.chosen_layers(model, self.layers, setting=f"{self.key}.layers")
        return [
            site
            for site in every
            if (EXPERTS in self.target or any(matches(site.name, p) for p in self.target))
            and not any(matches(site.name, p) for p in self.exclude)
            and site.block in {*layers, None}
        ]

    def delta(self, site: seams.MapSite, rank: int, scaling: float) -> LoRADelta:
        """What is attached at one map."""
        return LoRADelta(site, rank, scaling, self.dropout, started=self.offset)

    @property
    def offset(self) -> bool:
        """Whether the start is a part of the weight, which is taken out of the change."""
        return self.start in ("pissa", "olora")

    def start_reads(self, model: nn.Module) -> Reads:
        """Nothing by default, else the weight beside it."""
        return "nothing" if self.start == "default" else "place"

    def init(self, edit: Edit, *, seed: int) -> None:
        """See `Technique.init`; other starts than the default read the base's weights."""
        super().init(edit, seed=seed)
        for name, delta in edit.deltas.items():
            if isinstance(delta, LoRADelta) and self.start != "default":
                base = edit.model.get_submodule(name.rpartition(".")[0])
                begin(self.start, delta, base, seed=seed_of(seed, name))

    def lr_scale(self, name: str) -> float:
        """LoRA+: B learns `loraplus_ratio` times as fast as A."""
        # A child's own, and no base tensor that trains in place; the second of a kind has a number in its name.
        ups = re.fullmatch(rf"(.*\.)?{self.key}(_\d+)?\.(.*\.)?b", name)
        return self.loraplus_ratio if self.loraplus_ratio and ups else 1.0


EXPERTS = "experts"
"""The preset of all fused experts."""


def _of_experts(pattern: str, experts: list[str], maps: list[str]) -> bool:
    """Whether a pattern is about experts and about no map."""
    if pattern == EXPERTS:
        return True
    return any(matches(n, pattern) for n in experts) and not any(matches(n, pattern) for n in maps)


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


def within_of(share: Share | None) -> Within | None:
    """Where a map's input, which may be a part, begins in the whole one, and how wide that is; None for all of it."""
    return None if share is None or share.of != "in" else (share.first, share.whole)


# --- module ----------------------------------------------------------------------------------------------------


class LoRADelta(Delta):
    """A and B of one map, in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = {"a": "in", "b": "out", "a0": "in", "b0": "out"}
    foldable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True

    a0: Tensor | None
    b0: Tensor | None

    def __init__(
        self,
        site: seams.MapSite,
        rank: int,
        scaling: float,
        dropout: float,
        *,
        started: bool = False,
    ) -> None:
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
        self.opened = False
        # Where they were set to start; None for the default, which starts at no change.
        for name, own in (("a0", self.a), ("b0", self.b)):
            start = torch.zeros_like(own, requires_grad=False) if started else None
            self.register_buffer(name, start, persistent=False)

    @property
    def started(self) -> bool:
        """Whether it started from the weight."""
        return self.a0 is not None

    @torch.no_grad()
    def begin(self, b_OR: Tensor, a_RI: Tensor) -> None:
        """Starts from these values, at no change."""
        assert self.a0 is not None
        assert self.b0 is not None
        for mine, value in ((self.a, a_RI), (self.b, b_OR)):
            mine.copy_(value)
        self.a0.copy_(self.a)
        self.b0.copy_(self.b)

    @torch.no_grad()
    def give_back(self, b: Tensor, a: Tensor) -> None:
        """Starts at s B A = b a, which are given as the base's weight lies."""
        low, high = (a.t(), b.t()) if self.transposed else (b, a)
        self.b.copy_(low).mul_(self.scaling**-0.5)
        self.a.copy_(high).mul_(self.scaling**-0.5)
        self.opened = True

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B of the plain LoRA that does the same: the own, or [A - A₀; A₀] and [B, B - B₀]."""
        if self.a0 is None or self.b0 is None:
            return self.a, self.b
        return torch.cat([self.a - self.a0, self.a0]), torch.cat([self.b, self.b - self.b0], dim=1)

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The base's output `y` and the change beside it."""
        return self._added(x, y, self.scaling)

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The same with another s: no digit of the change is lost in the output first."""
        return self._added(x, y, self.scaling * self.strength)

    def _added(self, x: Tensor, y: Tensor, scaling: float) -> Tensor:
        a_RI, b_OR = self.factors()
        if self.kind == "embedding":
            return y + low_rank_rows(x, a_RI, b_OR, scaling * self.multiplier).to(y.dtype)
        dropout = self.dropout if self.training else 0.0
        within = within_of(self.share)
        return low_rank_add(x, y, a_RI, b_OR, scaling, dropout=dropout, within=within)

    @property
    def is_low_rank(self) -> bool:
        """See `Delta.is_low_rank`."""
        dropped = bool(self.dropout) and self.training
        return self.kind == "linear" and not dropped and self.share is None

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        """See `Delta.low_rank`."""
        return *self.factors(), self.scaling * self.strength

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Zero on one side, random on the other; drawn on the CPU in fp32 so that every device gets the same."""
        if self.kind == "embedding":
            self.a.zero_()
            self.b.copy_(torch.randn(self.b.shape, generator=_generator(seed, "b")))
            return
        self.opened = False
        bound = 1 / math.sqrt(self.a.shape[1])
        uniform = torch.rand(self.a.shape, generator=_generator(seed, "a"))
        self.a.copy_((uniform * 2 - 1) * bound)
        self.b.zero_()

    def weight_delta(self) -> Tensor:
        """s · B A as (out, in); for an embedding (width, vocabulary)."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        a_RI, b_OR = (factor.detach().to(wide) for factor in self.factors())
        return self.scaling * (b_OR @ a_RI)

    def silent_at_start(self) -> frozenset[str]:
        """The side that meets a zero factor: A beside a linear, B beside an embedding; none after another start."""
        if self.started or self.opened:
            return frozenset()
        return frozenset({"b" if self.kind == "embedding" else "a"})


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, name))
