"""A LoRA of experts that were modules of their own, put onto a model that has them fused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file

from afina.adapters import files
from tests import battery
from tests.adapters.kit import CONFIG, WEIGHTS, build, refused


def test_experts_apart_are_refused_with_a_cure_that_works(tmp_path: Path) -> None:
    """As a LoRA of Transformers 4 has them, where each expert was a module of its own."""
    shapes = {"w1": (12, 16), "w2": (16, 12), "w3": (12, 16)}
    draw = torch.Generator().manual_seed(0)
    values: dict[tuple[int, int, str], torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for layer, expert, name in product(range(2), range(4), shapes):
        out, into = shapes[name]
        key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        a, b = (torch.randn(size, generator=draw) * 0.2 for size in ((2, into), (out, 2)))
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        values[layer, expert, name] = 2 * b @ a
    old = tmp_path / "old"
    old.mkdir()
    save_file(tensors, old / WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["w1", "w2", "w3"],
        "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (old / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    said = refused(old, build("mixtral", torch.float32))
    assert "its experts are apart" in said
    assert "PeftModel.from_pretrained(model, FOLDER).save_pretrained(OUT)" in said
    with battery.quiet():
        theirs: Any = PeftModel.from_pretrained(build("mixtral", torch.float32), str(old))
        theirs.save_pretrained(str(tmp_path / "new"))
    model, other = build("mixtral", torch.float32), build("mixtral", torch.float32)
    files.load(model, tmp_path / "new")
    with torch.no_grad():
        for layer, expert in product(range(2), range(4)):
            experts = other.model.layers[layer].mlp.experts
            gate, down, up = (values[layer, expert, name] for name in shapes)
            experts.gate_up_proj[expert].add_(torch.cat([gate, up]))
            experts.down_proj[expert].add_(down)
    battery.close(battery.logits(model), battery.logits(other), 1e-5)
