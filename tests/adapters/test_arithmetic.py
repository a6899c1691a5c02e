"""One place at a time: each method against the changes written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.adapters.arithmetic import METHODS, How, Place, combined, error_of, kept_of
from afina.adapters.products import Product
from afina.ops import mixing
from afina.tree import seed_of

linalg: Any = torch.linalg  # it has no types
OUT, IN = 10, 14


def product(
    seed: int, rank: int = 3, scale: float = 1.7, out: int = OUT, into: int = IN
) -> Product:
    torch.manual_seed(seed)
    b, a = torch.randn(out, rank), torch.randn(rank, into)
    return Product(b.double(), a.double(), scale)


def wanted(*parts: tuple[Product, float]) -> Tensor:
    total = torch.zeros(parts[0][0].shape, dtype=torch.float64)
    for part, weight in parts:
        total += weight * part.scale * (part.b_OR @ part.a_RI)
    return total


def off(found: Product, target: Tensor) -> float:
    return float((found.dense() - target).norm() / target.norm())


PARTS = [
    [(product(0), 1.0)],
    [(product(0), 0.7), (product(1), 0.3)],
    [(product(0), 1.0), (product(1), -1.0)],
    [(product(0, rank=1), 2.0), (product(1, rank=5, scale=0.1), -0.5), (product(2, rank=2), 0.01)],
]


@pytest.mark.parametrize("parts", PARTS)
def test_concatenation_is_exact(parts: list[tuple[Product, float]]) -> None:
    made, place = combined("m", parts, How())
    assert off(made, wanted(*parts)) < 1e-15
    assert made.rank == place.rank == sum(p.rank for p, _ in parts)
    assert made.scale == 1
    assert (place.kept, place.error) == (1, 0)
    assert place.energy == pytest.approx(float(wanted(*parts).square().sum()))


def test_a_power_of_two_as_weight_loses_no_bit() -> None:
    one = Product(product(0).b_OR.float(), product(0).a_RI.float(), 2.0)
    made, _ = combined("m", [(one, -0.25)], How())
    assert torch.equal(made.b_OR.float(), one.b_OR * -0.5)
    assert torch.equal(made.a_RI.float(), one.a_RI)


def test_more_columns_than_a_matrix_has_are_made_fewer_without_loss() -> None:
    parts = [(product(n, rank=4), 0.5 - n) for n in range(4)]
    made, place = combined("m", parts, How())
    assert made.rank == place.rank == OUT
    assert off(made, wanted(*parts)) < 1e-14


@pytest.mark.parametrize("rank", [1, 2, 4, 6, 99])
def test_svd_is_the_best_of_its_rank(rank: int) -> None:
    parts = PARTS[1]
    target = wanted(*parts)
    u, s, vt = linalg.svd(target, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ vt[:rank]
    made, place = combined("m", parts, How("svd", rank=rank))
    assert made.rank == min(rank, 6)
    assert float((made.dense() - best).norm()) < 1e-12
    assert place.error == pytest.approx(off(made, target), abs=1e-9)
    assert place.kept == pytest.approx(float(s[:rank].square().sum() / s.square().sum()))
    assert place.kept == pytest.approx(1 - place.error**2)


def test_svd_by_energy() -> None:
    made, place = combined("m", PARTS[1], How("svd", energy=0.8))
    assert place.kept >= 0.8
    smaller, less = combined("m", PARTS[1], How("svd", rank=made.rank - 1))
    assert less.kept < 0.8
    assert smaller.rank == made.rank - 1
    made, place = combined("m", PARTS[1], How("svd", energy=1))
    assert (made.rank, place.kept) == (6, 1)


def test_linear_says_its_error() -> None:
    made, place = combined("m", PARTS[1], How("linear"))
    assert made.rank == 3
    assert place.error == pytest.approx(off(made, wanted(*PARTS[1])))
    assert place.error > 0.2
    _, place = combined("m", PARTS[2], How("linear"))
    assert place.error > 0.9


@pytest.mark.parametrize("same", ["a", "b"])
def test_linear_is_exact_where_one_side_is_shared(same: str) -> None:
    one, other = product(0), product(1, scale=-0.4)
    shared = (
        Product(other.b_OR, one.a_RI, -0.4) if same == "a" else Product(one.b_OR, other.a_RI, -0.4)
    )
    parts = [(one, 0.7), (shared, 1.3)]
    made, place = combined("m", parts, How("linear"))
    assert made.rank == 3
    assert off(made, wanted(*parts)) < 1e-15
    assert place.error < 1e-15


def test_linear_where_nothing_is_wanted() -> None:
    """An adapter minus itself, its factors written otherwise: what linear makes of it is not nothing."""
    one = Product(torch.ones(2, 1), torch.ones(1, 2))
    same = Product(2 * torch.ones(2, 1), torch.ones(1, 2) / 2)
    made, place = combined("m", [(one, 1.0), (same, -1.0)], How("linear"))
    assert float(made.dense().norm()) > 0
    assert place.error > 1e6


@pytest.mark.parametrize("method", mixing.MIXES)
def test_mixes_are_of_the_changes_written_out(method: str) -> None:
    parts = PARTS[3]
    how = How(method, rank=OUT, density=0.6, seed=3)
    made, place = combined("m", parts, how)
    chance = torch.Generator().manual_seed(seed_of(3, "m"))
    changes = [p.scale * (p.b_OR @ p.a_RI) for p, _ in parts]
    target = mixing.MIXES[method](changes, [w for _, w in parts], 0.6, chance)
    assert made.rank == OUT
    assert off(made, target) < 1e-12
    assert place.kept == pytest.approx(1)
    cut, place = combined("m", parts, How(method, rank=2, density=0.6, seed=3))
    assert place.error == pytest.approx(off(cut, target))
    default, _ = combined("m", parts, How(method, density=0.6, seed=3))
    assert default.rank == 8


@pytest.mark.parametrize("method", METHODS)
def test_nothing_stays_nothing(method: str) -> None:
    none = Product(torch.zeros(4, 2), torch.randn(2, 5))
    made, place = combined("m", [(none, 1.0), (none, 0.5)], How(method, rank=3))
    assert float(made.dense().norm()) == 0
    assert (place.kept, place.error, place.energy) == (1, 0, 0)


def test_an_embedding_stays_one() -> None:
    one = Product(product(0).b_OR, product(0).a_RI, 1.0, embedding=True)
    for method in METHODS:
        made, _ = combined("m", [(one, 0.5)], How(method, rank=2))
        assert set(made.tensors()) == {"lora_embedding_A", "lora_embedding_B"}


def test_the_whole() -> None:
    places = [
        Place("a", (1, 1), 1, energy=4.0, kept=0.5, error=math.sqrt(0.5)),
        Place("b", (1, 1), 1, energy=1.0, kept=1.0, error=0.0),
        Place("c", (1, 1), 1, energy=0.0, kept=1.0, error=0.0),
    ]
    assert kept_of(places) == pytest.approx(3 / 5)
    assert error_of(places) == pytest.approx(math.sqrt(2 / 5))
    assert (kept_of([]), error_of([])) == (1, 0)
