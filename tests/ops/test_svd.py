"""Spectra and best factors against torch's plain SVD of the written-out matrix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.ops import svd

linalg: Any = torch.linalg  # it has no types


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lowered(out: int, into: int, values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these singular values."""
    n = len(values)
    left = linalg.qr(random(out, n, seed=seed)).Q
    right = linalg.qr(random(into, n, seed=seed + 1)).Q
    return left * values @ right.t()


SIZES = [(12, 9, 4), (9, 12, 4), (5, 12, 7), (12, 5, 7), (6, 6, 6), (3, 4, 20), (1, 8, 2)]


@pytest.mark.parametrize(("out", "into", "rank"), SIZES)
def test_a_product_has_the_values_of_the_matrix_it_makes(out: int, into: int, rank: int) -> None:
    b, a = random(out, rank), random(rank, into, seed=1)
    found = svd.of_product(b, a)
    wanted = linalg.svdvals(b @ a)[: len(found.values)]
    assert len(found.values) == min(out, into, rank)
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(svd.product_values(b, a), found.values, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.left * found.values @ found.right, b @ a)
    assert found.energy == pytest.approx(float((b @ a).square().sum()), rel=1e-12)


def test_fp32_factors_are_computed_with_in_fp64() -> None:
    """Values that differ by more than fp32's digits: in fp32 the small one would be noise."""
    b, a = lowered(8, 2, torch.tensor([1.0, 1e-9]).double()).float(), torch.eye(2)
    wanted = linalg.svdvals(b.double())
    assert float(svd.product_values(b, a)[1]) == pytest.approx(float(wanted[1]), rel=1e-6)
    assert float(linalg.svdvals(b)[1]) != pytest.approx(float(wanted[1]), rel=1e-2)


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (8, 8), (1, 5), (5, 1)])
def test_a_matrix(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    found = svd.of_matrix(matrix)
    torch.testing.assert_close(found.values, linalg.svdvals(matrix), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.left * found.values @ found.right, matrix)
    identity = torch.eye(min(shape), dtype=torch.float64)
    torch.testing.assert_close(found.left.t() @ found.left, identity)
    torch.testing.assert_close(found.right @ found.right.t(), identity)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_what_a_rank_keeps_is_the_most_that_it_can(rank: int) -> None:
    matrix = random(10, 7)
    u, s, vt = linalg.svd(matrix, full_matrices=False)
    wanted = u[:, :rank] * s[:rank] @ vt[:rank]
    b, a = svd.factors(svd.of_matrix(matrix), rank)
    torch.testing.assert_close(b @ a, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(linalg.vector_norm(b, dim=0), linalg.vector_norm(a, dim=1))
    lost = float((matrix - b @ a).square().sum())
    found = svd.of_matrix(matrix)
    assert lost == pytest.approx(found.energy - found.kept(rank), rel=1e-9)
    other = random(10, rank, seed=9) @ random(rank, 7, seed=8)
    assert float((matrix - other).square().sum()) > lost


def test_a_matrix_with_a_huge_range_of_values_is_exact_at_full_rank() -> None:
    """The Gram matrix squares the condition, 1e20 here; the product of the factors loses nothing by it."""
    matrix = lowered(9, 6, torch.logspace(0, -10, 6, dtype=torch.float64))
    b, a = svd.factors(svd.of_matrix(matrix), 6)
    assert float((b @ a - matrix).abs().max()) < 1e-15 * 6
    b, a = svd.factors(svd.of_matrix(matrix), 3)
    u, s, vt = linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(b @ a, u[:, :3] * s[:3] @ vt[:3], rtol=0, atol=1e-12)


def test_equal_matrices_have_equal_factors() -> None:
    matrix = random(8, 6)
    one, other = (svd.factors(svd.of_matrix(m), 4) for m in (matrix, matrix.clone()))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    turned = svd.of_product(-random(8, 3), -random(3, 6, seed=1))
    plain = svd.of_product(random(8, 3), random(3, 6, seed=1))
    torch.testing.assert_close(turned.right, plain.right)


def test_zeros() -> None:
    for spectrum in (
        svd.of_matrix(torch.zeros(5, 4)),
        svd.of_product(torch.zeros(5, 2), random(2, 4)),
    ):
        assert (spectrum.values == 0).all()
        assert spectrum.energy == 0
        assert svd.rank_for(spectrum, rank=2) == 2
        assert svd.rank_for(spectrum, energy=0.5) == 1
        b, a = svd.factors(spectrum, 2)
        assert (b == 0).all()
        torch.testing.assert_close(a @ a.t(), torch.eye(2, dtype=torch.float64))


# --- the sketch ---------------------------------------------------------------------------------------------------


def test_a_sketch_of_what_is_nearly_low_rank() -> None:
    low = lowered(80, 60, torch.tensor([5.0, 3.0, 1.0]).double())
    matrix = low + 1e-6 * random(80, 60, seed=3)
    found = svd.sketch(matrix, 10, seed=0)
    assert found is not None
    torch.testing.assert_close(found.values[:3], svd.of_matrix(matrix).values[:3])
    best = svd.of_matrix(matrix)
    for rank in (1, 2, 3, 8):
        assert best.kept(rank) - found.kept(rank) <= svd.PROVED * best.energy
        assert best.kept(rank) >= found.kept(rank) * (1 - 1e-12)
    b, a = svd.factors(found, 3)
    torch.testing.assert_close(b @ a, low, rtol=0, atol=1e-5)


def test_a_sketch_that_proves_nothing_is_not_taken() -> None:
    flat = random(80, 60)
    assert svd.sketch(flat, 10, seed=0) is None
    exact = svd.of_matrix(flat)
    torch.testing.assert_close(svd.best(flat, rank=2).values, exact.values)


def test_the_cheapest_proved_way() -> None:
    low = lowered(120, 100, torch.tensor([5.0, 3.0, 1.0]).double())
    assert len(svd.best(low, rank=3).values) == 3 + svd.OVERSAMPLE
    assert len(svd.best(low, rank=None).values) == 100 // 8
    assert len(svd.best(low, rank=50).values) == 100
    one, other = svd.best(low, rank=3, seed=1), svd.best(low, rank=3, seed=1)
    assert torch.equal(one.right, other.right)


# --- ranks --------------------------------------------------------------------------------------------------------


def test_ranks_by_energy() -> None:
    spectrum = svd.of_matrix(torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0])))  # energies 4, 1, 1, 0
    assert svd.rank_for(spectrum, energy=0.5) == 1
    assert svd.rank_for(spectrum, energy=4 / 6 + 1e-9) == 2
    assert svd.rank_for(spectrum, energy=0.9) == 3
    assert svd.rank_for(spectrum, energy=1) == 3
    assert svd.rank_for(spectrum, energy=1, rank=2) == 2
    assert svd.rank_for(spectrum, rank=4) == 4
    assert svd.rank_for(spectrum, rank=9) == 4
    assert svd.rank_for(spectrum) == 3
    assert spectrum.kept(2) == pytest.approx(5)


def test_values_that_are_only_rounding_do_not_count() -> None:
    b, a = random(20, 3), random(3, 30, seed=1)
    doubled = svd.of_product(torch.cat([b, b], 1), torch.cat([a, a], 0))
    assert len(doubled.values) == 6
    assert svd.numerical_rank(doubled) == 3
    assert svd.rank_for(doubled, energy=1) == 3


def test_effective_ranks() -> None:
    assert svd.effective_rank(torch.tensor([3.0, 3.0, 3.0])) == pytest.approx(3)
    assert svd.effective_rank(torch.tensor([7.0, 0.0])) == pytest.approx(1)
    assert svd.effective_rank(torch.zeros(4)) == 0
    shares = (2 / 3, 1 / 3)
    entropy = -sum(p * math.log(p) for p in shares)
    assert svd.effective_rank(torch.tensor([2.0, 1.0])) == pytest.approx(math.exp(entropy))
