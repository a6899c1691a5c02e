"""Singular values and best factors of a low-rank product or of a matrix, in fp64, from the smallest problem there is.

    B A = Q_B (R_B R_Aᵀ) Q_Aᵀ,     R_B R_Aᵀ = U S Vᵀ     so     B A = (Q_B U) S (Q_A V)ᵀ

A product is never written out: two thin QR factorisations and the SVD of an r × r core are all. A matrix D takes the
eigenvectors of its smaller Gram matrix, DᵀD = V S² Vᵀ; what rank k keeps is then ‖D V_k‖², an orthogonal projection, so
that squaring the condition costs digits of the small singular values and none of the approximation. Where few
directions hold nearly all of D, a random sketch finds them sooner, and it is used only when it proves that.

Legend: D, B A a matrix (out × in), B (out × r), A (r × in), S singular values, k the rank that is kept. The energy of a
matrix is the sum of its squared singular values, which is its squared Frobenius norm.

Source: Golub and Van Loan, "Matrix Computations", 4th ed., sections 2.4 (Eckart-Young) and 5.4; the sketch: Halko,
Martinsson and Tropp 2011, "Finding Structure with Randomness", arXiv 0909.4061, algorithms 4.4 and 5.1.
Effective rank: Roy and Vetterli 2007, "The Effective Rank", EUSIPCO, definition 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_linalg: Any = torch.linalg  # it has no types

OVERSAMPLE = 16
"""Directions that a sketch has beyond the wanted rank."""

PASSES = 2
"""Power iterations of a sketch."""

PROVED = 1e-6
"""Share of the energy by which a sketch may be worse than the best, at most, to be taken."""

WORTHWHILE = 4
"""A sketch is tried where it has at most this part of a matrix's directions."""


@dataclass(frozen=True)
class Spectrum:
    """left @ diag(values) @ right, largest first.

    Attributes:
        left: (out, n), orthonormal columns; where a value is 0 its column may be 0.
        values: (n,), fp64, not negative.
        right: (n, in), orthonormal rows.
        energy: of the whole matrix: more than that of the values where a sketch left a rest.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float

    def kept(self, rank: int) -> float:
        """The energy of the `rank` largest values."""
        return float(self.values[:rank].square().sum())


def of_product(b_OR: Tensor, a_RI: Tensor) -> Spectrum:
    """The SVD of B A, at most min(r, out, in) values of it: all others are 0.

    Args:
        b_OR: (out, r), any floating-point type.
        a_RI: (r, in).
    """
    q_b, r_b = _qr(b_OR.double())
    q_a, r_a = _qr(a_RI.double().t())
    u, values, vt = _svd(r_b @ r_a.t())
    return _signed(q_b @ u, values, vt @ q_a.t(), float(values.square().sum()))


def product_values(b_OR: Tensor, a_RI: Tensor) -> Tensor:
    """The singular values of B A alone, largest first; see `of_product`."""
    r_b: Tensor = _linalg.qr(b_OR.double(), mode="r").R
    r_a: Tensor = _linalg.qr(a_RI.double().t(), mode="r").R
    values: Tensor = _linalg.svdvals(r_b @ r_a.t())
    return values


def of_matrix(matrix_OI: Tensor) -> Spectrum:
    """The SVD of a matrix, all min(out, in) values of it."""
    matrix = matrix_OI.double()
    if matrix.shape[0] < matrix.shape[1]:
        turned = of_matrix(matrix.t())
        return _signed(turned.right.t(), turned.values, turned.left.t(), turned.energy)
    vectors: Tensor = _linalg.eigh(matrix.t() @ matrix).eigenvectors
    right = vectors.flip(1).t()
    left = matrix @ right.t()
    values: Tensor = _linalg.vector_norm(left, dim=0)
    values, order = values.sort(descending=True, stable=True)  # rounding may swap neighbours
    left = torch.where(values > 0, left[:, order] / values, 0.0)
    return _signed(left, values, right[order], float(matrix.square().sum()))


def sketch(matrix_OI: Tensor, width: int, seed: int) -> Spectrum | None:
    """The SVD within the `width` directions that a random sketch finds, if it proves that they are enough.

    The energy E that lies outside them is measured. By Ky Fan's theorem no rank-k approximation keeps more than the
    sketch's own plus E, so a small E proves every rank of it near the best.

    Args:
        matrix_OI: the matrix.
        width: directions looked for.
        seed: of the sketch.

    Returns:
        The spectrum, or None: the directions leave more than `PROVED` of the energy.
    """
    matrix = matrix_OI.double()
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], width, generator=generator, dtype=torch.float64)
    basis, _ = _qr(matrix @ start.to(matrix.device))
    for _ in range(PASSES):
        rows, _ = _qr(matrix.t() @ basis)
        basis, _ = _qr(matrix @ rows)
    inside = basis.t() @ matrix
    energy = float(matrix.square().sum())
    if float((matrix - basis @ inside).square().sum()) > PROVED * energy:
        return None
    u, values, right = _svd(inside)
    return _signed(basis @ u, values, right, energy)


def best(matrix_OI: Tensor, *, rank: int | None, seed: int = 0) -> Spectrum:
    """The spectrum that best factors of a matrix need, by the cheapest way that is proved right.

    Args:
        matrix_OI: the matrix.
        rank: the largest that will be asked for; None is unknown.
        seed: of the sketch.
    """
    small = min(matrix_OI.shape)
    width = small // (2 * WORTHWHILE) if rank is None else rank + OVERSAMPLE
    found = sketch(matrix_OI, width, seed) if 0 < width * WORTHWHILE <= small else None
    return of_matrix(matrix_OI) if found is None else found


def _qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _linalg.qr(matrix)


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _linalg.svd(matrix, full_matrices=False)


def _signed(left: Tensor, values: Tensor, right: Tensor, energy: float) -> Spectrum:
    """Each pair of vectors turned so that the largest entry of the right one is positive: one matrix, one answer."""
    largest = right.abs().argmax(dim=1, keepdim=True)
    signs = torch.where(right.gather(1, largest) < 0, -1.0, 1.0)
    return Spectrum(left * signs[:, 0], values, right * signs, energy)


# --- ranks --------------------------------------------------------------------------------------------------------


def rank_for(spectrum: Spectrum, *, rank: int | None = None, energy: float | None = None) -> int:
    """How many values to keep, at least 1.

    Args:
        spectrum: of the matrix.
        rank: at most so many.
        energy: at least this share of the energy; 1 keeps every value that is not rounding.
    """
    there = max(1, numerical_rank(spectrum))
    if energy is None:
        return min(rank or there, len(spectrum.values))
    if energy < 1:
        sums = spectrum.values.square().cumsum(0)
        there = min(there, int((sums < energy * spectrum.energy).sum()) + 1)
    return min(there, rank or there)


def numerical_rank(spectrum: Spectrum) -> int:
    """How many values are more than the rounding of the largest."""
    values = spectrum.values
    if not len(values):
        return 0
    sizes = max(spectrum.left.shape[0], spectrum.right.shape[1])
    return int((values > values[0] * sizes * torch.finfo(values.dtype).eps).sum())


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the values' shares: r for r equal values, 1 for one; 0 where all are 0."""
    total = float(values.sum())
    if total <= 0:
        return 0.0
    shares = values[values > 0] / total
    return math.exp(float(-(shares * shares.log()).sum()))


def factors(spectrum: Spectrum, rank: int) -> tuple[Tensor, Tensor]:
    """B (out, k) and A (k, in), whose product is the best approximation of rank k; both have the same norms.

    Where a value is exactly 0, B is 0 and A a unit vector: the product is the same, and it can still be trained.
    """
    values = spectrum.values[:rank]
    roots = values.sqrt()
    b = spectrum.left[:, :rank] * roots
    return b, spectrum.right[:rank] * torch.where(values > 0, roots, 1.0)[:, None]
