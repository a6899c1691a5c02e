"""Adapters of one base added, subtracted and mixed into one, on disk.

    ΔW = Σ wᵢ ΔWᵢ        exactly, by default: the factors stand side by side (see `arithmetic` for the other methods)

Whole modules are combined as changes of the base's: W + Σ wᵢ (Wᵢ - W), for which the base must be at hand.

Legend: ΔWᵢ the change that adapter i makes to a weight, wᵢ its weight in the sum, Wᵢ a module that it brings whole, W
the base's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from afina.adapters.arithmetic import How, Place, combined, error_of, kept_of
from afina.adapters.at_hand import AtHand, base_at_hand, refuse_other_bases
from afina.adapters.computed import Computed
from afina.adapters.outputs import MADE_BY, place_of, refuse_out
from afina.adapters.products import Product
from afina.adapters.result import result_of
from afina.adapters.sources import Source, read_source, refuse_other_shapes, stored_type
from afina.errors import AdapterError, ConfigError
from afina.ops import mixing, svd
from afina.problems import Frozen, of_kind
from afina.tree import seed_of

NOTHING = 1e-6
"""A sum that is so much smaller than its parts is what rounding left of them: factors are mostly of fp32."""

Method = Literal["cat", "svd", "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"]
Sources = Mapping[Any, float] | Sequence[tuple[Any, float]]


class CombineSettings(Frozen):
    """How adapters are combined."""

    method: Method = Field(
        default="cat",
        description="cat is exact; svd, ties, dare_linear, dare_ties, magnitude_prune cut to a rank; linear keeps it",
    )
    rank: int | None = Field(
        default=None, ge=1, description="of the result, at most, where it is cut"
    )
    energy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of each change's energy to keep, instead of a rank",
    )
    density: float | None = Field(
        default=None, gt=0, le=1, description="share of the values that ties, dare and pruning keep"
    )
    seed: int = Field(default=0, ge=0, description="of what dare drops")
    overwrite: bool = Field(default=False, description="replace an earlier result of this name")

    @model_validator(mode="after")
    def _check(self) -> CombineSettings:
        cuts = self.method not in ("cat", "linear")
        if (self.rank is not None or self.energy is not None) and not cuts:
            raise ValueError(
                f"{self.method} cuts nothing: leave rank and energy out, or choose svd"
            )
        if self.method == "svd" and self.rank is None and self.energy is None:
            raise ValueError("svd needs a rank, or the energy to keep")
        mixes = self.method in mixing.MIXES
        if mixes and self.density is None:
            raise ValueError(f"{self.method} needs a density, such as 0.2")
        if self.density is not None and not mixes:
            raise ValueError(f"{self.method} keeps every value: leave density out")
        return self

    def how(self) -> How:
        """As the mathematics takes it."""
        density = 1.0 if self.density is None else self.density
        return How(self.method, self.rank, self.energy, density, self.seed)


@torch.no_grad()
def combine(
    sources: Sources,
    out: str | Path,
    *,
    base: str | Path | None = None,
    settings: CombineSettings | None = None,
    token: str | None = None,
    offline: bool | None = None,
) -> Computed:
    """Makes one adapter of several of one base.

    Args:
        sources: runs, checkpoints or adapters, each with its weight; a list of pairs, or a mapping.
        out: the folder to make.
        base: their base, where it is another one than they name, or lies elsewhere now.
        settings: defaults when None: the exact weighted sum.
        token: of the Hub.
        offline: True downloads no base that is named.

    Returns:
        What was made, read back, and fitted to the base where that is at hand.

    Raises:
        AdapterError: the adapters cannot be combined so; nothing is written.
        AfinaError: a name or setting cannot be used; nothing is written.
    """
    settings = of_kind(CombineSettings, settings)
    named = _weights(sources)
    place = place_of(out)
    found = [read_source(name) for name, _ in named]
    refuse_other_bases(found, named=base is not None)
    refuse_out(place, [source.folder for source in found], overwrite=settings.overwrite)
    hand = base_at_hand(found[0], base, token=token, offline=offline)
    notes: list[str] = []
    at_hand = hand if isinstance(hand, AtHand) else None
    if at_hand is not None:
        met = [at_hand.fitted(source) for source in found]
        found = [source for source, _ in met]
        notes += [note for _, told in met for note in told]
    else:
        notes.append(f"{hand}; fit is judged by names and shapes")
    refuse_other_shapes(found)
    pairs = list(zip(found, (weight for _, weight in named), strict=True))
    _refuse_ranks(found, settings)
    products, places = _products(pairs, settings.how())
    whole = _whole(pairs, settings.how(), hand)
    told = _told(pairs, settings, places)
    notes += [*_tokenizers(found), *([] if whole else _idle(pairs, products))]
    notes += result_of(found, products, whole, at_hand, told).write(place, at_hand)
    return Computed(place, tuple(places), tuple(whole), tuple(dict.fromkeys(notes)), told)


def _weights(sources: Any) -> list[tuple[Any, float]]:
    """The sources and their weights, checked.

    Raises:
        ConfigError: they are no pairs of a name and a number.
    """
    pairs = list(sources.items()) if isinstance(sources, Mapping) else sources
    form = "pairs of a name and a weight: [('runs/a', 0.7), ('runs/b', 0.3)]"
    if not isinstance(pairs, list | tuple) or not pairs:
        raise ConfigError("there is nothing to combine", got=repr(sources)[:80], wanted=form)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError("an adapter has no weight", got=repr(pair)[:80], wanted=form)
        weight = pair[1]
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError("a weight is no number", got=repr(weight)[:80], wanted=form)
        if not math.isfinite(weight) or weight == 0:
            raise ConfigError(
                "a weight must be a number, and not 0",
                got=f"{pair[0]}: {weight}",
                cure="leave out an adapter that is to add nothing" if weight == 0 else None,
            )
    return [(name, float(weight)) for name, weight in pairs]


Pairs = Sequence[tuple[Source, float]]


def _products(pairs: Pairs, how: How) -> tuple[dict[str, Product], list[Place]]:
    """The change of each place that any adapter has."""
    made: dict[str, Product] = {}
    places: list[Place] = []
    for name in sorted({name for source, _ in pairs for name in source.products}):
        parts = [(s.products[name], weight) for s, weight in pairs if name in s.products]
        made[name], place = combined(name, parts, how)
        places.append(place)
    return made, places


def _idle(pairs: Pairs, products: Mapping[str, Product]) -> list[str]:
    """A note where changes that are something cancel, but for the rounding of their own factors."""
    something = False
    for name, made in products.items():
        parts = [(s.products[name], weight) for s, weight in pairs if name in s.products]
        before = sum(_energy(part) * weight**2 for part, weight in parts)
        if _energy(made) > NOTHING**2 * before:
            return []
        something = something or before > 0
    return ["the weights cancel the changes: the result changes nothing"] if something else []


def _energy(product: Product) -> float:
    """The squared Frobenius norm of a change."""
    return float((svd.product_values(product.b_OR, product.a_RI) * product.scale).square().sum())


def _refuse_ranks(sources: Sequence[Source], settings: CombineSettings) -> None:
    """Raises where linear would add matrices of different shapes."""
    if settings.method != "linear":
        return
    for name in {name for source in sources for name in source.products}:
        ranks = sorted({s.products[name].rank for s in sources if name in s.products})
        if len(ranks) > 1:
            raise AdapterError(
                "linear adds the factors themselves, which must have one rank",
                got=f"{name}: ranks {', '.join(map(str, ranks))}",
                cure="the default method, cat, takes any ranks, and is exact",
            )


def _whole(pairs: Pairs, how: How, hand: AtHand | str) -> dict[str, Tensor]:
    """The base tensors that the result brings whole.

    Raises:
        AdapterError: there are some, and no base to tell what is change in them.
    """
    names = sorted({name for source, _ in pairs for name in source.whole})
    anew = {n for n in names if isinstance(hand, AtHand) and n in hand.new}
    if names and isinstance(hand, str):
        raise AdapterError(
            "whole modules are combined as changes of the base's, and that is not at hand",
            got=f"{', '.join(names[:4])}; {hand}",
            cure="say where the base is: --base MODEL (in Python base='MODEL')",
        )
    if len(pairs) == 1 and pairs[0][1] == 1 and how.method not in mixing.MIXES:
        return dict(pairs[0][0].whole)
    made: dict[str, Tensor] = {}
    for name in names:
        assert isinstance(hand, AtHand)
        if name in anew:
            made[name] = _head(name, pairs, how)
            continue
        own = hand.read(name).double()
        brought = [(s.whole[name], weight) for s, weight in pairs if name in s.whole]
        changes, weights = [t.double() - own for t, _ in brought], [w for _, w in brought]
        if how.method in mixing.MIXES:
            chance = torch.Generator().manual_seed(seed_of(how.seed, name))
            change = mixing.MIXES[how.method](changes, weights, how.density, chance)
        else:
            change = mixing.weighted_sum(changes, weights)
        made[name] = (own + change).to(stored_type([source for source, _ in pairs]))
    return made


def _head(name: str, pairs: Pairs, how: How) -> Tensor:
    """A tensor of a head that the base has not: W + Σ wᵢ (Wᵢ - W) without W, which weights that add up to 1 cancel.

    Raises:
        AdapterError: they do not.
    """
    brought = [(s.whole[name], weight) for s, weight in pairs if name in s.whole]
    total = sum(weight for _, weight in brought)
    if how.method in mixing.MIXES or not math.isclose(total, 1, rel_tol=1e-9):
        raise AdapterError(
            "the base has no such head, so that none of the adapters' is a change of it: they can only be averaged",
            got=f"{name}: {how.method}, weights that add up to {total:g}",
            wanted="cat, svd or linear, and weights that add up to 1, such as A:0.5 B:0.5",
        )
    mean = sum(t.double() * weight for t, weight in brought)
    assert isinstance(mean, Tensor)
    return mean.to(stored_type([source for source, _ in pairs]))


def _tokenizers(sources: Sequence[Source]) -> list[str]:
    """A note where the adapters' tokenizers are not one."""
    texts = {
        (source.folder / "tokenizer.json").read_bytes()
        for source in sources
        if (source.folder / "tokenizer.json").is_file()
    }
    if len(texts) < 2:
        return []
    return ["the adapters have different tokenizers: the first one's goes along"]


def _told(pairs: Pairs, settings: CombineSettings, places: Sequence[Place]) -> dict[str, Any]:
    return {
        MADE_BY: "afina combine",
        "of": [{"name": source.name, "weight": weight} for source, weight in pairs],
        **settings.model_dump(mode="json", exclude={"overwrite"}, exclude_none=True),
        "kept": kept_of(places),
        "error": error_of(places),
    }
