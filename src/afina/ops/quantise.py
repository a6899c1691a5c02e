"""Weights in 4 or 8 bits: rounding blocks of a tensor to a few levels, and computing the values back.

    nf4:   c = index of the level nearest to w / a,    w' = level[c] · a,    a = max |w| of the block
    int8:  c = round(w / s),                           w' = c · s,           s = max |w| of the block / 127

A block is `block` neighbours of the flattened tensor. Two nf4 codes share a byte, the first in the upper half. With
`double` the scales a are kept in 8 bits too: their mean is taken off, and each block of 256 is rounded to the levels of
`dynamic_levels`, scaled by its largest.

Legend: w weight, w' what is computed with, c code, a or s scale; N blocks, B neighbours of one.

Source: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3 and appendix E (the 16 levels); the 8-bit levels:
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, section 2.1 and appendix F.
Codes and values of nf4 are those of bitsandbytes, bit for bit; where its search on a CPU misses the nearest level of a
doubly quantised scale by a hair, ours takes the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from torch import Tensor

Kind = Literal["nf4", "int8"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of nf4: quantiles of a normal distribution, with an exact zero."""

LARGEST = 127
"""The largest code of int8; -128 is not used, so that levels lie evenly about zero."""

SCALES_BLOCK = 256
"""Scales that share a second scale."""

_AT_ONCE = 2**18
"""Weights rounded at a time: few enough that what is computed on the way stays in the cache."""

_SMALLEST = 1e-38
"""Stands for the scale of a block of zeros, which no number can be divided by."""


@dataclass(frozen=True)
class Scheme:
    """How a tensor is kept.

    Attributes:
        kind: nf4 takes 4 bits a weight, int8 8.
        block: neighbours that share a scale; even.
        double: the scales are kept in 8 bits too. Of nf4 only: it would cost int8 its precision.
    """

    kind: Kind = "nf4"
    block: int = 64
    double: bool = True

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise ValueError(f"a block is an even number of weights, not {self.block}")
        if self.double and self.kind != "nf4":
            raise ValueError(f"double quantisation of the scales is of nf4, not of {self.kind}")

    def bytes_of(self, numbers: int) -> int:
        """What a tensor of so many numbers takes."""
        blocks = -(-numbers // self.block)
        codes = blocks * self.block // (2 if self.kind == "nf4" else 1)
        if not self.double:
            return codes + 4 * blocks
        return codes + blocks + 4 * -(-blocks // SCALES_BLOCK) + 4


@dataclass(frozen=True)
class Quantised:
    """A tensor in few bits.

    Attributes:
        shape: of the tensor.
        scheme: how it is kept.
        codes: nf4: uint8, two weights each; int8: int8. The last block is filled up.
        scales: a or s of each block, in fp32; with `double` their codes, uint8.
        second: with `double`, the scale of each block of scales, fp32.
        offset: with `double`, the mean of the scales, fp32 (1,).
    """

    shape: torch.Size
    scheme: Scheme
    codes: Tensor
    scales: Tensor
    second: Tensor | None = None
    offset: Tensor | None = None

    @property
    def bytes(self) -> int:
        """What it takes."""
        parts = (self.codes, self.scales, self.second, self.offset)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


# --- rounding --------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantise(weight: Tensor, scheme: Scheme) -> Quantised:
    """The tensor in few bits.

    Args:
        weight: any shape, floating point. On the meta device the result is there too.
        scheme: how.

    Raises:
        ValueError: a value is NaN or infinite: its whole block would be lost.
    """
    blocks_NB = _blocks(weight.detach(), scheme.block)
    if weight.is_meta:
        return _shaped(weight, scheme, len(blocks_NB))
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    at_once = max(1, _AT_ONCE // scheme.block)
    for first in range(0, len(blocks_NB), at_once):
        part_NB = blocks_NB[first : first + at_once].to(torch.float32)
        peaks_N = part_NB.abs().amax(1)
        code, scale = _RULES[scheme.kind](part_NB, peaks_N)
        codes.append(code)
        scales.append(scale)
    scales_N = torch.cat(scales)
    if not torch.isfinite(scales_N).all():
        raise ValueError("it holds a NaN or an infinity")
    packed = torch.cat(codes)
    if not scheme.double:
        return Quantised(weight.shape, scheme, packed, scales_N)
    return Quantised(weight.shape, scheme, packed, *quantise_scales(scales_N))


def _blocks(weight: Tensor, block: int) -> Tensor:
    """The tensor as (N, B), filled up with zeros."""
    flat = weight.reshape(-1)
    lacking = -flat.numel() % block
    return (torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat).view(-1, block)


def _to_nf4(part_NB: Tensor, peaks_N: Tensor) -> tuple[Tensor, Tensor]:
    scaled = part_NB * (1.0 / peaks_N.clamp(min=_SMALLEST))[:, None]
    flat, bounds = scaled.reshape(-1), _midpoints(NF4)
    # Counting the bounds below is the same as searching among them, and several times as fast.
    code = (flat > bounds[0]).view(torch.uint8)
    for bound in bounds[1:]:
        code.add_((flat > bound).view(torch.uint8))
    return (code[::2] << 4) | code[1::2], peaks_N


def _to_int8(part_NB: Tensor, peaks_N: Tensor) -> tuple[Tensor, Tensor]:
    scales_N = peaks_N / LARGEST
    code = (part_NB / scales_N.clamp(min=_SMALLEST)[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return code.to(torch.int8).reshape(-1), scales_N


_RULES = {"nf4": _to_nf4, "int8": _to_int8}


def quantise_scales(scales_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of blocks in 8 bits: codes (N,) uint8, second scales and mean in fp32."""
    offset = scales_N.mean()
    blocks = _blocks(scales_N - offset, SCALES_BLOCK)
    peaks = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / peaks.clamp(min=_SMALLEST))[:, None]).reshape(-1)[: len(scales_N)]
    bounds = torch.tensor(_midpoints(dynamic_levels()), device=scales_N.device)
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    return codes, peaks, offset.reshape(1)


@cache
def dynamic_levels() -> tuple[float, ...]:
    """256 levels in [-1, 1], dense about zero: signed, of seven decades, each cut in twice as many as the one below."""
    positive: list[float] = []
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (bounds[:-1] + bounds[1:]) / 2
        positive += _numbers(10.0 ** (decade - 6) * middles)
    return tuple(sorted([*(-level for level in positive), 0.0, *positive, 1.0]))


@cache
def _midpoints(levels: tuple[float, ...]) -> list[float]:
    exact = torch.tensor(levels, dtype=torch.float32)
    return _numbers((exact[1:] + exact[:-1]) / 2)


def _numbers(tensor: Tensor) -> list[float]:
    return cast("list[float]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


def _shaped(weight: Tensor, scheme: Scheme, blocks: int) -> Quantised:
    """What `quantise` gives, without values."""

    def empty(numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numbers, dtype=dtype, device="meta")

    nf4 = scheme.kind == "nf4"
    numbers = blocks * scheme.block // (2 if nf4 else 1)
    codes = empty(numbers, torch.uint8 if nf4 else torch.int8)
    if not scheme.double:
        return Quantised(weight.shape, scheme, codes, empty(blocks, torch.float32))
    second = empty(-(-blocks // SCALES_BLOCK), torch.float32)
    scales, offset = empty(blocks, torch.uint8), empty(1, torch.float32)
    return Quantised(weight.shape, scheme, codes, scales, second, offset)


# --- computing back --------------------------------------------------------------------------------------------


def dequantise(packed: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values w', computed in fp32 and rounded once, to `dtype`.

    On a CUDA device bitsandbytes computes those of nf4, where it is installed: the same values, in one kernel.
    """
    scales_N = scales_of(packed)
    numbers, block = math.prod(packed.shape), packed.scheme.block
    if packed.codes.is_cuda and library_takes(packed.scheme, dtype):
        values_NB = by_library(packed, scales_N, dtype)
    elif packed.scheme.kind == "int8":
        values_NB = packed.codes.view(-1, block).to(torch.float32).mul_(scales_N[:, None])
    else:
        values_NB = _levels_of(packed.codes).view(-1, block).mul_(scales_N[:, None])
    return values_NB.to(dtype).view(-1)[:numbers].view(packed.shape)


LIBRARY_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of blocks that bitsandbytes has kernels for, on every device that it supports."""


def library_takes(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether bitsandbytes is there and has a kernel for this."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    fits = scheme.kind == "nf4" and scheme.block in LIBRARY_BLOCKS and dtype in types
    return fits and not torch.compiler.is_compiling() and _library() is not None


def by_library(packed: Quantised, scales_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (N, B) of nf4 as bitsandbytes computes them."""
    shape = (len(scales_N), packed.scheme.block)
    kernel = cast("Callable[..., Tensor]", _library())
    return kernel(packed.codes, scales_N, packed.scheme.block, "nf4", shape, dtype)


@cache
def _library() -> Any:
    """The kernel of bitsandbytes; None where it is not installed."""
    if find_spec("bitsandbytes") is None:
        return None
    import_module("bitsandbytes")
    return torch.ops.bitsandbytes.dequantize_4bit


def scales_of(packed: Quantised) -> Tensor:
    """The scale of each block (N,), in fp32."""
    if packed.second is None or packed.offset is None:
        return packed.scales
    levels = _kept(_dynamic, packed.scales.device)
    scaled = torch.index_select(levels, 0, packed.scales.int())
    blocks = _blocks(scaled, SCALES_BLOCK).mul_(packed.second[:, None])
    return blocks.view(-1)[: len(scaled)].add_(packed.offset)


def _levels_of(codes: Tensor) -> Tensor:
    """The levels of packed nf4 codes: both of a byte at once, as the two halves of one 64-bit number of a table."""
    pairs = _kept(_pairs, codes.device)
    return torch.index_select(pairs, 0, codes.int()).view(torch.float32)


_TABLES: dict[Any, Tensor] = {}


def _kept(make: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
    """A table, made once for each device; for a graph that is being compiled one of its own."""
    if torch.compiler.is_compiling():
        return make(device)
    key = (make, device)
    if key not in _TABLES:
        with torch.inference_mode(False):
            _TABLES[key] = make(device)
    return _TABLES[key]


def _dynamic(device: torch.device) -> Tensor:
    return torch.tensor(dynamic_levels(), dtype=torch.float32, device=device)


def _pairs(device: torch.device) -> Tensor:
    """For each byte the two levels that it stands for, as one number of 64 bits (256,)."""
    levels = torch.tensor(NF4, dtype=torch.float32, device=device)
    upper, lower = levels[:, None].expand(16, 16), levels[None, :].expand(16, 16)
    return torch.stack([upper, lower], -1).reshape(256, 2).contiguous().view(torch.int64).view(256)
