"""An adapter with smaller factors: of every place the best approximation of a rank, or the smallest that keeps enough.

    ΔW' = U_k S_k V_kᵀ,     s · B A = U S Vᵀ          kept energy: Σ_{i ≤ k} Sᵢ² / Σ Sᵢ²

The singular values come from the factors alone (see `ops.svd`), so neither the base nor ΔW itself is needed, and the
kept energy is exact. Modules that the adapter brings whole stay as they are.

Legend: ΔW = s · B A the change of a weight, k the new rank.

Source: Eckart and Young 1936, "The approximation of one matrix by another of lower rank".
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field, model_validator

from afina.adapters.arithmetic import Place, cut, error_of, kept_of
from afina.adapters.at_hand import AtHand, base_at_hand
from afina.adapters.computed import Computed
from afina.adapters.outputs import MADE_BY, place_of, refuse_out
from afina.adapters.products import Product
from afina.adapters.result import result_of
from afina.adapters.sources import read_source
from afina.ops import svd
from afina.problems import Frozen, of_kind


class ResizeSettings(Frozen):
    """How small an adapter is made."""

    rank: int | None = Field(default=None, ge=1, description="of every place, at most")
    energy: float | None = Field(
        default=None, gt=0, le=1, description="share of each change's energy to keep, at least"
    )
    overwrite: bool = Field(default=False, description="replace an earlier result of this name")

    @model_validator(mode="after")
    def _check(self) -> ResizeSettings:
        if self.rank is None and self.energy is None:
            raise ValueError("say how small: a rank, or the energy to keep, such as 0.95")
        return self


@torch.no_grad()
def resize(
    source: str | Path,
    out: str | Path,
    *,
    settings: ResizeSettings,
    base: str | Path | None = None,
    token: str | None = None,
    offline: bool | None = None,
) -> Computed:
    """Makes a smaller adapter of one.

    Args:
        source: a run, a checkpoint or an adapter.
        out: the folder to make.
        settings: the rank, the energy, or both: the smaller rank of the two.
        base: its base, where it is another one than it names, or lies elsewhere now.
        token: of the Hub.
        offline: True downloads no base that is named.

    Returns:
        What was made, read back, and fitted to the base where that is at hand.

    Raises:
        AdapterError: it is not made of low-rank products; nothing is written.
        AfinaError: a name or setting cannot be used; nothing is written.
    """
    settings = of_kind(ResizeSettings, settings)
    place = place_of(out)
    found = read_source(source)
    refuse_out(place, [found.folder], overwrite=settings.overwrite)
    hand = base_at_hand(found, base, token=token, offline=offline)
    notes: tuple[str, ...] = (f"{hand}; fit is judged by names and shapes",)
    at_hand = hand if isinstance(hand, AtHand) else None
    if at_hand is not None:
        found, notes = at_hand.fitted(found)
    products: dict[str, Product] = {}
    places: list[Place] = []
    for name, product in sorted(found.products.items()):
        spectrum = svd.of_product(product.b_OR.double() * product.scale, product.a_RI)
        products[name], row = cut(
            name, spectrum, product, rank=settings.rank, energy=settings.energy
        )
        places.append(row)
    told = {
        MADE_BY: "afina resize",
        "of": [{"name": found.name}],
        **settings.model_dump(mode="json", exclude={"overwrite"}, exclude_none=True),
        "kept": kept_of(places),
        "error": error_of(places),
    }
    result = result_of([found], products, found.whole, at_hand, told)
    notes += result.write(place, at_hand)
    return Computed(place, tuple(places), tuple(found.whole), tuple(dict.fromkeys(notes)), told)
