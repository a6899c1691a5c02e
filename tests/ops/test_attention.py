"""Attention by rows against the slow reference, and through the models that it is registered for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from afina.errors import ConfigError, ModelError
from afina.ops import attention, interface, reference
from afina.ops.layout import with_layout
from afina.types import Context
from tests.train.kit import run

# --- the function --------------------------------------------------------------------------------------------------


def packed(lengths: list[int], padding: int = 0) -> Context:
    """The context of rows end to end in one line."""
    segments = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    positions = [p for n in lengths for p in range(n)] + [0] * padding
    return with_layout(Context(torch.tensor([segments]), torch.tensor([positions])))


def padded(lengths: list[int]) -> Context:
    """The context of one row a line."""
    longest = max(lengths)
    segments = [[i] * n + [-1] * (longest - n) for i, n in enumerate(lengths)]
    return Context(torch.tensor(segments), torch.arange(longest).expand(len(lengths), -1))


def qkv(
    context: Context,
    heads: int,
    shared: int,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    lines, length = context.segments_BT.shape
    sizes = [(lines, h, length, width) for h in (heads * shared, heads, heads)]
    q, k, v = (torch.randn(s, dtype=dtype, requires_grad=True) for s in sizes)
    return q, k, v


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 6),
    softcap=st.none() | st.sampled_from([0.7, 20.0]),
    scaling=st.none() | st.just(0.3),
    packing=st.booleans(),
    padding=st.integers(0, 4),
    dtype=st.sampled_from([torch.float64, torch.float32]),  # tiles, and PyTorch's kernels
)
def test_equals_the_reference(
    lengths: list[int],
    heads: int,
    shared: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scaling: float | None,
    packing: bool,
    padding: int,
    dtype: torch.dtype,
) -> None:
    context = packed(lengths, padding) if packing else padded(lengths)
    given_: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scaling": scaling
    }  # fmt: skip
    tensors = qkv(context, heads, shared, dtype=dtype)
    within = 1e-12 if dtype == torch.float64 else 2e-5
    real = (context.segments_BT >= 0)[:, None, :, None]
    fast = attention.rows_attention(*tensors, context, **given_)
    slow = reference.attention(*tensors, context.segments_BT, **given_)
    assert fast.isfinite().all()
    torch.testing.assert_close(fast * real, slow * real, rtol=0, atol=within)
    towards = torch.randn_like(fast) * real
    for got, wanted in zip(
        torch.autograd.grad(fast, tensors, towards),
        torch.autograd.grad(slow, tensors, towards),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=within)


def test_the_reference_is_softmax_over_what_is_seen() -> None:
    # Two rows of two tokens, one head of width 1, worked by hand.
    q = torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=torch.float64).view(1, 1, 4, 1)
    k = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 4, 1)
    v = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64).view(1, 1, 4, 1)
    segments = torch.tensor([[0, 0, 1, -1]])
    out = reference.attention(q, k, v, segments, causal=True, scaling=1.0)[0, 0, :, 0]
    e = torch.tensor([1.0, 2.0], dtype=torch.float64).exp()  # scores 2·0.5 and 2·1
    assert out.tolist() == pytest.approx(
        [10.0, ((10 * e[0] + 20 * e[1]) / e.sum()).item(), 30.0, 0.0]
    )
    both = reference.attention(q, k, v, segments, causal=False, scaling=1.0)[0, 0, 0, 0]
    f = torch.tensor([0.5, 1.0], dtype=torch.float64).exp()
    assert both.item() == pytest.approx(((10 * f[0] + 20 * f[1]) / f.sum()).item())
    one = reference.attention(q, k, v, segments, causal=True, scaling=1.0, window=1)
    assert one[0, 0, :3, 0].tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (2, None), (None, 5.0)])
@pytest.mark.parametrize("make", [packed, padded])
def test_a_row_leaves_the_others_bitwise(
    causal: bool, window: int | None, softcap: float | None, make: Callable[..., Context]
) -> None:
    context = make([3, 5, 1, 4])
    q, k, v = (x.detach() for x in qkv(context, 2, 2))
    mine = (context.segments_BT == 1)[:, None, :, None]
    q2, k2, v2 = (torch.where(mine, x + 1.0 + x.abs() * 3, x) for x in (q, k, v))
    given_: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    one = attention.rows_attention(q, k, v, context, **given_)
    other = attention.rows_attention(q2, k2, v2, context, **given_)
    others = ((context.segments_BT >= 0)[:, None, :, None] & ~mine).expand_as(one)
    assert torch.equal(one[others], other[others])
    assert not torch.equal(one[mine.expand_as(one)], other[mine.expand_as(one)])


def test_layout_of_ragged_rows_and_padding() -> None:
    layout = packed([2, 3, 7], padding=1).layout
    assert layout is not None
    # The long row alone, then those of two and three tokens, then the padding.
    assert [(rows, long, keys) for rows, long, keys, _ in layout.blocks] == [
        (1, 7, 7), (2, 3, 3), (1, 1, 1)
    ]  # fmt: skip
    assert layout.queries_P.tolist() == [5, 6, 7, 8, 9, 10, 11, 2, 3, 4, 0, 1, 1, 12]
    assert layout.queries_P[layout.back_T].tolist() == list(range(13))
    assert torch.equal(layout.keys_Q, layout.queries_P)
    assert not layout.shared
    assert layout.blocks[1][3].keys_M.tolist() == [3, 2]


# --- through Transformers ------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen2() -> Any:
    """The first block sees the whole row, the second a window of three tokens."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **window))


def gemma2() -> Any:
    """Scores softly capped, every other block in a window."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 3}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **caps, head_dim=4, query_pre_attn_scalar=4))


def gpt2() -> Any:
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends))


def bert() -> Any:
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**(sizes | {"pad_token_id": 0})))


EVERY = (llama, qwen2, gemma2, gpt2, bert)
ROWS = ([3, 9, 14, 2, 7, 30], [5, 5, 1], [22], [8, 13, 21, 34, 2])


def build(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().double().eval()


def line(rows: tuple[list[int], ...]) -> tuple[Tensor, Context]:
    return torch.tensor([[t for r in rows for t in r]]), packed([len(r) for r in rows])


def by_rows(model: Any, rows: tuple[list[int], ...]) -> Tensor:
    ids, context = line(rows)
    with interface.rows(model):
        return model(
            input_ids=ids, position_ids=context.positions_BT, afina_context=context
        ).logits[0]


def single(model: Any, rows: tuple[list[int], ...]) -> Tensor:
    before = model.config._attn_implementation
    if before == "eager":
        # Transformers' own softmax is fp32 there, too coarse to judge by: the reference in its place.
        AttentionInterface.register("slow", _slow)
        AttentionMaskInterface.register("slow", lambda *_, **__: None)
        model.set_attn_implementation("slow")
    logits = torch.cat([model(input_ids=torch.tensor([r])).logits[0] for r in rows])
    model.set_attn_implementation(before)
    return logits


def _slow(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    out = reference.attention(
        q,
        k,
        v,
        torch.zeros(q.shape[0], q.shape[2]),
        causal=module.is_causal,
        scaling=kwargs["scaling"],
        window=kwargs["sliding_window"],
        softcap=kwargs["softcap"],
    )
    return out.transpose(1, 2), None


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (logits * torch.randn_like(logits)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", EVERY, ids=lambda m: m.__name__)
def test_packed_rows_equal_single_rows(make: Callable[[], Any]) -> None:
    model = build(make)
    before = model.config._attn_implementation
    alone, together = single(model, ROWS), by_rows(model, ROWS)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    wanted, got = gradients(model, alone), gradients(model, together)
    assert set(got) == set(wanted)
    # Gemma's own norms are fp32 whatever the model's dtype, and round differently in another order.
    within = 1e-5 if make is gemma2 else 1e-10
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=within, atol=within)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("make", EVERY, ids=lambda m: m.__name__)
def test_without_it_rows_see_each_other(make: Callable[[], Any]) -> None:
    model = build(make)
    ids, context = line(ROWS)
    # Positions restart, and the model's own attention runs over the whole line.
    ones = torch.ones_like(ids)
    leaky = model(input_ids=ids, attention_mask=ones, position_ids=context.positions_BT).logits[0]
    assert (leaky - single(model, ROWS)).abs().max() > 1e-3


def test_a_row_leaves_the_logits_of_others_bitwise() -> None:
    model = build(qwen2)
    one = by_rows(model, ROWS)
    other = by_rows(model, (ROWS[0], [6, 7, 8], *ROWS[2:]))
    rest = torch.tensor([t not in range(6, 9) for t in range(len(one))])
    assert torch.equal(one[rest], other[rest])
    assert not torch.equal(one[~rest], other[~rest])


def test_the_context_is_asked_for() -> None:
    model = build(llama)
    with (
        pytest.raises(ModelError, match="without its context"),
        interface.rows(model),
    ):
        model(input_ids=torch.tensor([[1, 2]]))
    assert model.config._attn_implementation == "sdpa"


def test_parts_of_attention_that_are_unknown_are_refused() -> None:
    context = packed([2])
    q = k = v = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ModelError, match="s_aux"):
        interface._interface(
            torch.nn.Module(), q, k, v, None, afina_context=context, s_aux=torch.zeros(1)
        )


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    """Qwen2-MoE tells its window to the mask alone: attention by rows would see past it, silently."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    torch.manual_seed(0)
    model: Any = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, **window, **experts, num_experts_per_tok=1)
    )
    with pytest.raises(ModelError, match="window"):
        by_rows(model.double().eval(), ROWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels can run")
def test_kernels_that_cannot_run_here_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way, package in (("triton", "triton"), ("flash", "flash_attn")):
        monkeypatch.setattr(attention, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=f"needs the package {package}") as caught:
            run(tmp_path / "run", attention=way, steps=1)
        assert "leave train.attention out" in str(caught.value.cure)
        monkeypatch.setattr(attention, "find_spec", lambda name: name)
        monkeypatch.setattr(attention, "_interpreted", lambda: False)
        with pytest.raises(ConfigError, match=f"attention={way} needs a CUDA device"):
            run(tmp_path / "run", attention=way, steps=1)
        assert not (tmp_path / "run").exists()
    assert attention.backend(torch.device("cpu"), torch.float32).startswith("PyTorch")
