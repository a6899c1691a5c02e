"""Rounding to few levels and computing back: against the definition written out, bounds, sizes, and bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afina.ops import quantise as q
from afina.ops.quantise import NF4, Quantised, Scheme, dequantise, dynamic_levels, quantise

PLAIN, DOUBLE, INT8 = Scheme(double=False), Scheme(), Scheme("int8", double=False)
SHAPES = ((24, 16), (64, 64), (100, 37), (7, 9), (5,), (3, 4, 5))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def naive(weight: Tensor, scheme: Scheme) -> Tensor:
    """The definition, one block after the other, in fp64; scales are not quantised."""
    levels = torch.tensor(NF4, dtype=torch.float32).double()
    flat, values = weight.double().flatten(), []
    for first in range(0, flat.numel(), scheme.block):
        block = flat[first : first + scheme.block]
        peak = block.abs().max()
        if scheme.kind == "nf4":
            nearest = (block[:, None] / max(peak, 1e-300) - levels).abs().argmin(1)
            values.append(levels[nearest] * peak)
        else:
            values.append((block / max(peak / 127, 1e-300)).round() * (peak / 127))
    return torch.cat(values).view(weight.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [PLAIN, INT8, Scheme(block=32, double=False)], ids=str)
def test_values_are_those_of_the_definition(shape: tuple[int, ...], scheme: Scheme) -> None:
    weight = normal(*shape)
    values = dequantise(quantise(weight, scheme))
    assert values.shape == weight.shape
    assert values.dtype == torch.float32
    assert (values.double() - naive(weight, scheme)).abs().max() < 1e-8
    assert not torch.equal(values, weight)


@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE, INT8], ids=str)
def test_what_was_rounded_once_stays(scheme: Scheme) -> None:
    weight = normal(64, 48)
    once = dequantise(quantise(weight, scheme))
    again = dequantise(quantise(once, scheme))
    # The largest of a block is a level, so the scales are the same but for their own rounding.
    within = 2e-2 if scheme.double else 2e-7
    assert (again - once).abs().max() <= within * once.abs().max()


@pytest.mark.parametrize(("scheme", "share"), [(PLAIN, 0.152), (INT8, 0.5 / 127)], ids=str)
def test_no_error_is_above_half_the_widest_gap(scheme: Scheme, share: float) -> None:
    weight = normal(128, 64)
    error = (dequantise(quantise(weight, scheme)) - weight).abs().view(-1, 64)
    peaks = weight.abs().view(-1, 64).amax(1, keepdim=True)
    assert (error <= share * peaks * (1 + 1e-5)).all()
    assert (error > 0.8 * share * peaks).any()  # the bound is not a loose one


def test_errors_are_what_a_normal_distribution_gives() -> None:
    weight = normal(512, 512)
    norms = [
        ((dequantise(quantise(weight, s)) - weight).norm() / weight.norm()).item()
        for s in (PLAIN, DOUBLE, INT8)
    ]
    assert norms == pytest.approx([0.092, 0.092, 0.0059], rel=0.05)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE, INT8, Scheme(block=128)], ids=str)
def test_bytes_are_those_of_the_formula(shape: tuple[int, ...], scheme: Scheme) -> None:
    weight = normal(*shape)
    packed = quantise(weight, scheme)
    assert packed.bytes == scheme.bytes_of(weight.numel())
    meta = quantise(weight.to("meta"), scheme)
    assert meta.bytes == packed.bytes
    for one, other in zip(vars(meta).values(), vars(packed).values(), strict=True):
        if isinstance(one, Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_bits_a_weight() -> None:
    bits = [8 * s.bytes_of(4096 * 4096) / 4096**2 for s in (PLAIN, DOUBLE, INT8)]
    # QLoRA, section 3: 32/64 = 0.5 bits of scales, 8/64 + 32/(64 · 256) = 0.127 when these are quantised too.
    assert bits == pytest.approx([4.5, 4.127, 8.5], abs=1e-3)


@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE, INT8], ids=str)
def test_a_block_of_zeros_stays_zero(scheme: Scheme) -> None:
    weight = normal(4, 64)
    weight[1] = 0
    values = dequantise(quantise(weight, scheme))
    assert torch.equal(values[1], torch.zeros(64))
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE, INT8], ids=str)
def test_what_is_not_finite_is_refused(bad: float, scheme: Scheme) -> None:
    weight = normal(4, 64)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantise(weight, scheme)


def test_schemes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        Scheme(block=63)
    with pytest.raises(ValueError, match="of nf4"):
        Scheme("int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_rounded_once_from_fp32(dtype: torch.dtype) -> None:
    packed = quantise(normal(32, 48), DOUBLE)
    assert torch.equal(dequantise(packed, dtype), dequantise(packed).to(dtype))


def test_codes_do_not_depend_on_how_a_base_was_stored() -> None:
    weight = normal(32, 64).bfloat16()
    assert torch.equal(quantise(weight, PLAIN).codes, quantise(weight.float(), PLAIN).codes)


def test_levels_of_scales_are_sorted_symmetric_and_256() -> None:
    levels = dynamic_levels()
    assert len(levels) == 256
    assert list(levels) == sorted(set(levels))
    assert levels[-1] == 1.0
    assert {-x for x in levels if 0 < abs(x) < 1} == {x for x in levels if 0 < abs(x) < 1}


def test_scales_take_the_nearest_level() -> None:
    scales = normal(600).abs()
    codes, second, offset = q.quantise_scales(scales)
    levels = torch.tensor(dynamic_levels()).double()
    scaled = (scales - offset).double() / second.double().repeat_interleave(256)[:600]
    chosen = (scaled - levels[codes.long()]).abs()
    assert (chosen - (scaled[:, None] - levels).abs().amin(1) < 1e-6).all()


def test_a_wrong_level_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(24, 16)
    right = q._midpoints
    monkeypatch.setattr(q, "_midpoints", lambda levels: [x + 0.02 for x in right(levels)])
    values = dequantise(quantise(weight, PLAIN))
    assert (values.double() - naive(weight, PLAIN)).abs().max() > 1e-4


# --- bitsandbytes ----------------------------------------------------------------------------------------------


# Rows of a block or longer: bitsandbytes' AVX-512 kernel gives other values where a block spans rows of even length.
@pytest.mark.parametrize("shape", [(24, 64), (64, 64), (100, 37), (576, 192)], ids=str)
def test_codes_scales_and_values_are_bitsandbytes_own(shape: tuple[int, ...]) -> None:
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = normal(*shape)
    theirs, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    ours = quantise(weight, PLAIN)
    assert torch.equal(ours.codes[: theirs.numel()], theirs.flatten())
    assert torch.equal(ours.scales, state.absmax)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = dtype
        assert torch.equal(dequantise(ours, dtype), bnb.dequantize_4bit(theirs, state))


def test_doubly_quantised_scales_are_read_as_bitsandbytes_reads_them() -> None:
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = normal(576, 192)
    theirs, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    parts = (theirs.flatten(), state.absmax, state.state2.absmax, state.offset.reshape(1))
    assert torch.equal(
        dequantise(Quantised(weight.shape, DOUBLE, *parts)), bnb.dequantize_4bit(theirs, state)
    )
    assert list(dynamic_levels()) == state.state2.code.tolist()
    ours = quantise(weight, DOUBLE)
    apart = (ours.scales.int() - state.absmax.int()).abs()
    assert apart.max() <= 1  # where its search misses the nearest by a hair; never more
    assert (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE], ids=str)
def test_the_librarys_kernel_computes_our_values(scheme: Scheme, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    assert q.library_takes(scheme, dtype)
    assert not q.library_takes(INT8, dtype)
    assert not q.library_takes(scheme, torch.float64)
    packed = quantise(normal(100, 37), scheme)
    values = q.by_library(packed, q.scales_of(packed), dtype).flatten()[:3700].view(100, 37)
    assert torch.equal(values, dequantise(packed, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [PLAIN, DOUBLE, INT8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same_values(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = normal(128, 96)
    here, there = quantise(weight, scheme), quantise(weight.cuda(), scheme)
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(dequantise(here, dtype), dequantise(there, dtype).cpu())
