"""Where a LoRA's A and B start, other than at no change: parts of the weight, or of what rounding took off it.

    pissa:  s B₀ A₀ = U S V, the largest singular directions of W
    olora:  B₀, A₀ = the first columns of Q and rows of R, where Q R = W
    loftq:  s B₀ A₀ = the best of rank r for W - Q, where Q are the rounded weights

Legend: W (out × in) a frozen weight, r rank, s scale, B₀ (out × r) and A₀ (r × in) the start.

Source: as in `lora`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from afina import seams
from afina.errors import TechniqueError
from afina.ops import svd
from afina.ops.packed import PackedWeight

if TYPE_CHECKING:
    from afina.techniques.lora import LoRADelta

Start = Literal["default", "pissa", "olora", "loftq"]


def begin(start: Start, delta: LoRADelta, base: nn.Module, *, seed: int) -> None:
    """Gives A and B such a start; `loftq` leaves the default one beside a weight that is not rounded.

    Args:
        start: not the default one.
        delta: has the default start.
        base: the map that it changes.
        seed: of decompositions.
    """
    if start == "loftq":
        apart = remainder(base, delta.rank)
        if apart is not None:
            delta.give_back(*apart)
        return
    weight = seams.weight_of(base)
    weight_OI = weight.t() if delta.transposed else weight
    # Both have s in them: B A is the wanted part over s for PiSSA, and as it is for OLoRA.
    if start == "pissa":
        b_OR, a_RI = principal(weight_OI, delta.rank, seed=seed)
        share = delta.scaling**-0.5
    else:
        b_OR, a_RI = orthogonal(weight_OI, delta.rank)
        share = 1.0
    delta.begin(b_OR * share, a_RI * share)


def refuse_start(
    key: str,
    start: Start,
    sites: Sequence[seams.MapSite],
    ranks: Mapping[str, int],
    *,
    experts: bool,
) -> None:
    """Raises where these places cannot start so.

    Args:
        key: of the technique.
        start: how.
        sites: the maps that it changes.
        ranks: of each.
        experts: it changes fused experts too.

    Raises:
        TechniqueError: embeddings and experts start by default alone; `loftq` needs what rounding took off.
    """
    embeddings = [site.name for site in sites if site.kind == "embedding"]
    if start != "default" and (embeddings or experts):
        raise TechniqueError(
            f"{key}.start = {start} is for linears",
            got=", ".join(embeddings[:3]) or "fused experts",
            cure=f"leave them out of {key}.target, or start by default",
        )
    if start == "loftq":
        _refuse_no_remainder(key, sites, ranks)


def _refuse_no_remainder(
    key: str, sites: Sequence[seams.MapSite], ranks: Mapping[str, int]
) -> None:
    """Raises unless rounding took something off the maps, and factors of these ranks were kept of it.

    Raises:
        TechniqueError: see above.
    """
    weights = {site.name: site.module.get_parameter("weight") for site in sites}
    packed = {n: w for n, w in weights.items() if isinstance(w, PackedWeight)}
    kept = {n: 0 if w.apart is None else w.apart[1].shape[0] for n, w in packed.items()}
    short = [name for name in packed if kept[name] < ranks[name]]
    most = max(ranks.values())
    way = f"quantize.loftq_rank={most}, in Python afina.Quantize(loftq_rank={most})"
    if not packed:
        raise TechniqueError(
            f"{key}.start = loftq gives back what rounding took off, and none of these weights is rounded",
            got=f"{sites[0].name}, …: {weights[sites[0].name].dtype}" if sites else "no linears",
            wanted="a base that is quantised beside it",
            cure=f"add quantize to the techniques, with {way}; or start by default",
        )
    if short:
        raise TechniqueError(
            f"{key}.start = loftq needs what rounding took off, which is known only while weights are packed",
            got=f"{short[0]}: kept to rank {kept[short[0]]}",
            wanted=f"rank {ranks[short[0]]}",
            cure=f"load and quantise the base with {way}",
        )


def principal(weight_OI: Tensor, rank: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """B (out, r) and A (r, in) whose product is the best approximation of a weight: U √S and √S V. In fp64."""
    return svd.factors(svd.best(weight_OI, rank=rank, seed=seed), rank)


def orthogonal(weight_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (out, r) and A (r, in): the first columns of Q and rows of R, where Q R is the weight. In fp64."""
    linalg: Any = torch.linalg
    factors: tuple[Tensor, Tensor] = linalg.qr(weight_OI.double())
    q_OK, r_KI = factors
    return q_OK[:, :rank], r_KI[:rank]


def remainder(base: nn.Module, rank: int) -> tuple[Tensor, Tensor] | None:
    """B and A of what rounding took off a map's weight, as the weight lies; None where it is not rounded.

    Args:
        base: the map.
        rank: of the factors.
    """
    weight = base.get_parameter("weight")
    if not isinstance(weight, PackedWeight) or weight.apart is None:
        return None
    b, a = weight.apart
    return b[:, :rank], a[:rank]
