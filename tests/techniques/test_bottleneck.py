"""Bottleneck adapters against their formula written out, and the places where they act."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModel, T5Config, T5ForConditionalGeneration

import afina
from afina.adapters import files
from afina.errors import AdapterError, TechniqueError
from afina.table import apply
from afina.techniques.bottleneck import Bottleneck, BottleneckDelta
from afina.techniques.sublayers import sublayers
from afina.tree import Edit
from tests import battery
from tests.adapters.kit import edit_config, edit_tensors, refused

ACTS: dict[str, Any] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh}


def moved(model: Any, technique: Bottleneck) -> Edit:
    """The technique on, with random values everywhere."""
    edit = afina.apply(model, [technique])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(drawn * 0.5)
    return edit


def by_hand(z: Tensor, delta: BottleneckDelta, act: str, scale: Any) -> Tensor:
    inner = ACTS[act](z @ delta.down.t() + delta.down_bias)
    return scale * (inner @ delta.up.t() + delta.up_bias)


def test_llama_block_is_the_formula_with_gradients() -> None:
    for kind, act, scale in (
        ("houlsby", "silu", 1.0),
        ("pfeiffer", "relu", 1.0),
        ("parallel", "relu", 1.0),
        ("scaled_parallel", "relu", 4.0),
    ):
        model = battery.build("llama")
        edit = moved(model, Bottleneck(kind=kind, width=5))  # type: ignore[arg-type]
        block = model.model.layers[0]
        x = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
        rotary = model.model.rotary_emb(x, torch.arange(6)[None])
        mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        fast = block(x, attention_mask=mask, position_embeddings=rotary)
        with edit.disabled():
            o, _ = block.self_attn(
                block.input_layernorm(x), attention_mask=mask, position_embeddings=rotary
            )
            if kind == "houlsby":
                o = o + by_hand(o, block.self_attn.bottleneck, act, scale)
            h = x + o
            n = block.post_attention_layernorm(h)
            f = block.mlp(n)
        z = n if "parallel" in kind else f
        slow = h + f + by_hand(z, block.mlp.bottleneck, act, scale)
        battery.close(fast, slow)
        parts = [p for name, p in edit.trainable().items() if ".layers.0." in name]
        seed = torch.randn_like(slow)
        wanted = torch.autograd.grad(slow, (x, *parts), seed)
        for got, true in zip(torch.autograd.grad(fast, (x, *parts), seed), wanted, strict=True):
            battery.close(got, true)


@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer", "parallel"])
def test_bert_block_adds_before_the_norms(kind: Any) -> None:
    model = battery.build("bert")
    edit = moved(model, Bottleneck(kind=kind, width=5, non_linearity="gelu", scaling="learned"))
    block = model.bert.encoder.layer[0]
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    fast = block(x)
    fast = fast[0] if isinstance(fast, tuple) else fast
    with edit.disabled():
        said = block.attention.self(x)[0]
        o = block.attention.output.dense(said)
        if kind == "houlsby":
            delta = block.attention.output.dense.bottleneck
            o = o + by_hand(o, delta, "gelu", delta.scale)
        h = block.attention.output.LayerNorm(o + x)
        f = block.output.dense(block.intermediate(h))
    delta = block.output.dense.bottleneck
    f = f + by_hand(h if kind == "parallel" else f, delta, "gelu", delta.scale)
    slow = block.output.LayerNorm(f + h)
    battery.close(fast, slow)
    parts = [p for name, p in edit.trainable().items() if ".layer.0." in name]
    seed = torch.randn_like(slow)
    wanted = torch.autograd.grad(slow, (x, *parts), seed)
    for got, true in zip(torch.autograd.grad(fast, (x, *parts), seed), wanted, strict=True):
        battery.close(got, true)


SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FOUND: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gpt_neox": ({}, ["layers.0.attention", "layers.0.mlp"]),
    "gemma": ({"head_dim": 8}, ["layers.0.self_attn", "layers.0.mlp"]),
    "gemma2": (
        {"head_dim": 8, "num_key_value_heads": 1},
        ["layers.0.post_attention_layernorm", "layers.0.post_feedforward_layernorm"],
    ),
    "opt": (
        {"ffn_dim": 24, "word_embed_proj_dim": 16},
        ["decoder.layers.0.self_attn", "decoder.layers.0.fc2"],
    ),
    "phi3": ({}, ["layers.0.self_attn", "layers.0.mlp"]),
    "deepseek_v3": (
        {"n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": 8},
        ["layers.0.self_attn", "layers.0.mlp"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_sublayers_are_found_by_structure(name: str) -> None:
    changes, wanted = FOUND[name]
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(name, **{**SMALL, **changes}))
    assert [s.name for s in sublayers(model)] == wanted
    assert [s.role for s in sublayers(model)] == ["attention", "feed-forward"]


def test_a_norm_between_sublayer_and_sum_is_where_the_adapter_acts() -> None:
    sizes: dict[str, Any] = {**SMALL, "head_dim": 8, "num_key_value_heads": 1}
    model = AutoModel.from_config(AutoConfig.for_model("gemma2", **sizes)).double().eval()
    moved(model, Bottleneck(kind="parallel", width=4))
    seen: dict[str, Tensor] = {}
    block = model.layers[0]
    block.mlp.register_forward_hook(lambda m, args, out: seen.update(x=args[0], f=out))
    norm = block.post_feedforward_layernorm
    norm.register_forward_hook(lambda m, args, out: seen.update(said=out))
    model(input_ids=battery.IDS)
    slow = norm.forward(seen["f"]) + by_hand(seen["x"], norm.bottleneck, "relu", 1.0)
    battery.close(seen["said"], slow)


def test_parallel_state_is_gone_after_each_pass_and_not_copied() -> None:
    model = battery.build("bert")
    edit = moved(model, Bottleneck(kind="parallel", width=4))
    model(input_ids=battery.IDS).logits.sum().backward()
    deltas = [d for d in edit.deltas.values() if isinstance(d, BottleneckDelta)]
    assert all(delta.slot.held is None for delta in deltas)
    deltas[0].slot.held = torch.ones(3, requires_grad=True) * 2  # as after a pass that was cut off
    twin = copy.deepcopy(model)
    battery.close(battery.logits(twin), battery.logits(model))


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_blocks_compile_whole(model: str) -> None:
    made = battery.build(model)
    moved(made, Bottleneck(kind="parallel", width=4))
    before = battery.logits(made)
    blocks = made.model.layers if model == "llama" else made.bert.encoder.layer
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    battery.close(battery.logits(made), before)
    battery.close(battery.logits(made), before)


def test_generation_with_a_cache_is_as_without() -> None:
    model = battery.build("llama")
    moved(model, Bottleneck(width=4))
    kind: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    with torch.no_grad():
        one, other = (
            model.generate(battery.IDS[:1], use_cache=cache, **kind) for cache in (True, False)
        )
    assert torch.equal(one, other)


def test_layers_and_those_left_out() -> None:
    names = [s.name for s in Bottleneck(exclude="0").places(battery.build("llama"))]
    assert names == ["model.layers.1.self_attn", "model.layers.1.mlp"]
    with pytest.raises(TechniqueError, match="no block is left"):
        Bottleneck(layers="0", exclude="0").places(battery.build("llama"))
    edit = afina.apply(battery.build("llama"), [Bottleneck(reduction_factor=4)])
    assert {d.down.shape for d in edit.deltas.values() if isinstance(d, BottleneckDelta)} == {
        (4, 16)
    }


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "mixtral"])
def test_it_is_saved_and_read_strictly(model: str, tmp_path: Path) -> None:
    made = battery.build(model)
    technique = Bottleneck(kind="scaled_parallel", width=5, layers="1", scaling="learned")
    edit = moved(made, technique)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    other = battery.build(model)
    loaded = files.load(other, folder)
    assert torch.equal(battery.logits(other), battery.logits(made))
    battery.differs(battery.logits(other), battery.base_logits(model))
    assert loaded.trainable().keys() == edit.trainable().keys()
    edit_tensors(folder, lambda t: t.pop(next(key for key in t if key.endswith(".up_bias"))))
    assert "the file lacks it" in refused(folder, battery.build(model))
    files.save(edit, folder, base="tiny")
    edit_config(folder, kind="beside")
    assert "kind" in refused(folder, battery.build(model))
    with pytest.raises(Exception, match="BOTTLENECK"), battery.quiet():
        PeftModel.from_pretrained(battery.build(model), str(folder))


def test_merging_is_refused() -> None:
    edit = moved(battery.build("llama"), Bottleneck(width=4))
    before = battery.logits(edit.model)
    with pytest.raises(TechniqueError, match="cannot be merged"):
        edit.merge()
    assert torch.equal(battery.logits(edit.model), before)


def test_half_of_its_blocks_are_no_adapter(tmp_path: Path) -> None:
    edit = moved(battery.build("llama"), Bottleneck(width=4))
    folder = files.save(edit, tmp_path / "a", base="tiny")
    edit_tensors(folder, lambda t: [t.pop(key) for key in list(t) if "layers.0.self_attn" in key])
    with pytest.raises(AdapterError):
        files.load(battery.build("llama"), folder)
    with pytest.raises(AdapterError, match="whole blocks"):
        files.load(battery.build("llama"), folder, allow_partial=True)


# --- cross-attention -----------------------------------------------------------------------------------------------


def test_attention_to_an_encoder_gets_one_when_asked() -> None:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2}
    torch.manual_seed(0)
    config = T5Config(vocab_size=40, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    model = T5ForConditionalGeneration(config).double().eval()

    def answer() -> Tensor:
        with torch.no_grad():
            return model(input_ids=battery.IDS, decoder_input_ids=battery.TARGETS).logits

    before = answer()
    found: dict[bool, set[str]] = {}
    for cross in (False, True):
        edit = apply(model, [Bottleneck(kind="houlsby", cross=cross)])
        found[cross] = set(edit.deltas)
        assert torch.equal(answer(), before)
        with torch.no_grad():
            for name in found[cross] - found[False]:
                for parameter in edit.deltas[name].parameters():
                    parameter.add_(0.3)
        assert torch.equal(answer(), before) is not cross
        edit.undo()
    more = found[True] - found[False]
    assert found[False] < found[True]
    assert len(more) == 2
    assert all(name.startswith("decoder.block.") for name in more)
