"""Several low-rank changes of one place made one, by each method; and how far that is from what was wanted.

    cat      B = [w₁s₁B₁ … wₙsₙBₙ],  A = [A₁; …; Aₙ]     exactly Σ wᵢ sᵢ Bᵢ Aᵢ
    svd      the best approximation of rank k of that sum
    linear   B = Σ √|wᵢsᵢ| Bᵢ,  A = Σ ±√|wᵢsᵢ| Aᵢ         the sum only where all A or all B are equal
    others   the changes written out and mixed (see `ops.mixing`), then as svd

Concatenated factors of more than min(out, in) columns are made that many, which loses nothing. `linear` adds A and B
apart, so its product has the cross terms Bᵢ Aⱼ too; where all A are equal (as beside a frozen A), or all B, it adds the
others and is exact.

Legend: B (out × r), A (r × in), s scale, w weight, k rank. Energy is the squared Frobenius norm of a change.

Source: PEFT 0.21.2, `add_weighted_adapter`, for the names. There `ties`, `dare_*` and `magnitude_prune` work on A and B
apart, where their product is no merge of the changes; here they are what PEFT calls `ties_svd` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afina.adapters.products import Product
from afina.ops import mixing, svd
from afina.tree import seed_of

EXACT = "cat"
METHODS = (EXACT, "svd", "linear", *mixing.MIXES)

Weighted = Sequence[tuple[Product, float]]


@dataclass(frozen=True)
class How:
    """A method and its settings; see `combine.CombineSettings`."""

    method: str = EXACT
    rank: int | None = None
    energy: float | None = None
    density: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """What became of one place.

    Attributes:
        name: of the module.
        shape: of the change: (out, in).
        rank: of the result.
        energy: of what was wanted.
        kept: the share of that energy which the result has, above 1 with cross terms; 1 where nothing was wanted.
        error: ‖result - wanted‖ / ‖wanted‖; 0 where nothing was wanted and nothing is.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    energy: float
    kept: float
    error: float


def combined(name: str, parts: Weighted, how: How) -> tuple[Product, Place]:
    """One product of scale 1 in fp64, and what became of the place.

    Args:
        name: of the module.
        parts: the changes of the adapters that have this place, with their weights.
        how: the method.
    """
    if how.method == "linear":
        return _linear(name, parts)
    if how.method in mixing.MIXES:
        changes = [part.dense() for part, _ in parts]
        chance = torch.Generator().manual_seed(seed_of(how.seed, name))
        mix = mixing.MIXES[how.method]
        mixed = mix(changes, [weight for _, weight in parts], how.density, chance)
        rank = how.rank
        if rank is None and how.energy is None:
            rank = sum(part.rank for part, _ in parts)
        spectrum = svd.best(mixed, rank=rank, seed=seed_of(how.seed, name))
        return cut(name, spectrum, parts[0][0], rank=rank, energy=how.energy)
    b_OR, a_RI = _concatenated(parts)
    if how.method == "svd":
        spectrum = svd.of_product(b_OR, a_RI)
        return cut(name, spectrum, parts[0][0], rank=how.rank, energy=how.energy)
    energy = float(svd.product_values(b_OR, a_RI).square().sum())
    if a_RI.shape[0] > min(parts[0][0].shape):
        b_OR, a_RI = svd.factors(svd.of_product(b_OR, a_RI), min(parts[0][0].shape))
    made = Product(b_OR, a_RI, embedding=parts[0][0].embedding)
    return made, Place(name, made.shape, made.rank, energy, 1.0, 0.0)


def cut(
    name: str, spectrum: svd.Spectrum, like: Product, *, rank: int | None, energy: float | None
) -> tuple[Product, Place]:
    """The best product of a rank, and what it keeps.

    Args:
        name: of the module.
        spectrum: of the wanted change.
        like: says what the place is.
        rank: at most so many; None goes by energy alone.
        energy: at least this share; None goes by rank alone.
    """
    chosen = svd.rank_for(spectrum, rank=rank, energy=energy)
    b_OR, a_RI = svd.factors(spectrum, chosen)
    made = Product(b_OR, a_RI, embedding=like.embedding)
    kept = min(1.0, spectrum.kept(chosen) / spectrum.energy) if spectrum.energy else 1.0
    # What is cut off is summed itself: 1 - kept has no digits left where nearly all is kept.
    lost = float(spectrum.values[chosen:].square().sum())
    lost += max(0.0, spectrum.energy - spectrum.kept(len(spectrum.values)))
    error = math.sqrt(lost / spectrum.energy) if spectrum.energy else 0.0
    return made, Place(name, like.shape, chosen, spectrum.energy, kept, error)


def _concatenated(parts: Weighted) -> tuple[Tensor, Tensor]:
    """B and A of the weighted sum, in fp64."""
    b_OR = torch.cat([p.b_OR.double() * (p.scale * weight) for p, weight in parts], dim=1)
    return b_OR, torch.cat([p.a_RI.double() for p, _ in parts], dim=0)


def _linear(name: str, parts: Weighted) -> tuple[Product, Place]:
    first = parts[0][0]
    factors = [(p.b_OR.double(), p.a_RI.double(), p.scale * weight) for p, weight in parts]
    if len({p.rank for p, _ in parts}) > 1:
        raise ValueError("linear needs equal ranks")
    if all(torch.equal(a, first.a_RI.double()) for _, a, _ in factors):
        made_b, made_a = sum(b * s for b, _, s in factors), factors[0][1]
    elif all(torch.equal(b, first.b_OR.double()) for b, _, _ in factors):
        made_b, made_a = factors[0][0], sum(a * s for _, a, s in factors)
    else:
        made_b = sum(b * math.sqrt(abs(s)) for b, _, s in factors)
        made_a = sum(a * math.copysign(math.sqrt(abs(s)), s) for _, a, s in factors)
    assert isinstance(made_b, Tensor)
    assert isinstance(made_a, Tensor)
    b_OR, a_RI = _concatenated(parts)
    energy = float(svd.product_values(b_OR, a_RI).square().sum())
    off = svd.product_values(torch.cat([made_b, -b_OR], 1), torch.cat([made_a, a_RI], 0))
    distance = float(off.square().sum())
    made = Product(made_b, made_a, embedding=first.embedding)
    there = float(svd.product_values(made_b, made_a).square().sum())
    kept, error = _share(there, energy, 1.0), math.sqrt(_share(distance, energy, 0.0))
    return made, Place(name, made.shape, made.rank, energy, kept, error)


def _share(part: float, energy: float, of_nothing: float) -> float:
    """A part of an energy; what is there where none was wanted is infinitely much."""
    if energy:
        return part / energy
    return math.inf if part else of_nothing


# --- all places ---------------------------------------------------------------------------------------------------


def kept_of(places: Sequence[Place]) -> float:
    """The share of the whole energy that was kept."""
    energy = sum(place.energy for place in places)
    return sum(place.energy * place.kept for place in places) / energy if energy else 1.0


def error_of(places: Sequence[Place]) -> float:
    """‖result - wanted‖ / ‖wanted‖ over all places."""
    energy = sum(place.energy for place in places)
    off = sum(place.energy * place.error**2 for place in places)
    return math.sqrt(off / energy) if energy else 0.0
