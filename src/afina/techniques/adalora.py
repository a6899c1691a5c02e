"""AdaLoRA: low-rank changes whose ranks shrink while they train, most where they matter least.

    y = W x + s · P (e ⊙ (Q x)),    s = alpha / (r + 0.00001),    r the first rank

Each direction i of a map (a row of Q, an entry of e, a column of P) has an importance, smoothed over the steps:

    I(w) = |w · dL/dw|,   M ← b1 M + (1 − b1) I,   U ← b2 U + (1 − b2) |I − M|,   score(w) = M U
    score(i) = score(e_i) + mean_j score(P_ji) + mean_j score(Q_ij)

The directions of all maps share one budget: at first all, then less by a cubic law, at last `target_rank` a map. Those
that score least have their e set to nought. P and Q are kept near orthogonal by a term of the loss:

    weight · mean over all P and Q of ‖P P' − 1‖ (Frobenius, over the r directions)

e starts at nought, P and Q normal with deviation 0.02, so the model starts as the base, bit for bit.

Legend: W (out × in) frozen weight, Q (r × in), P (out × r), e (r), M and U buffers, b1 and b2 settings.

Source: Zhang et al. 2023, "AdaLoRA", arXiv 2303.10512, sections 3.1 to 3.3 and equation 12; the scale, the norm that is
not squared and the order of the phases as in PEFT 0.21.2, which this equals step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError, counted
from afina.ops.lowrank import low_rank_add
from afina.techniques.adalora_budget import Allocation, Schedule, smooth
from afina.techniques.lora import within_of
from afina.techniques.maps import OnMaps, per_site
from afina.tree import Delta, Edit, Seams, Side, seed_of

DEVIATION = 0.02
"""Of the first values of P and Q."""

RANK_SHIFT = 1e-5
"""What PEFT adds to the rank that the scale is divided by."""


class AdaLoRA(OnMaps):
    """Low-rank changes beside linears and `Conv1D`s, whose ranks share a budget that shrinks while they train.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "adalora"

    init_rank: int = Field(default=12, ge=1, description="rank of every map at the beginning")
    target_rank: int = Field(default=8, ge=1, description="mean rank of the maps at the end")
    tinit: int | None = Field(
        default=None, ge=0, description="steps before the first cut; none is a tenth of the run"
    )
    tfinal: int | None = Field(
        default=None, ge=0, description="steps after the last cut; none is three tenths of the run"
    )
    delta_t: int = Field(default=1, ge=1, description="steps from one cut to the next")
    beta1: float = Field(default=0.85, gt=0, lt=1, description="smoothing of the importance")
    beta2: float = Field(default=0.85, gt=0, lt=1, description="smoothing of its uncertainty")
    orthogonality: float = Field(
        default=0.5,
        ge=0,
        allow_inf_nan=False,
        description="weight of the term that keeps P and Q orthogonal",
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        allow_inf_nan=False,
        description="numerator of the scale alpha / init_rank",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the input dropped before Q"
    )
    rank_pattern: dict[str, int] = Field(
        default={},
        description="pattern -> rank left at those modules, of an adapter that was cut; it is cut no more",
    )

    @model_validator(mode="after")
    def _check(self) -> AdaLoRA:
        if self.target_rank > self.init_rank:
            raise ValueError("target_rank must be at most init_rank: ranks only shrink")
        if not all(1 <= rank <= self.init_rank for rank in self.rank_pattern.values()):
            raise ValueError("every rank in rank_pattern must be from 1 to init_rank")
        return self

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `Technique.apply`.

        Raises:
            TechniqueError: a pattern matches nothing, or an embedding, or a rank exceeds its map.
        """
        sites = self.sites(model)
        ranks = per_site(
            [site.name for site in sites], self.rank_pattern, self.init_rank, "adalora.rank_pattern"
        )
        _refuse_unfit(sites, ranks)
        with Edit(model, [self]).whole() as edit:
            for site in sites:
                scaling = self.alpha / (self.init_rank + RANK_SHIFT)
                edit.attach(
                    site.name, self, AdaLoRADelta(site, ranks[site.name], scaling, self.dropout)
                )
            self.train_whole(edit, undoable=undoable)
        return edit

    def seams(self, edit: Edit, total_steps: int) -> Seams:
        """The orthogonality of each step's loss, the importances after it, and the cuts.

        Raises:
            TechniqueError: the run is too short for the cuts.
        """
        deltas = self._deltas(edit)
        schedule = self.schedule(total_steps, deltas)
        for delta in deltas:
            delta.schedule = schedule
        names = {id(delta): name for name, delta in edit.deltas.items()}
        named = {names[id(delta)]: delta for delta in deltas}
        allocation = Allocation(named, schedule, (self.beta1, self.beta2))

        def penalty(step: int) -> Tensor:
            return self.orthogonality * orthogonality(gram for d in deltas for gram in d.grams())

        return Seams(
            penalty=(penalty,) if self.orthogonality else (),
            moved=(allocation.look,),
            after_step=(allocation.cut,),
        )

    def schedule(self, total_steps: int, deltas: Iterable[AdaLoRADelta]) -> Schedule:
        """The budget of each step of a run.

        Raises:
            TechniqueError: there is no step left for cuts.
        """
        ranks = [delta.rank for delta in deltas]
        tinit = total_steps // 10 if self.tinit is None else self.tinit
        tfinal = 3 * total_steps // 10 if self.tfinal is None else self.tfinal
        if self.rank_pattern:
            # An adapter that was cut is cut no more: of the maps that have nothing left it does not know. The steps
            # are those of the run that cut it, and mean nothing in this one.
            return Schedule(sum(ranks), sum(ranks), 0, 0, self.delta_t, total_steps)
        if tinit + tfinal >= total_steps:
            raise TechniqueError(
                "the ranks of AdaLoRA would never be cut: the run is over before",
                got=f"adalora.tinit {tinit} and adalora.tfinal {tfinal}, of {counted(total_steps, 'step')}",
                wanted="tinit + tfinal below the steps of the run",
                cure="leave adalora.tinit and adalora.tfinal out (shares of the run), lower them, or train more steps",
            )
        target = self.target_rank * len(ranks)
        return Schedule(sum(ranks), target, tinit, tfinal, self.delta_t, total_steps)

    def outcome(self, edit: Edit) -> list[str]:
        """The ranks that are left, once there was a cut."""
        found = edit.deltas_of(self)
        ranks = {n: int(d.used().sum()) for n, d in found.items() if isinstance(d, AdaLoRADelta)}
        if sum(ranks.values()) == sum(delta.rank for delta in self._deltas(edit)):
            return []
        by_tail: dict[str, list[int]] = {}
        for name, rank in ranks.items():
            by_tail.setdefault(name.rpartition(".")[2], []).append(rank)
        told = ", ".join(f"{tail} {sum(each) / len(each):.2f}" for tail, each in by_tail.items())
        return [
            f"adalora: {counted(sum(ranks.values()), 'direction')} left in {counted(len(ranks), 'module')}, "
            f"{sum(ranks.values()) / len(ranks):.2f} on average: {told}; each by afina inspect"
        ]

    def _deltas(self, edit: Edit) -> list[AdaLoRADelta]:
        return [d for d in edit.deltas_of(self).values() if isinstance(d, AdaLoRADelta)]


def _refuse_unfit(sites: list[seams.MapSite], ranks: Mapping[str, int]) -> None:
    """Raises for an embedding, and for a rank above what its map can have."""
    for site in sites:
        if site.kind == "embedding":
            raise TechniqueError(
                "adalora acts on linears, and this is an embedding",
                got=site.name,
                cure="leave it out of adalora.target; lora and trainable_tokens change embeddings",
            )
        most = min(site.in_features, site.out_features)
        if ranks[site.name] > most:
            raise TechniqueError(
                f"adalora.init_rank exceeds the map it changes ({site.name})",
                got=ranks[site.name],
                wanted=f"at most {most}",
                cure="lower adalora.init_rank, or leave the small modules out with adalora.exclude",
            )


# --- mathematics -----------------------------------------------------------------------------------------------


def orthogonality(grams: Iterable[Tensor]) -> Tensor:
    """Mean of ‖G − 1‖ over products G = M Mᵀ (r, r) of matrices M (r, width)."""
    norms: list[Tensor] = []
    for gram_RR in grams:
        apart_RR = gram_RR - torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
        norms.append(apart_RR.square().sum().sqrt())
    return torch.stack(norms).mean()


# --- module ----------------------------------------------------------------------------------------------------


class AdaLoRADelta(Delta):
    """Q, P and e of one map, in fp32 whatever the base's dtype (fp64 beside an fp64 base), and what was seen of them.

    Attributes:
        schedule: of the run that trains it; None outside of one.
    """

    follows: ClassVar[Mapping[str, Side]] = {"a": "in", "b": "out", "e": "none"}
    foldable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True

    def __init__(self, site: seams.MapSite, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        weight = site.module.get_parameter("weight")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.transposed = site.kind != "linear"
        self.scaling = scaling
        self.dropout = dropout
        self.schedule: Schedule | None = None
        shapes = {"a": (rank, site.in_features), "b": (site.out_features, rank), "e": (rank, 1)}
        for name, shape in shapes.items():
            empty = torch.zeros(shape, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(empty))
            # Not part of the model's own state: a checkpoint has them as `Edit.state`.
            for of in ("mean", "spread"):
                self.register_buffer(f"{name}_{of}", torch.zeros_like(empty), persistent=False)
        self.a, self.b, self.e = (self.get_parameter(name) for name in shapes)
        kept = torch.ones(rank, dtype=torch.bool, device=weight.device)
        self.register_buffer("kept", kept, persistent=False)

    @property
    def rank(self) -> int:
        """Directions, those that were cut too."""
        return self.a.shape[0]

    def used(self) -> Tensor:
        """Which directions act or may come to act, as flags (rank,): those that were not cut, or grew again since.

        On the meta device none was cut.
        """
        if self.e.is_meta:
            return torch.ones(self.rank, dtype=torch.bool)
        return self.get_buffer("kept") | (self.e.detach()[:, 0] != 0)

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The base's output `y` and the change beside it."""
        return self._added(x, y, self.scaling)

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The same with another s: no digit of the change is lost in the output first."""
        return self._added(x, y, self.scaling * self.strength)

    def _added(self, x: Tensor, y: Tensor, scaling: float) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        within = within_of(self.share)
        return low_rank_add(x, y, self.a * self.e, self.b, scaling, dropout=dropout, within=within)

    @property
    def is_low_rank(self) -> bool:
        """See `Delta.is_low_rank`."""
        dropped = bool(self.dropout) and self.training
        return not self.transposed and not dropped and self.share is None

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        """See `Delta.low_rank`."""
        return self.a * self.e, self.b, self.scaling * self.strength

    def grams(self) -> list[Tensor]:
        """Q Qᵀ and Pᵀ P (r, r), of the whole Q and P."""
        return [self._gram(self.a, "in"), self._gram(self.b.t(), "out")]

    def _gram(self, m_RW: Tensor, side: Side) -> Tensor:
        """M Mᵀ of a matrix that this process may have a part of."""
        share = self.share
        if share is not None and share.of == side:
            return share.total(m_RW @ m_RW.t())
        # Where each process has all of it, the gradients of all are added up.
        m_RW = m_RW if share is None else share.once(m_RW)
        return m_RW @ m_RW.t()

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """e at nought, P and Q normal, drawn on the CPU in fp32, equal on every device; nothing seen or cut."""
        for name, buffer in self.named_buffers():
            buffer.fill_(float(name == "kept"))
        self.e.zero_()
        for name, parameter in (("a", self.a), ("b", self.b)):
            generator = torch.Generator().manual_seed(seed_of(seed, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DEVIATION)

    def weight_delta(self) -> Tensor:
        """s · P diag(e) Q as (out, in)."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        a, b, e = (p.detach().to(wide) for p in (self.a, self.b, self.e))
        return self.scaling * (b @ (a * e))

    def silent_at_start(self) -> frozenset[str]:
        """P and Q, which meet e = 0."""
        return frozenset({"a", "b"})

    @torch.no_grad()
    def look(self, name: str, importance: Tensor, betas: tuple[float, float]) -> None:
        """Takes |w · dL/dw| of a step and one of its parameters into what was seen of it."""
        mean, spread = (self.get_buffer(f"{name}_{of}") for of in ("mean", "spread"))
        smooth(mean, spread, importance, *betas)

    def scores(self) -> Tensor:
        """The score of each direction (rank,)."""
        a, b, e = (
            self.get_buffer(f"{name}_mean") * self.get_buffer(f"{name}_spread") for name in "abe"
        )
        return e[:, 0] + (a.mean(dim=1) + b.mean(dim=0))

    @torch.no_grad()
    def keep(self, kept: Tensor | None = None) -> None:
        """Sets e to nought where a direction is not kept; `kept` (rank,) from now on, or as it was."""
        mine = self.get_buffer("kept")
        if kept is not None:
            mine.copy_(kept)
        self.e.masked_fill_(~mine[:, None], 0.0)
