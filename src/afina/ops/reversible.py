"""Streams of states from which the earlier ones are computed back, so that backward need not remember them.

    z[j+1] = a (z[j-1] - s[j] / 2^l) + Q[b z[j] + c h_j(z[j])],    s[j] = (2^l z[j-1]) mod 2^m
    z[j-1] = (z[j+1] - Q[b z[j] + c h_j(z[j])]) / a + s[j] / 2^l

| form | a | b | c | m |
|---|---|---|---|---|
| BDIA | ±2^-m | 1 - a | 1 + a | side bits a number |
| additive coupling | 1 | 0 | 1 | 0 |
| a first step | 0 | 1 | 1 | 0, and not computed back |

Every number is a multiple of 2^-l and below 2^(p - l), where p is the precision of the streams' type, so that sum and
difference are exact whatever h_j computes in; a is a power of two, and what it divides by was made divisible: the side
bits s are what that cost. So the earlier state comes back bit for bit, if h_j says twice the same. In gradients
rounding and side bits count as if they were not there:

    dz[j-1] += a g,    dz[j] += b g + c h_j'(z[j])ᵀ g,    g = dz[j+1]

Only the two last states and the side bits are kept; see `ops/reversible_pass.py`.

Legend: z states (B, T, D), h_j what block j adds to a state, Q rounding to a multiple of 2^-l.

Source: Gomez et al. 2017, "The Reversible Residual Network", arXiv 1707.04585, section 3.1 (a = 1); BDIA: "On
Exact Bit-level Reversible Transformers Without Changing Architectures", ICML 2025, PMLR 267 (a = ±1/2, m = 1). With
m > 1 there is no paper known to us.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PRECISION = {torch.float64: 53, torch.float32: 24}
"""Binary digits of the types that streams may have."""

WORD = 8
"""Side bits of so many numbers are packed together."""


@dataclass(frozen=True)
class Grid:
    """What the numbers of a stream are multiples of.

    Attributes:
        exponent: l.
        dtype: of the streams.
        blocks: the type of the states that blocks are given.
    """

    exponent: int
    dtype: torch.dtype
    blocks: torch.dtype

    @property
    def limit(self) -> float:
        """No number may be as large: half of what the type still holds exactly, for a sum of two."""
        return 2.0 ** (PRECISION[self.dtype] - 1 - self.exponent)

    def rounded(self, x: Tensor) -> Tensor:
        """Q[x], in the streams' type."""
        scale = 2.0**self.exponent
        return x.to(self.dtype).mul(scale).round_().div_(scale)


@dataclass(frozen=True)
class Step:
    """How one state follows from the two before it.

    Attributes:
        number: j, counted from 1: of the state that is read.
        name: of the block, for errors.
        past: a; a number, or one for each line (B, 1, 1) or token (1, T, 1). Zero is the number alone.
        own: b, as a.
        gain: c, as a.
        bits: m.
        first: nothing is computed back from here.
    """

    number: int
    name: str
    past: Tensor | float
    own: Tensor | float
    gain: Tensor | float
    bits: int = 0
    first: bool = False


# --- mathematics -----------------------------------------------------------------------------------------------


def summand(cur: Tensor, y: Tensor, step: Step, grid: Grid) -> Tensor:
    """Q[b z + c h], where h is what a block added to the state that it was given.

    Args:
        cur: z (B, T, D), in the streams' type.
        y: what the block says (B, T, D) of z in the model's type.
        step: b and c.
        grid: of the streams.
    """
    change = y.to(grid.dtype) - cur.to(grid.blocks).to(grid.dtype)
    return grid.rounded(step.own * cur + step.gain * change)


def side_bits(past: Tensor, bits: int, grid: Grid) -> Tensor:
    """s, the lowest m binary digits of a state in units of the grid; uint8 (B, T, D)."""
    return torch.remainder(past * 2.0**grid.exponent, 2.0**bits).to(torch.uint8)


def following(
    past: Tensor, cur: Tensor, y: Tensor, step: Step, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """z[j+1] and s[j], which is None for m = 0."""
    added = summand(cur, y, step, grid)
    if not step.bits:
        return (added if is_zero(step.past) else past + added), None
    digits = side_bits(past, step.bits, grid)
    return step.past * (past - digits.to(grid.dtype) * 2.0**-grid.exponent) + added, digits


def is_zero(factor: Tensor | float) -> bool:
    """Whether a factor is the number 0."""
    return not isinstance(factor, Tensor) and factor == 0


def before(
    after: Tensor, cur: Tensor, y: Tensor, step: Step, grid: Grid, digits: Tensor | None
) -> Tensor:
    """z[j-1], the inverse of `following`."""
    left = after - summand(cur, y, step, grid)
    if digits is None:
        return left
    return left / step.past + digits.to(grid.dtype) * 2.0**-grid.exponent


def pack(digits: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits without gaps: uint8 (bits · ⌈n / 8⌉,), which for n a multiple of 8 is bits · n bits."""
    flat = digits.flatten()
    missing = -flat.numel() % WORD
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    groups = flat.view(-1, WORD)
    words = torch.zeros(groups.shape[0], dtype=torch.int64, device=digits.device)
    for place in range(WORD):
        words |= groups[:, place].to(torch.int64) << (bits * place)
    return torch.stack([(words >> (8 * n)) & 255 for n in range(bits)], dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """The inverse of `pack`, as uint8 of this shape."""
    words = torch.zeros(packed.shape[0], dtype=torch.int64, device=packed.device)
    for n in range(bits):
        words |= packed[:, n].to(torch.int64) << (8 * n)
    mask = (1 << bits) - 1
    digits = torch.stack([(words >> (bits * place)) & mask for place in range(WORD)], dim=1)
    return digits.to(torch.uint8).flatten()[: math.prod(shape)].view(shape)


def marks(x: Tensor, grid: Grid) -> Tensor:
    """Two sums over the width, in units of the grid (B, T, 2), int64: plain, and with odd factors.

    A state of which one number is off has another second sum, always; the difference of the first says by how much.
    """
    whole = (x * 2.0**grid.exponent).to(torch.int64)
    places = torch.arange(x.shape[-1], device=x.device)
    factors = (places * 2654435761) % 2**20 | 1
    return torch.stack([whole.sum(-1), (whole * factors).sum(-1)], dim=-1)
