"""Kernels in C++ beside their definitions: products in parts, attention over runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from afina.ops import native
from afina.ops.attention import rows_attention
from afina.ops.layout import with_layout
from afina.ops.native.attention import attend, attend_back
from afina.ops.native.gemm import gemm, padded, part, serves
from afina.ops.packed import PackedWeight, pack
from afina.ops.quantise import Quantised, Scheme, dequantise, quantise
from afina.types import Context, Run, Runs

pytestmark = pytest.mark.usefixtures("multiplies")
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason=f"no kernels here: {native.missing()}"
)
BF16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(BF16)


def off_by(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "wide", "out", "rank"), [(37, 64, 70, 5), (300, 576, 192, 16), (100, 96, 96, 40)]
)
def test_products_in_parts(tokens: int, wide: int, out: int, rank: int) -> None:
    x, weight = drawn(tokens, wide), drawn(out, wide, seed=1)
    bias, residual = drawn(out, seed=2), drawn(tokens, out, seed=3)
    a, b = drawn(rank, wide, seed=4).float(), drawn(out, rank, seed=5).float()
    low = gemm(torch.empty(tokens, padded(rank), dtype=BF16), part(x, a))
    assert off_by(low[:, :rank], x.double() @ a.double().t()) < 3e-3
    assert not low[:, rank:].any()
    y = gemm(
        torch.empty(tokens, out, dtype=BF16),
        part(x, weight),
        part(low, b, scale=2.0),
        bias_N=bias,
        residual_MN=residual,
    )
    path = 2 * low[:, :rank].double() @ b.double().t()
    wanted = x.double() @ weight.double().t() + path + bias.double() + residual.double()
    assert off_by(y, wanted) < 3e-3
    assert off_by(y, wanted - path) > 0.1  # without the path the check must see it
    turned = torch.zeros(rank, padded(tokens), dtype=BF16)
    turned[:, :tokens] = low[:, :rank].t()
    slope = gemm(torch.empty(rank, wide), part(turned, x, by_rows=True), alpha=2.0)
    wanted = 2 * low[:, :rank].double().t() @ x.double()
    assert off_by(slope, wanted) < 1e-6
    gemm(slope, part(turned, x, by_rows=True), alpha=4.0, more=True)
    assert off_by(slope, 3 * wanted) < 1e-6


SCHEMES = [
    Scheme("nf4"),
    Scheme("nf4", 32, double=False),
    Scheme("nf4", 256),
    Scheme("int8", double=False),
]


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_in_few_bits_are_read_as_their_values(scheme: Scheme) -> None:
    """Of a product with 1 each number is seen, in either order; and a sum beside another product is one."""
    out, wide = 96, 160
    weight = quantise(drawn(out, wide).float() * 0.03, scheme)
    assert serves(weight)
    values = dequantise(weight, BF16)
    ones = torch.eye(wide, dtype=BF16)
    assert torch.equal(gemm(drawn(wide, out), part(ones, weight)).t(), values)
    ones = torch.eye(out, dtype=BF16)
    assert torch.equal(gemm(drawn(out, wide), part(ones, weight, by_rows=True)), values)
    x, a, b = drawn(50, wide), drawn(5, wide, seed=4).float(), drawn(out, 5, seed=5).float()
    low = gemm(torch.empty(50, padded(5), dtype=BF16), part(x, a))
    y = gemm(torch.empty(50, out, dtype=BF16), part(x, weight), part(low, b, scale=0.1))
    wanted = x.double() @ values.double().t() + 0.1 * low[:, :5].double() @ b.double().t()
    assert off_by(y, wanted) < 3e-3


def test_which_weights_in_few_bits_are_served() -> None:
    def made(out: int, wide: int, block: int) -> Quantised:
        return quantise(torch.ones(out, wide), Scheme("nf4", block))

    assert serves(made(32, 64, 64))
    assert not any(serves(made(*sizes)) for sizes in ((32, 48, 64), (48, 64, 64), (32, 96, 96)))
    assert not serves(made(32, 64, 16))
    assert not serves(quantise(torch.ones(32, 32, 32), Scheme()))


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES[:1] + SCHEMES[-1:], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_linear_never_has_its_values_in_memory(
    scheme: Scheme, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (64, 96) if transposed else (96, 64)
    weight = pack(drawn(*shape) * 0.1, scheme, name="w")
    bias = drawn(96, seed=1)

    def passed() -> tuple[Tensor, Tensor]:
        x = drawn(2, 7, 64, seed=2).requires_grad_()
        if transposed:
            y = torch.addmm(bias, x.view(-1, 64), weight).view(2, 7, 96)
        else:
            y = torch.nn.functional.linear(x, weight, bias)
        (slope,) = torch.autograd.grad(y, x, drawn(*y.shape, seed=3))
        return y.detach(), slope

    with native.off():
        wanted = passed()
    monkeypatch.setattr(PackedWeight, "unpacked", None)
    for mine, right in zip(passed(), wanted, strict=True):
        assert mine.shape == right.shape
        assert off_by(mine, right.double()) < 4e-3
    with pytest.raises(TypeError, match="NoneType"), native.off():
        passed()


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, runs: list[Run], causal: bool, window: int | None
) -> Tensor:
    """(T, H, W) in the numbers' own type, run by run."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    outs: list[Tensor] = []
    for run in sorted(runs, key=lambda r: r.start):
        path = [torch.arange(a, a + n) for a, n in (*run.before, (run.start, run.length))]
        keys = torch.cat(path)
        at = run.first + torch.arange(run.length)[:, None]
        key = torch.arange(len(keys))[None]
        seen = torch.ones(run.length, len(keys), dtype=torch.bool)
        if causal:
            seen &= key <= at
        if window is not None:
            seen &= (at - key).abs() < window
        own = slice(run.start, run.start + run.length)
        scores = torch.einsum("qhd,khd->hqk", q[own], k[keys]) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v[keys]))
    return torch.cat(outs)


RUNS = {
    "one": [Run(0, 1)],
    "ragged": [Run(0, 15), Run(15, 16), Run(31, 17), Run(48, 33), Run(81, 100)],
    "shared": [
        Run(0, 35),
        Run(35, 20, ((0, 35),)),
        Run(55, 9, ((0, 35),)),
        Run(64, 40, ((0, 35), (55, 9))),
    ],
    "long": [Run(0, 1100), Run(1100, 40)],
}


@needs_kernels
@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(9, 3, 64), (4, 4, 32), (4, 1, 128)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 10), (False, None)])
def test_attention(
    name: str, heads: int, key_heads: int, width: int, causal: bool, window: int | None
) -> None:
    runs = RUNS[name]
    tokens = sum(run.length for run in runs)
    q, k, v, above = (
        drawn(tokens, n * width, seed=i) for i, n in enumerate((heads, key_heads, key_heads, heads))
    )
    wide = [x.double().view(tokens, -1, width).requires_grad_() for x in (q, k, v)]
    wanted = by_definition(wide[0], wide[1], wide[2], runs, causal, window)
    slopes = torch.autograd.grad(wanted, wide, above.double().view_as(wanted))
    wanted = wanted.detach()

    def once() -> list[Tensor]:
        out, logsum = torch.empty_like(q), torch.empty(tokens, heads)
        rest = (Runs.of(runs), heads, key_heads, width**-0.5)
        attend(q, k, v, out, logsum, *rest, causal=causal, window=window)
        by = [torch.empty_like(x) for x in (q, k, v)]
        attend_back(q, k, v, out, logsum, above, *by, *rest, causal=causal, window=window)
        return [out, *by]

    found = once()
    for mine, right in zip(found, (wanted, *slopes), strict=True):
        error = float((mine.double().view_as(right) - right).norm())
        assert error <= 8e-3 * float(right.norm()) + 2e-2 * (tokens == 1)
    assert all(torch.equal(a, b) for a, b in zip(found, once(), strict=True))
    if name == "shared" and window is None:
        apart = by_definition(
            *(x.detach() for x in wide), [Run(r.start, r.length) for r in runs], causal, window
        )
        assert off_by(found[0].view_as(apart), apart) > 0.05


@needs_kernels
@pytest.mark.parametrize("name", ["ragged", "shared"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 10), (False, None)])
def test_attention_by_rows_goes_through_the_kernels(
    name: str, causal: bool, window: int | None
) -> None:
    """However queries lie in memory; soft caps and other formats go where they are known."""
    runs = RUNS[name]
    tokens = sum(run.length for run in runs)
    context = Context(torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None])
    context = with_layout(context, runs)
    by_token, by_head = drawn(1, tokens, 6, 64), drawn(1, 6, tokens, 64, seed=1)
    above = drawn(1, 6, tokens, 64, seed=2)
    found: dict[str, list[Tensor]] = {}
    for way, dtype in (("kernels", BF16), ("tiles", BF16), ("right", torch.float64)):
        q, k, v = (
            x.to(dtype).requires_grad_()
            for x in (by_token.transpose(1, 2), by_head[:, :2], by_head[:, 2:4])
        )
        given = {"causal": causal, "window": window, "scaling": 0.2}
        with native.off() if way == "tiles" else nullcontext():
            out = rows_attention(q, k, v, context, **given)  # type: ignore[arg-type]
        assert (type(out.grad_fn).__name__ == "_AttentionBackward") == (way == "kernels")
        found[way] = [out.detach(), *torch.autograd.grad(out, (q, k, v), above.to(dtype))]
    for way in ("kernels", "tiles"):
        for mine, right in zip(found[way], found["right"], strict=True):
            assert mine.shape == right.shape
            assert off_by(mine, right) < 1e-2


@needs_kernels
def test_what_multiplies(multiplies: str) -> None:
    """Either unit adds pairs of bf16 numbers in fp32; none of the values here needs to be rounded."""
    assert native.unit() == multiplies
    with native.without_tiles():
        assert native.unit() == "AVX512-BF16"
    assert native.unit() == multiplies
    x, weight = (torch.randint(-8, 9, (n, 96)).to(BF16) for n in (45, 70))
    for tokens in (1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 45):
        y = gemm(torch.empty(tokens, 70), part(x[:tokens], weight))
        assert torch.equal(y, x[:tokens].float() @ weight.float().t())
