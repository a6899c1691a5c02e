"""Full fine-tuning: which of the base's tensors train."""

from __future__ import annotations

from typing import Any

import pytest

from afina.errors import TechniqueError
from afina.table import apply
from afina.techniques.full import Full
from tests import battery


def trained(model: str, **settings: Any) -> list[str]:
    return list(apply(battery.build(model), [Full(**settings)]).trainable())


def test_all_of_it_tied_tensors_once() -> None:
    for name in ("llama", "llama_tied", "gpt2", "bert", "mixtral"):
        own = [n for n, _ in battery.build(name).named_parameters()]
        assert trained(name) == own
    assert "lm_head.weight" in trained("llama")
    assert "lm_head.weight" not in trained("llama_tied")


NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"target": ("norm", "lm_head")}, ["model.norm.weight", "lm_head.weight"]),
        (
            {"layers": "-1", "exclude": ("mlp", "self_attn")},
            [f"model.layers.1.{n}" for n in NORMS],
        ),
        (
            {"layers": (0, 1), "target": ("k_proj",)},
            [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)],
        ),
        ({"target": ("layers.1",), "exclude": ("*_proj",)}, [f"model.layers.1.{n}" for n in NORMS]),
    ],
)
def test_a_part_of_it(settings: dict[str, Any], wanted: list[str]) -> None:
    assert trained("llama", **settings) == wanted


def test_layers_do_not_reach_outside_the_blocks() -> None:
    assert all(n.startswith("model.layers.0.") for n in trained("llama", layers="0"))
    assert len(trained("llama", layers="0")) == 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": ("lm_haed",)}, "lm_head"),
        ({"exclude": ("mpl",)}, "full.exclude"),
        ({"layers": "7"}, "full.layers"),
        ({"layers": "0", "target": ("lm_head",)}, "nothing is left"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    with pytest.raises(TechniqueError) as caught:
        apply(model, [Full(**settings)])
    assert said in str(caught.value)
    battery.same_picture(battery.picture(model), before)
