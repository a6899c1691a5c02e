"""Packed lines as the package flash-attn takes them: a stand-in with its rules, against the ways that are known."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.ops import attention, flash, reference
from afina.ops.layout import with_layout
from afina.types import Context, Run
from tests.train.kit import ragged_rows, run, weights

CPU = torch.device("cpu")
TREE = [Run(0, 6), Run(6, 3, ((0, 6),)), Run(9, 2, ((0, 6), (6, 3))), Run(11, 3, ((0, 6), (6, 3))),
        Run(14, 7, ((0, 6),)), Run(21, 2)]  # fmt: skip
"""0–5 begins all rows, 6–8 two of them, 9–10 and 11–13 their ends, 14–20 another's; 21–22 alone."""


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """What the package documents: where keys are more than queries, the last of both stand beside each other."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert all(x.is_contiguous() for x in (q, k, v))
    outs: list[Tensor] = []
    cuts = [pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_k)]
    for (start, end), (first, last) in zip(*cuts, strict=True):
        assert end - start <= max_seqlen_q
        assert last - first <= max_seqlen_k
        each = q.shape[1] // k.shape[1]
        keys, values = (x[first:last].repeat_interleave(each, dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[start:end], keys) * softmax_scale
        place = torch.arange(end - start)[:, None] + (last - first) - (end - start)
        other = torch.arange(last - first)[None]
        left, right = window_size
        right = 0 if causal else right
        hidden = (other > place + right) if right >= 0 else torch.zeros_like(other > place)
        if left >= 0:
            hidden |= other < place - left
        weights_HTS = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,shd->thd", weights_HTS, values))
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The package, in every format on any device; counts its calls."""
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return varlen(*args, **kwargs)

    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = counted
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(flash, "FORMATS", (torch.float64, torch.float32))
    monkeypatch.setattr(attention, "refuse_missing", lambda way, device: None)
    return calls


def draw(tokens: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = [(1, heads, tokens, 8) for heads in (4, 2, 2)]
    return [
        torch.randn(s, generator=random, dtype=torch.float64).requires_grad_(True) for s in sizes
    ]


def both(context: Any, tensors: list[Tensor], **rule: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients without the package, and with it."""
    found: list[list[Tensor]] = []
    for way in ("auto", "flash"):
        with attention.computed_by(way, CPU):  # type: ignore[arg-type]
            out = attention.rows_attention(*tensors, context(), **rule)  # type: ignore[arg-type]
        towards = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad(out, tensors, towards)])
    return found[0], found[1]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_share_their_beginning_see_it(
    causal: bool, window: int | None, stand_in: list[int]
) -> None:
    owners = torch.tensor([[n for n, run in enumerate(TREE) for _ in range(run.length)]])
    one, other = both(
        lambda: with_layout(Context(owners, owners), TREE), draw(23), causal=causal, window=window
    )
    assert stand_in == [1]
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_rows_see_themselves_alone(
    causal: bool, window: int | None, scaling: float | None
) -> None:
    segments = torch.tensor([[0] * 5 + [1] + [2] * 9])
    rule: dict[str, Any] = {"causal": causal, "window": window, "scaling": scaling}
    tensors = draw(15)
    _, found = both(lambda: with_layout(Context(segments, segments)), tensors, **rule)
    out = reference.attention(*tensors, segments, **rule)  # type: ignore[arg-type]
    towards = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    for mine, theirs in zip([out, *torch.autograd.grad(out, tensors, towards)], found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


def test_nothing_is_moved_where_rows_lie_in_their_order() -> None:
    segments = torch.tensor([[0] * 5 + [1] + [2] * 9])
    layout = with_layout(Context(segments, segments)).layout
    assert layout is not None
    cuts = flash.cuts_of(layout.runs, 15, CPU)
    assert cuts.queries_P is None
    assert cuts.keys_Q is None
    assert cuts.query_ends.tolist() == cuts.key_ends.tolist() == [0, 5, 6, 15]
    assert (cuts.queries_most, cuts.keys_most) == (9, 9)


def test_padding_is_finite_and_teaches_nothing() -> None:
    segments = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3])
    tensors = draw(12)
    with attention.computed_by("flash", CPU):
        out = attention.rows_attention(
            *tensors, with_layout(Context(segments, segments)), causal=True
        )  # type: ignore[arg-type]
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out[:, :, :9].square().sum(), tensors):
        assert not gradient[:, :, 9:].any()


def test_what_the_package_does_not_know_is_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, stand_in: list[int]
) -> None:
    segments = torch.tensor([[0] * 5])
    q, k, v = (x.detach() for x in draw(5))
    with attention.computed_by("flash", CPU):
        context = with_layout(Context(segments, segments))
        capped = attention.rows_attention(q, k, v, context, causal=True, softcap=2.0)
        wanted = reference.attention(q, k, v, segments, causal=True, softcap=2.0)
        torch.testing.assert_close(capped, wanted, rtol=0, atol=1e-12)
        assert "flash-attn" in attention.backend(CPU, torch.float64)
        monkeypatch.setattr(flash, "FORMATS", (torch.bfloat16,))
        attention.rows_attention(q, k, v, context, causal=True)
        assert "flash-attn" not in attention.backend(CPU, torch.float64)
    assert stand_in == [0]
    assert "flash-attn" not in attention.backend(CPU, torch.bfloat16)


def test_a_training_run_is_the_same(tmp_path: Path, stand_in: list[int]) -> None:
    found: list[dict[str, Tensor]] = []
    for way in ("auto", "flash"):
        stand_in[0] = 0
        made = run(tmp_path / way, steps=2, attention=way, data=ragged_rows(4), compile=False)
        found.append(weights(made))
        assert (stand_in[0] > 0) == (way == "flash")
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)
