"""The sites of tiny models of several families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from afina import seams
from afina.errors import ConfigError, TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=40, **sizes))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2))


def roberta() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 260, "num_attention_heads": 2, "max_position_embeddings": 34}
    return RobertaForCausalLM(RobertaConfig(is_decoder=True, pad_token_id=1, **sizes))


def classifier() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 40, "num_attention_heads": 2, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**sizes))


STACKS: dict[str, list[str]] = {
    "llama": ["model.layers"],
    "gpt2": ["transformer.h"],
    "bert": ["bert.encoder.layer"],
    "mixtral": ["model.layers"],
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_and_blocks(name: str) -> None:
    model = battery.build(name)
    assert list(seams.stacks(model)) == STACKS[name]
    (stack,) = STACKS[name]
    found = seams.blocks(model)
    assert [(b.name, b.index, b.stack) for b in found] == [
        (f"{stack}.0", 0, stack), (f"{stack}.1", 1, stack)
    ]  # fmt: skip
    assert all(b.module is model.get_submodule(b.name) for b in found)


def test_an_encoder_and_decoder_have_a_stack_each() -> None:
    assert list(seams.stacks(t5())) == ["encoder.block", "decoder.block"]


MAPS: dict[str, list[tuple[str, str, int | None, int, int]]] = {
    "llama": [
        ("model.embed_tokens", "embedding", None, 40, 16),
        ("model.layers.0.self_attn.q_proj", "linear", 0, 16, 16),
        ("model.layers.0.self_attn.k_proj", "linear", 0, 16, 8),
        ("model.layers.1.mlp.down_proj", "linear", 1, 24, 16),
        ("lm_head", "linear", None, 16, 40),
    ],
    "gpt2": [
        ("transformer.wte", "embedding", None, 40, 16),
        ("transformer.wpe", "embedding", None, 32, 16),
        ("transformer.h.0.attn.c_attn", "conv1d", 0, 16, 48),
        ("transformer.h.1.mlp.c_proj", "conv1d", 1, 64, 16),
        ("lm_head", "linear", None, 16, 40),
    ],
    "bert": [
        ("bert.embeddings.word_embeddings", "embedding", None, 40, 16),
        ("bert.encoder.layer.1.attention.output.dense", "linear", 1, 16, 16),
        ("cls.predictions.decoder", "linear", None, 16, 40),
    ],
}


@pytest.mark.parametrize("name", MAPS)
def test_maps(name: str) -> None:
    model = battery.build(name)
    sites = seams.map_sites(model)
    told = [(s.name, s.kind, s.block, s.in_features, s.out_features) for s in sites]
    assert [row for row in told if row in MAPS[name]] == MAPS[name]
    order = [n for n, _ in model.named_modules()]
    assert [s.name for s in sites] == sorted((s.name for s in sites), key=order.index)


def test_what_was_attached_is_no_site() -> None:
    model = battery.build("llama")
    before = [s.name for s in seams.map_sites(model)]
    apply(model, [LoRA(rank=2)])
    assert [s.name for s in seams.map_sites(model)] == before
    assert list(seams.stacks(model)) == ["model.layers"]


def test_attention_and_experts() -> None:
    llama, mixtral = battery.build("llama"), battery.build("mixtral")
    assert seams.attention_modules(llama) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert seams.attention_modules(battery.build("gpt2")) == [
        "transformer.h.0.attn", "transformer.h.1.attn"
    ]  # fmt: skip
    assert seams.attention_modules(battery.build("bert")) == [
        f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)
    ]
    assert seams.expert_modules(llama) == []
    assert seams.expert_modules(mixtral) == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]


def test_input_and_head() -> None:
    heads = {
        "llama": ("model.embed_tokens", "lm_head", False),
        "llama_tied": ("model.embed_tokens", "lm_head", True),
        "gpt2": ("transformer.wte", "lm_head", True),
        "bert": ("bert.embeddings.word_embeddings", "cls.predictions.decoder", True),
    }
    for name, (embedding, head, tied) in heads.items():
        model = battery.build(name)
        assert seams.input_embedding(model) == embedding
        found = seams.head(model)
        assert (found.name, found.tied) == (head, tied)
        assert found.module is model.get_submodule(head)
    assert seams.head(classifier()).name == "classifier"
    bare = seams.head(battery.build("bert").bert)
    assert (bare.name, bare.module, bare.tied) == (None, None, False)


def test_a_model_without_an_embedding() -> None:
    with pytest.raises(TechniqueError, match="no token embedding"):
        seams.input_embedding(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, None),
        ((3, -1), (3, -1)),
        ("5", (5,)),
        ("0-2", (0, 1, 2)),
        ("0-2,7,-1", (0, 1, 2, 7, -1)),
        (" 1 - 2 , 4 ", (1, 2, 4)),
        ("-2", (-2,)),
    ],
)
def test_layers_as_text(text: Any, numbers: Any) -> None:
    assert seams.parse_layers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1;2", "1--2", "0.5"])
def test_layers_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="layers"):
        seams.parse_layers(text)
    with pytest.raises(ConfigError, match="layers"):
        LoRA(layers=text)


def test_chosen_layers() -> None:
    model = battery.build("llama")
    assert seams.chosen_layers(model, None, setting="x") == {0, 1}
    assert seams.chosen_layers(model, "-1", setting="x") == {1}
    assert seams.chosen_layers(model, (0, -2), setting="x") == {0}
    for wrong in ("2", "-3", (0, 5)):
        with pytest.raises(TechniqueError, match=r"x: this model has no such block") as caught:
            seams.chosen_layers(model, wrong, setting="x")
        assert "0 to 1" in str(caught.value)


def test_who_can_keep_rows_apart() -> None:
    for name in ("llama", "gpt2", "bert", "mixtral"):
        assert seams.supports_rows(battery.build(name)), name
    assert not seams.supports_rows(t5())
    assert not seams.supports_rows(mamba())
    assert not seams.supports_rows(torch.nn.Linear(2, 2))
    assert not seams.supports_rows(roberta())


def test_where_rows_begin() -> None:
    assert seams.first_position(roberta()) == 2  # behind the padding's position, which is its id
    for name in ("llama", "gpt2", "bert"):
        assert seams.first_position(battery.build(name)) == 0, name


class Hybrid(torch.nn.Module):
    """Blocks of two kinds in one list, as models that mix attention and recurrence have."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Bilinear(2, 2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))]
        self.layers = torch.nn.ModuleList(blocks)
        self.q_proj = torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "lora.target: all-linear: no stack"),
        ({"target": ("attention",)}, "lora.target: attention"),
        ({"target": ("q_proj",), "layers": "0"}, "lora.layers: no stack"),
    ],
)
def test_blocks_of_several_kinds_are_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(TechniqueError) as caught:
        LoRA(rank=1, **settings).apply(Hybrid())
    assert said in str(caught.value)
    assert "got:    layers of Bilinear, Sequential" in str(caught.value)
    assert "name the modules themselves, in lora.target" in str(caught.value)
    assert list(LoRA(rank=1, target=("q_proj",)).apply(Hybrid()).deltas) == ["q_proj.lora"]
