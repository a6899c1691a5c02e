"""Adapters that PEFT made, onto our models: equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from afina.adapters import files
from afina.errors import AdapterError
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import build, peer

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("llama", {"use_rslora": True, "lora_alpha": 5, "target_modules": "all-linear"}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "up_proj", "down_proj"],
            "rank_pattern": {"layers.1.mlp.up_proj": 2, "q_proj": 3},
            "alpha_pattern": {r".*\.0\.mlp\..*": 9},
        },
    ),
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "attention of BERT": ("bert", {"target_modules": ["query", "value"]}),
    "layers": ("llama", {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "an embedding that multiplies": ("gemma3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole modules": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "a tied head trained with its tie": (
        "llama_tied",
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
            "task_type": "CAUSAL_LM",
        },
    ),
    "a classifier": ("classifier", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    "experts": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_of_peft(name: str, tmp_path: Path) -> None:
    base, settings = SETTINGS[name]
    theirs = peer(base, tmp_path, **settings)
    model = build(base)
    before = battery.logits(model)
    edit = files.load(model, tmp_path)
    battery.differs(theirs, before)
    battery.close(battery.logits(model), theirs, 1e-9)
    files.save(edit, tmp_path / "again", base="tiny")
    again = build(base)
    files.load(again, tmp_path / "again")
    assert torch.equal(battery.logits(again), battery.logits(model))
    edit.undo()
    assert torch.equal(battery.logits(model), before)


def test_a_tied_head_trained_apart_from_its_tie_is_refused(tmp_path: Path) -> None:
    """PEFT copies the head and trains the copy: no value of the one shared tensor says that."""
    peer("llama_tied", tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match="embed_tokens"):
        files.load(battery.build("llama_tied"), tmp_path)


def test_a_variant_is_refused(tmp_path: Path) -> None:
    peer("llama", tmp_path, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(AdapterError, match="lora_bias"):
        files.load(battery.build("llama"), tmp_path)


def test_what_the_value_becomes(tmp_path: Path) -> None:
    peer("llama", tmp_path, **SETTINGS["patterns"][1])
    (lora,) = files.load(battery.build("llama"), tmp_path).techniques
    assert isinstance(lora, LoRA)
    assert lora.rank_pattern == {
        "model.layers.0.self_attn.q_proj": 3,
        "model.layers.1.self_attn.q_proj": 3,
        "model.layers.1.mlp.up_proj": 2,
    }
    assert lora.alpha_pattern == {
        "model.layers.0.mlp.up_proj": 9.0,
        "model.layers.0.mlp.down_proj": 9.0,
    }
