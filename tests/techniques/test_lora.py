"""LoRA: its mathematics against values written out, its scale, its targets, its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from afina import seams
from afina.errors import ConfigError, TechniqueError
from afina.ops import reference
from afina.table import apply
from afina.techniques.lora import LoRA, LoRADelta, low_rank_rows
from tests import battery


def test_low_rank_rows_is_low_rank_of_one_hot() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 7, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    ids = torch.tensor([[0, 6, 3]])
    hot = F.one_hot(ids, 7).double()
    assert low_rank_rows(ids, a, b, 1.5).shape == (1, 3, 4)
    slow = reference.low_rank_linear(hot, torch.zeros(4, 7, dtype=torch.float64), a, b, 1.5)
    torch.testing.assert_close(low_rank_rows(ids, a, b, 1.5), slow)


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"),
    [(16, 32, False, 2.0), (4, 32, False, 8.0), (16, 32, True, 8.0), (3, 1, True, 3**-0.5)],
)
def test_the_scale(rank: int, alpha: float, rslora: bool, scale: float) -> None:
    lora = LoRA(rank=rank, alpha=alpha, rslora=rslora, target=("mlp.down_proj",))
    edit = apply(battery.build("llama"), [lora])
    assert lora.scale(alpha, rank) == pytest.approx(scale, abs=1e-15)
    assert {d.scaling for d in edit.deltas.values() if isinstance(d, LoRADelta)} == {
        lora.scale(alpha, rank)
    }


def test_defaults() -> None:
    lora = LoRA()
    assert (lora.rank, lora.alpha, lora.dropout, lora.rslora) == (16, 32.0, 0.0, False)
    assert lora.target == ("all-linear",)
    assert lora.loraplus_ratio is None


def test_starting_values() -> None:
    edit = apply(battery.build("llama"), [LoRA(rank=4, target=("down_proj", "embed_tokens"))])
    tensors = edit.trainable()
    a = tensors["model.layers.0.mlp.down_proj.lora.a"]
    bound = 1 / math.sqrt(24)
    assert a.shape == (4, 24)
    assert 0.9 * bound < a.abs().max() <= bound
    assert abs(a.mean()) < 0.3 * bound
    assert not tensors["model.layers.0.mlp.down_proj.lora.b"].any()
    assert not tensors["model.embed_tokens.lora.a"].any()
    assert 0.6 < tensors["model.embed_tokens.lora.b"].std() < 1.4


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_parameters_are_fp32_or_the_base_s_if_wider(kind: str) -> None:
    model = battery.build("llama", getattr(torch, kind))
    edit = apply(model, [LoRA(rank=2)])
    wanted = torch.float64 if kind == "float64" else torch.float32
    assert {p.dtype for p in edit.trainable().values()} == {wanted}


def targets(model: Any, **settings: Any) -> list[str]:
    return list(apply(model, [LoRA(rank=2, **settings)]).deltas)


BLOCK = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [
        ("llama", {}, [f"model.layers.{i}.{n}" for i in (0, 1) for n in BLOCK]),
        (
            "llama",
            {"target": ("attention",)},
            [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"],
        ),
        ("gpt2", {"target": ("attention",)}, [f"transformer.h.{i}.attn.c_attn" for i in (0, 1)]),
        (
            "bert",
            {"target": ("attention",), "layers": "-1"},
            ["bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.self.value"],
        ),
        ("llama", {"exclude": ("mlp.*",), "layers": (0,)}, [f"model.layers.0.{n}" for n in BLOCK[:4]]),
        (
            "llama",
            {"target": ("embed_tokens", "o_proj", "lm_head"), "layers": "1"},
            ["model.embed_tokens", "model.layers.1.self_attn.o_proj", "lm_head"],
        ),
        (
            "llama",
            {"target": ("q_proj", "lm_head"), "modules_to_save": ("lm_head",), "layers": "0"},
            ["model.layers.0.self_attn.q_proj"],
        ),
        ("mixtral", {"layers": "0"}, [f"model.layers.0.{n}" for n in BLOCK[:4]]),
    ],
)  # fmt: skip
def test_targets(model: str, settings: dict[str, Any], wanted: list[str]) -> None:
    assert targets(battery.build(model), **settings) == [f"{name}.lora" for name in wanted]


def test_the_later_pattern_wins() -> None:
    lora = LoRA(
        rank=4,
        rank_pattern={"q_proj": 2, "layers.1.self_attn.q_proj": 3},
        alpha_pattern={"v_proj": 1.0},
        target=("attention",),
    )
    edit = apply(battery.build("llama"), [lora])
    told = {
        n.removeprefix("model.layers."): (d.rank, d.scaling)
        for n, d in edit.deltas.items()
        if isinstance(d, LoRADelta)
    }
    assert told == {
        "0.self_attn.q_proj.lora": (2, 16.0),
        "0.self_attn.v_proj.lora": (4, 0.25),
        "1.self_attn.q_proj.lora": (3, 32 / 3),
        "1.self_attn.v_proj.lora": (4, 0.25),
    }


def test_whole_modules_train_once_under_their_own_name() -> None:
    def whole(model: str, *patterns: str) -> list[str]:
        return list(apply(battery.build(model), [LoRA(rank=2, modules_to_save=patterns)]).in_place)

    assert whole("llama", "lm_head") == ["lm_head.weight"]
    assert whole("llama_tied", "lm_head") == ["model.embed_tokens.weight"]
    assert whole("llama_tied", "lm_head", "embed_tokens") == ["model.embed_tokens.weight"]
    assert whole("gpt2", "ln_f") == ["transformer.ln_f.weight", "transformer.ln_f.bias"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 17}, "at most 16"),
        ({"target": ("k_proj",), "rank": 9}, "at most 8"),
        ({"target": ("q_porj",)}, "perhaps q_proj"),
        ({"exclude": ("lm_head",)}, "lora.exclude"),
        ({"exclude": ("*_proj",)}, "nothing is left"),
        ({"rank_pattern": {"lm_head": 2}}, "lora.rank_pattern"),
        ({"alpha_pattern": {"nope": 2.0}}, "lora.alpha_pattern"),
        ({"modules_to_save": ("lm_haed",)}, "lora.modules_to_save"),
        ({"layers": "0-2"}, "lora.layers"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    with pytest.raises(TechniqueError) as caught:
        apply(model, [LoRA(**settings)])
    assert said in str(caught.value)
    battery.same_picture(battery.picture(model), before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "LoRA.rank cannot have this value\n  got:    0\n  wanted: greater than or equal"),
        ({"rank": -3}, "greater than or equal to 1"),
        ({"rank": True}, "LoRA.rank cannot have this value\n  got:    True\n  wanted: a number"),
        ({"rank": "many"}, 'got:    "many"\n  wanted: an integer'),
        ({"alpha": 0}, "LoRA.alpha cannot have this value\n  got:    0\n  wanted: greater than 0"),
        ({"alpha": float("inf")}, "a finite number"),
        ({"alpha": float("nan")}, "LoRA.alpha"),
        ({"dropout": 1.0}, "LoRA.dropout cannot have this value\n  got:    1.0\n  wanted: less than 1"),
        ({"dropout": -0.1}, "greater than or equal to 0"),
        ({"loraplus_ratio": 0}, "LoRA.loraplus_ratio"),
        ({"target": ()}, "LoRA.target"),
        ({"target": "q_proj"}, 'got:    "q_proj"\n  wanted: a list'),
        ({"rank_pattern": {"q": 0}}, "every rank in rank_pattern must be at least 1"),
        ({"alpha_pattern": {"q": -1}}, "every alpha in alpha_pattern must be above 0"),
        ({"layers": "x"}, "layers: cannot read 'x'"),
        ({"layers": "5-2"}, "runs backwards"),
        ({"layers": "0-9999999999999"}, "more blocks than any model has"),
        ({"rnak": 4}, "unknown setting 'LoRA.rnak'\n  cure:   did you mean LoRA.rank?"),
        ({"rnk": 4, "alpha": 0}, "2 settings cannot be used"),
    ],
)  # fmt: skip
def test_settings_out_of_range(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LoRA(**settings)
    assert said in str(caught.value)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(ConfigError, match=r"by name\n  got:    16\n  wanted: rank=…, alpha=…"):
        LoRA(16)


def test_dropout_acts_in_training_alone() -> None:
    model = battery.build("llama")
    edit = apply(model, [LoRA(rank=4, dropout=0.5)])
    battery.train(model, edit, steps=3)
    assert torch.equal(battery.logits(model), battery.logits(model))
    model.train()
    torch.manual_seed(0)
    one = battery.logits(model)
    assert not torch.equal(one, battery.logits(model))
    torch.manual_seed(0)
    assert torch.equal(one, battery.logits(model))


class Scaled(nn.Embedding):
    """As Gemma's: what is looked up is multiplied."""

    scalar_embed_scale = 4.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scalar_embed_scale


def test_an_embedding_that_multiplies_folds_all_the_same() -> None:
    torch.manual_seed(0)
    module = Scaled(9, 4)
    delta = LoRADelta(seams.MapSite("e", module, "embedding", None, 9, 4), 2, 0.5, 0.0)
    delta.reset(0)
    nn.init.normal_(delta.a)
    ids = torch.arange(9)
    beside = delta(ids, module(ids), module)
    with torch.no_grad():
        module.weight += delta.weight_delta().t()
    torch.testing.assert_close(module(ids), beside)


def test_loraplus_scales_b_alone() -> None:
    edit = apply(
        battery.build("llama"), [LoRA(rank=2, loraplus_ratio=8, modules_to_save=("norm",))]
    )
    scales = edit.lr_scales()
    assert {s for n, s in scales.items() if n.endswith(".lora.b")} == {8}
    assert {s for n, s in scales.items() if not n.endswith(".lora.b")} == {1.0}
