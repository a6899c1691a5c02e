"""DoRA: direction and length of a frozen map's rows are learnt apart; LoRA turns the one, a magnitude sets the other.

    y = b + (m / n) ∘ (W x + s · B (A x)),    n = ‖W + s · B A‖ row by row

m starts at ‖W‖ and B at zero, so the model starts as the base, bit for bit. In backward n counts as a constant, as in
the paper's section 4.3. W + s B A is never written out: with G = A Aᵀ,

    n² = ‖W‖² + 2s · rowsum((W Aᵀ) ∘ B) + s² · rowsum((B G) ∘ B)

which costs what r more tokens would, and is computed anew in every pass: beside the tokens of one it does not count.
Where nothing is trained, it is kept until a tensor that it is made of changes.

Legend: W (out × in) frozen weight, b bias, x input, A (r × in), B (out × r), s scale as in LoRA, m (out) magnitudes,
∘ feature by feature. On an embedding a row is one feature of all tokens, as in PEFT.

Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv 2402.09353, sections 4.1 and 4.3. The
norm from products of rank r: peft PR #3387.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.ops.lowrank import low_rank_add
from afina.ops.native.gemm import gemm, part
from afina.ops.packed import dense, stored
from afina.techniques.lora import LoRA, LoRADelta, low_rank_rows, within_of
from afina.tree import Delta, Edit, Reads, Side
from afina.tree.pieces import Share

ROWS = 1024
"""Rows of the weight that are looked at together: a copy of so many in fp32 is the memory that a norm takes."""


class DoRA(LoRA):
    """Low-rank changes of direction and learnt magnitudes, beside frozen linears, `Conv1D`s and embeddings.

    Each pattern is a module's name, its last part (`q_proj`), or a glob; it must match something.
    """

    key: ClassVar[str] = "dora"
    reaches_experts: ClassVar[bool] = False

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        """See `LoRA.apply`.

        Raises:
            TechniqueError: when another technique acts on one of the maps already.
        """
        for site in self.sites(model):
            others = [name for name, m in site.module.named_children() if isinstance(m, Delta)]
            if others:
                raise TechniqueError(
                    f"dora sets the length of what the base itself gives, and {others[0]} acts at {site.name} already",
                    cure=f"leave the module out: dora.exclude, with {site.name!r}",
                )
        return super().apply(model, undoable=undoable)

    def delta(self, site: seams.MapSite, rank: int, scaling: float) -> DoRADelta:
        """What is attached at one map."""
        return DoRADelta(site, rank, scaling, self.dropout, started=self.offset)

    def start_reads(self, model: nn.Module) -> Reads:
        """The weight whose rows are measured."""
        return "place"

    def init(self, edit: Edit, *, seed: int) -> None:
        """A and B as LoRA's; the magnitudes are the lengths of the base's rows."""
        super().init(edit, seed=seed)
        for name, delta in edit.deltas.items():
            if isinstance(delta, DoRADelta):
                delta.measure(edit.model.get_submodule(name.rpartition(".")[0]))


# --- mathematics -----------------------------------------------------------------------------------------------


@torch.no_grad()
def row_norms(
    weight: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scaling: float,
    *,
    turned: bool = False,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """‖W + s · B A‖ of each row, without the sum.

    Args:
        weight: W, (O, I), any floating-point dtype; (I, O) where `turned`.
        a_RI: A.
        b_OR: B.
        scaling: s.
        turned: the weight is stored as (in, out).
        total: sums squares (O,) over the parts of the rows, of which W and A are one; None where they are whole.

    Returns:
        (O,), in fp32, or fp64 where A is; no smaller than the root of the smallest normal number, to divide by.
    """
    wide = torch.promote_types(a_RI.dtype, torch.float32)
    a_RI, b_OR = a_RI.to(wide), b_OR.to(wide)
    weight_OI = weight.t() if turned else weight
    low_O = _of_path(a_RI, b_OR, scaling)
    found: list[Tensor] = []
    for start in range(0, weight_OI.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        part_OI = weight_OI[rows].to(wide)
        cross_O = ((part_OI @ a_RI.t()) * b_OR[rows]).sum(1) * (2 * scaling)
        found.append(part_OI.square().sum(1) + cross_O + low_O[rows])
    squares_O = torch.cat(found)
    if total is not None:
        squares_O = total(squares_O)
    return squares_O.clamp_min(torch.finfo(wide).tiny).sqrt()


def _of_path(a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """‖s · B A‖² of each row, (O,), without the product."""
    return ((b_OR @ (a_RI @ a_RI.t())) * b_OR).sum(1) * scaling**2


def _squares(weight_OI: Tensor) -> Tensor:
    """‖W‖² of each row, (O,) in fp32."""
    starts = range(0, weight_OI.shape[0], ROWS)
    return torch.cat([weight_OI[at : at + ROWS].detach().float().square().sum(1) for at in starts])


def rescaled(z: Tensor, m_O: Tensor, norms_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """b + (m / n) ∘ (z - b), rounded once; it is `z`, bit for bit, where m is n.

    Args:
        z: (..., O), the map's output with the low-rank change, bias and all.
        m_O: magnitudes.
        norms_O: n, a constant.
        bias_O: b.

    Returns:
        (..., O) in `z`'s dtype.
    """
    ratio_O = m_O / norms_O
    if bias_O is None:
        return (z * ratio_O).to(z.dtype)
    return torch.addcmul((1 - ratio_O) * bias_O, z, ratio_O).to(z.dtype)


# --- module ----------------------------------------------------------------------------------------------------


class DoRADelta(LoRADelta):
    """A, B and the magnitudes m of one map, in fp32 whatever the base's dtype (fp64 beside an fp64 base)."""

    follows: ClassVar[Mapping[str, Side]] = {**LoRADelta.follows, "m": "out"}
    additive: ClassVar[bool] = False
    alone: ClassVar[str] = "each sets the lengths of the base's own rows"

    def __init__(
        self,
        site: seams.MapSite,
        rank: int,
        scaling: float,
        dropout: float,
        *,
        started: bool = False,
    ) -> None:
        super().__init__(site, rank, scaling, dropout, started=started)
        self.m = nn.Parameter(
            torch.ones(site.out_features, dtype=self.b.dtype, device=self.b.device)
        )
        self._kept: tuple[tuple[weakref.ref[Tensor], ...], tuple[int, ...], Tensor] | None = None
        self._squares: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    @property
    def is_low_rank(self) -> bool:
        """See `Delta.is_low_rank`; a part of the way is no such change."""
        return super().is_low_rank and self.strength == 1

    @torch.no_grad()
    def lengths(self, base: nn.Module) -> tuple[Tensor, Tensor]:
        """m and n; W Aᵀ is a product in bf16, and ‖W‖² is kept until W changes."""
        weight, (a_RI, b_OR) = base.get_parameter("weight"), self.factors()
        seen = self._squares
        if seen is None or seen[0]() is not weight or seen[1] != weight._version:
            squares = _squares(dense(weight))
            seen = self._squares = (weakref.ref(weight), weight._version, squares)
        cross_RO = a_RI.new_empty(len(a_RI), len(b_OR))
        gemm(cross_RO, part(a_RI.to(torch.bfloat16), stored(weight)))
        found_O = seen[2] + (cross_RO.t() * b_OR).sum(1) * (2 * self.scaling)
        found_O += _of_path(a_RI, b_OR, self.scaling)
        return self.m, found_O.clamp_min_(torch.finfo(found_O.dtype).tiny).sqrt_()

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """The rows of base and change together, at the lengths m."""
        a_RI, b_OR = self.factors()
        if self.kind == "embedding":
            rows = low_rank_rows(x, a_RI, b_OR, self.scaling * self.multiplier)
            return rescaled(y + rows.to(y.dtype), self.m, self.norms(base), None)
        dropout = self.dropout if self.training else 0.0
        within = within_of(self.share)
        z = low_rank_add(x, y, a_RI, b_OR, self.scaling, dropout=dropout, within=within)
        return rescaled(z, self.m, self.norms(base), seams.bias_of(base))

    def scaled(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """A part of the way from the base's output to the changed one, as for any change that is no sum."""
        return Delta.scaled(self, x, y, base)

    def shared_out(self, share: Share) -> None:
        """The norms are of other tensors from now on, though these are the same objects."""
        super().shared_out(share)
        self._kept = None

    def norms(self, base: nn.Module) -> Tensor:
        """n, (out,); of an answer's many passes the first computes it."""
        parts = (base.get_parameter("weight"), self.a, self.b)
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_inference_mode_enabled()
        ):
            return self._norms(base)
        versions = tuple(part._version for part in parts)
        if self._kept is not None:
            seen, at, norms = self._kept
            same = all(ref() is part for ref, part in zip(seen, parts, strict=True))
            if same and at == versions and norms.device == self.a.device:
                return norms
        norms = self._norms(base)
        self._kept = (tuple(weakref.ref(part) for part in parts), versions, norms)
        return norms

    def _norms(self, base: nn.Module) -> Tensor:
        weight, share = seams.weight_of(base), self.share
        # Where processes share the rows' numbers out, each has its part of the sum of squares.
        total = share.total if share is not None and share.of == "in" else None
        return row_norms(weight, *self.factors(), self.scaling, turned=self.transposed, total=total)

    @torch.no_grad()
    def measure(self, base: nn.Module) -> None:
        """Sets the magnitudes to what the rows' lengths are now."""
        self.m.copy_(self._norms(base))

    @torch.no_grad()
    def fold_weight(self, weight_OI: Tensor) -> Tensor:
        """(m / ‖W + s B A‖) (W + s B A)."""
        wide = weight_OI.dtype
        a_RI, b_OR = (factor.to(wide) for factor in self.factors())
        weight_OI.addmm_(b_OR, a_RI, alpha=self.scaling)
        norms_O = weight_OI.square().sum(1).clamp_min(torch.finfo(wide).tiny).sqrt()
        return weight_OI.mul_((self.m.to(wide) / norms_O)[:, None])

    def weight_delta(self) -> Tensor:
        """None: it is no change that is added.

        Raises:
            TechniqueError: always.
        """
        raise TechniqueError("dora's change of a weight is none that is added to it")
