"""The Triton kernels in Triton's interpreter: values, log-sum-exp and gradients against the slow reference.

Without the package `triton` they are skipped. It need not be able to compile anything:
pip install --no-deps --target FOLDER triton, and FOLDER in PYTHONPATH. (`tests/conftest.py` asks for the interpreter,
where there is no GPU; on one, `tests/test_gpu.py` runs them for real.)
"""

from __future__ import annotations

import importlib
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afina.ops import attention, reference
from afina.ops.layout import with_layout
from afina.ops.ranges import ranges_of
from afina.types import Context, Run
from tests.train.kit import ragged_rows, run, weights

triton: Any = pytest.importorskip(
    "triton", reason="Triton's interpreter is not here: pip install --no-deps triton"
)
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

kernels: Any = importlib.import_module("afina.ops.kernels")


def line(lengths: list[int], padding: int = 0) -> Tensor:
    segments = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(segments + [-1] * padding)


def draw(tokens: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens + heads + width)
    sizes = [(tokens, h, width) for h in (heads * shared, heads, heads)]
    return [torch.randn(s, generator=random).to(dtype).requires_grad_(True) for s in sizes]


def with_gradients(
    tensors: list[Tensor], segments: Tensor, *, tile: int = 16, slow: bool = False, **rule: Any
) -> list[Tensor]:
    """Output and gradients, towards the same random direction."""
    if slow:
        by_head = (x.transpose(0, 1)[None] for x in tensors)
        out = reference.attention(*by_head, segments[None], **rule)[0].transpose(0, 1)  # type: ignore[arg-type]
    else:
        ranges = ranges_of(segments, causal=rule["causal"], window=rule.get("window"))
        out, _ = kernels.attend(*tensors, ranges, scale=rule.get("scaling"), tile=tile)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    towards = torch.randn(out.shape, generator=random).to(out) * (segments >= 0)[:, None, None]
    return [out.detach(), *torch.autograd.grad(out, tensors, towards)]


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    width=st.sampled_from([4, 20]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
    scaling=st.none() | st.just(0.3),
    padding=st.integers(0, 3),
)
def test_equals_the_reference(
    lengths: list[int],
    heads: int,
    shared: int,
    width: int,
    causal: bool,
    window: int | None,
    scaling: float | None,
    padding: int,
) -> None:
    segments = line(lengths, padding)
    tensors = draw(len(segments), heads, shared, width, torch.float64)
    rule = {"causal": causal, "window": window, "scaling": scaling}
    fast, slow = (with_gradients(tensors, segments, slow=s, **rule) for s in (False, True))
    for mine, theirs in zip(fast, slow, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_in_fp32_all_is_within_1e_5() -> None:
    segments = line([37, 50])
    tensors = draw(87, 1, 3, 16, torch.float32)
    fast, slow = (
        with_gradients(tensors, segments, tile=32, slow=s, causal=True) for s in (False, True)
    )
    for mine, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_the_log_sum_exp_is_that_of_the_scores_and_minus_infinity_of_padding() -> None:
    segments = line([5, 3], padding=2)
    q, k, v = (x.detach() for x in draw(10, 1, 2, 4, torch.float64))
    ranges = ranges_of(segments, causal=True)
    out, logsum = kernels.attend(q, k, v, ranges, tile=16)
    scores = torch.einsum("ihd,jd->hij", q, k[:, 0]) / 2
    seen = reference.visible(segments[None], causal=True)[0]
    wanted = torch.logsumexp(scores.masked_fill(~seen, -math.inf), -1)
    torch.testing.assert_close(logsum, wanted, rtol=0, atol=1e-12)
    assert logsum[:, 8:].tolist() == [[-math.inf] * 2] * 2
    assert torch.equal(out[8:], torch.zeros(2, 2, 4, dtype=torch.float64))


def test_who_sees_whom() -> None:
    segments = line([3, 2], padding=1)
    for causal in (True, False):
        for window in (None, 1, 2):
            found = ranges_of(segments, causal=causal, window=window)
            at = torch.arange(6)
            by_query = (at >= found.first_T[:, None]) & (at < found.last_T[:, None])
            wanted = reference.visible(segments[None], causal=causal, window=window)[0]
            wanted[5] = False  # padding sees nothing here
            assert torch.equal(by_query, wanted)
            by_key = (at >= found.from_S[:, None]) & (at < found.to_S[:, None])
            assert bool((by_key.t() | ~wanted).all())  # tiles may hold more, never less


def test_a_row_leaves_the_others_bitwise() -> None:
    segments = line([7, 19, 4])
    tensors = draw(30, 1, 2, 8, torch.float32)
    other = [torch.where((segments == 1)[:, None, None], x * 3 + 1, x).detach() for x in tensors]
    for tensor in other:
        tensor.requires_grad_(True)
    one, two = (with_gradients(x, segments, causal=True) for x in (tensors, other))
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mine[segments != 1], theirs[segments != 1])
        assert not torch.equal(mine[segments == 1], theirs[segments == 1])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_share_their_beginning_see_it(causal: bool, window: int | None) -> None:
    """A line of runs: 0–5 begins all rows, 6–8 two of them, 9–10 and 11–13 their ends, 14–20 another's; 21–22 alone."""
    runs = [Run(0, 6), Run(6, 3, ((0, 6),)), Run(9, 2, ((0, 6), (6, 3))), Run(11, 3, ((0, 6), (6, 3))),
            Run(14, 7, ((0, 6),)), Run(21, 2)]  # fmt: skip
    owners = torch.tensor([[n for n, run in enumerate(runs) for _ in range(run.length)]])
    tensors = [x.transpose(0, 1)[None].detach() for x in draw(23, 2, 2, 4, torch.float64)]
    for tensor in tensors:
        tensor.requires_grad_(True)
    found: list[list[Tensor]] = []
    for way in (nullcontext(), attention.computed_by("triton", torch.device("cpu"))):
        context = with_layout(Context(owners, owners), runs)
        with way:
            out = attention.rows_attention(*tensors, context, causal=causal, window=window)  # type: ignore[arg-type]
        assert context.layout is not None
        assert (("range", 0, causal, window) in context.layout.masks) == (len(found) == 1)
        towards = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad(out, tensors, towards)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_what_the_kernels_do_not_know_is_computed_otherwise() -> None:
    context = with_layout(Context(line([5])[None], line([5])[None]))
    q, k, v = (x.transpose(0, 1)[None].detach() for x in draw(5, 1, 2, 4, torch.float64))
    with attention.computed_by("triton", torch.device("cpu")):
        capped = attention.rows_attention(q, k, v, context, causal=True, softcap=2.0)
        assert "Triton" in attention.backend(torch.device("cpu"), torch.float32)
    wanted = reference.attention(q, k, v, context.segments_BT, causal=True, softcap=2.0)
    torch.testing.assert_close(capped, wanted, rtol=0, atol=1e-12)
    assert "Triton" not in attention.backend(torch.device("cpu"), torch.float32)


def test_a_training_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = kernels.attend, [0]

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return whole(*args, **kwargs)

    monkeypatch.setattr(kernels, "attend", attend)
    found: list[dict[str, Tensor]] = []
    for way in ("auto", "triton"):
        calls[0] = 0
        made = run(tmp_path / way, steps=2, attention=way, data=ragged_rows(4), compile=False)
        found.append(weights(made))
        assert (calls[0] > 0) == (way == "triton")
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


def test_what_is_kept_for_backward_is_linear_in_the_length() -> None:
    kept: list[int] = []
    for length in (40, 80):
        segments, tensors = line([length]), draw(length, 1, 2, 4, torch.float32)
        sizes: dict[int, int] = {}

        def pack(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with_gradients(tensors, segments, causal=True)
        kept.append(sum(sizes.values()))
    assert kept[1] == 2 * kept[0]


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v = draw(4, 2, 1, 4, torch.float32)
    ranges = ranges_of(line([4]), causal=True)
    with pytest.raises(ValueError, match="2 key heads do not divide 3"):
        kernels.attend(torch.cat([q, q[:, :1]], 1), k, v, ranges)
