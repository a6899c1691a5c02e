"""Tiled attention against the whole matrix in fp64: values, gradients, log-sum-exp, key mass."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afina.ops.tiles import Rule, attend, key_mass
from afina.types import Places

F64 = torch.float64


def draw(m: int, kv: int, g: int, length: int, s: int, d: int, *, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = [(m, kv * g, length, d), (m, kv, s, d), (m, kv, s, d)]
    return [torch.randn(z, generator=random, dtype=F64).requires_grad_(True) for z in sizes]


def evenly(m: int, keys: int) -> Places:
    """Rows without padding whose queries begin at place 0."""
    return Places.of(torch.zeros(m, dtype=torch.int64), torch.full((m,), keys))


def whole(
    q: Tensor, k: Tensor, v: Tensor, rows: Places, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and weights with the matrix written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (rule.scale or 1 / math.sqrt(q.shape[-1]))
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    place = rows.first_M[:, None, None] + torch.arange(q.shape[2])[:, None]
    key = torch.arange(k.shape[2])
    seen = (key < rows.keys_M[:, None, None]).expand(-1, q.shape[2], -1)
    if rule.causal:
        seen = seen & (key <= place)
    if rule.window:
        seen = seen & ((place - key).abs() < rule.window)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    logsum = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logsum.masked_fill(logsum == -math.inf, 0.0)[..., None])
    return weights @ v, logsum, weights


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 3),
    kv=st.integers(1, 2),
    g=st.integers(1, 3),
    length=st.integers(1, 7),
    ahead=st.integers(0, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 6),
    softcap=st.none() | st.just(1.5),
    scale=st.none() | st.just(0.3),
    tile=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_tiles_equal_the_whole_matrix(
    m: int,
    kv: int,
    g: int,
    length: int,
    ahead: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    tile: int,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(ahead + 1, (m,), generator=random)
    keys = torch.randint(1, length + ahead + 1, (m,), generator=random)
    rows = Places.of(first, keys)
    rule = Rule(causal, scale, window, softcap, tile_numbers=tile)
    tensors = draw(m, kv, g, length, length + ahead, 4, seed=seed)
    mine, logsum = attend(*tensors, rows, rule)
    theirs, wanted, weights = whole(*tensors, rows, rule)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(logsum, wanted, rtol=0, atol=1e-11)
    towards = torch.randn(mine.shape, generator=random, dtype=F64)
    for got, want in zip(
        torch.autograd.grad(mine, tensors, towards),
        torch.autograd.grad(theirs, tensors, towards),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    of_queries = torch.rand(m, length, generator=random, dtype=F64)
    q, k = (x.detach() for x in tensors[:2])
    mass = key_mass(q, k, logsum.detach(), rows, rule, weights_ML=of_queries)
    by_hand = (weights * of_queries[:, None, :, None]).sum((1, 2))
    torch.testing.assert_close(mass, by_hand.detach(), rtol=0, atol=1e-11)


def test_known_masses() -> None:
    """K2 of the known values: uniform attention gives 1 without a mask, H_N − H_j with a causal one."""
    q, k, v = (torch.zeros(1, 1, 5, 4, dtype=F64) for _ in range(3))
    k += torch.randn(k.shape, dtype=F64)
    rows = evenly(1, 5)
    for causal, wanted in ((False, [1.0] * 5), (True, [2.283333, 1.283333, 0.783333, 0.45, 0.2])):
        rule = Rule(causal, tile_numbers=7)
        _, logsum = attend(q, k, v, rows, rule)
        mass = key_mass(q, k, logsum, rows, rule)
        assert mass[0].tolist() == pytest.approx(wanted, abs=1e-6)
        assert float(mass.sum()) == pytest.approx(5)


def test_mass_sums_to_the_number_of_queries() -> None:
    q, k, v = (x.detach() for x in draw(2, 2, 2, 9, 9, 4))
    rows = Places.of(torch.zeros(2, dtype=torch.int64), torch.tensor([9, 6]))
    valid = (torch.arange(9) < rows.keys_M[:, None]).double()
    rule = Rule(True, tile_numbers=50)
    _, logsum = attend(q, k, v, rows, rule)
    mass = key_mass(q, k, logsum, rows, rule, weights_ML=valid)
    assert mass.sum(1).tolist() == pytest.approx([4 * 9, 4 * 6])
    assert torch.equal(mass[1, 6:], torch.zeros(3, dtype=F64))


def test_dropout_is_a_function_of_its_seed_and_forward_and_backward_agree() -> None:
    tensors = draw(2, 1, 2, 6, 6, 4)
    rows = evenly(2, 6)
    rule = Rule(True, dropout=0.4, seed=11, tile_numbers=60)
    one, _ = attend(*tensors, rows, rule)
    again, _ = attend(*tensors, rows, rule)
    assert torch.equal(one, again)
    other, _ = attend(*tensors, rows, Rule(True, dropout=0.4, seed=12, tile_numbers=60))
    assert not torch.equal(one, other)
    torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, rows, rule)[0], tensors)


def test_dropout_keeps_the_mean() -> None:
    q, k, _ = (x.detach() for x in draw(4, 2, 1, 64, 64, 4))
    v = torch.ones(4, 2, 64, 4, dtype=F64)
    out, _ = attend(q, k, v, evenly(4, 64), Rule(False, dropout=0.3, seed=5))
    assert float(out.mean()) == pytest.approx(1, abs=0.02)
    assert float(out.std()) > 0.02


def test_one_tile_or_many_agree_in_half_precision() -> None:
    q, k, v = (x.detach().bfloat16() for x in draw(2, 1, 3, 40, 40, 16))
    rows = evenly(2, 40)
    exact, _ = attend(q.double(), k.double(), v.double(), rows, Rule(True))
    for tile in (10**9, 500):
        out, logsum = attend(q, k, v, rows, Rule(True, tile_numbers=tile))
        assert out.dtype == torch.bfloat16
        assert logsum.dtype == torch.float32
        assert float((out.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("causal", [True, False])
def test_in_fp32_all_is_within_1e_5_of_fp64_where_no_tile_ends_with_the_row(causal: bool) -> None:
    """K1 of the known values."""
    length, rows = 101, evenly(2, 101)
    wide = draw(2, 2, 3, length, length, 16)
    narrow = [x.detach().float().requires_grad_(True) for x in wide]
    rule = Rule(causal, tile_numbers=2 * 6 * length * 8)  # 8 queries a tile
    out, logsum = attend(*narrow, rows, rule)
    wanted, wanted_logsum, _ = whole(*wide, rows, rule)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    pairs = [
        (out, wanted),
        (logsum, wanted_logsum),
        *zip(
            torch.autograd.grad(out, narrow, towards.float()),
            torch.autograd.grad(wanted, wide, towards),
            strict=True,
        ),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_masses_are_those_of_flash_colreduce(causal: bool) -> None:
    """K3 of the known values: the naive function of a public package, which stands every query at the row's end."""
    there = importlib.util.find_spec("flash_colreduce")
    if there is None or there.origin is None:
        pytest.skip("flash-colreduce is not installed (pip install --no-deps flash-colreduce)")
    # The package itself would import Triton.
    file = Path(there.origin).with_name("naive.py")
    spec = importlib.util.spec_from_file_location("naive_colreduce", file)
    assert spec is not None
    assert spec.loader is not None
    naive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(naive)
    q, k, v = (x.detach() for x in draw(2, 2, 3, 20, 33, 8))
    first = torch.full((2,), 13 if causal else 0)
    rows = Places.of(first, torch.full((2,), 33))
    rule = Rule(causal, tile_numbers=500)
    mass = key_mass(q, k, attend(q, k, v, rows, rule)[1], rows, rule)
    theirs = naive.naive_colreduce(q, k.repeat_interleave(3, 1), reduction="sum", is_causal=causal)
    torch.testing.assert_close(mass, theirs.sum(1), rtol=0, atol=1e-12)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v = draw(1, 2, 1, 3, 3, 4)
    with pytest.raises(ValueError, match="2 key heads do not divide 3"):
        attend(torch.cat([q, q[:, :1]], 1), k, v, evenly(1, 3), Rule(True))
