"""What tests of adapter folders share: making them, with PEFT and without, and damaging them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForSequenceClassification

from afina.adapters import files
from afina.errors import AdapterError
from tests import battery

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "afina.json"
FILES = {CONFIG, WEIGHTS, RECORD, "README.md"}
Tensors = dict[str, Tensor]


def gemma3() -> Any:
    """An embedding that multiplies what it looks up by the root of the width."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": battery.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "initializer_range": 0.3, "tie_word_embeddings": False, "max_position_embeddings": 64,
    }  # fmt: skip
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).double().eval()


def classifier() -> Any:
    torch.manual_seed(0)
    config = battery.llama().config
    config.num_labels, config.pad_token_id = 3, 0
    return LlamaForSequenceClassification(config).double().eval()


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model by name, the same at every call."""
    made = {"gemma3": gemma3, "classifier": classifier}
    return made[name]().to(dtype) if name in made else battery.build(name, dtype)


def randomise(model: Any) -> None:
    """Moves every tensor that trains."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def peer(name: str, folder: Path, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Tensor:
    """Saves an adapter that PEFT made, its tensors random; returns its logits."""
    with battery.quiet():
        model: Any = get_peft_model(
            build(name, dtype), LoraConfig(**({"r": 4, "lora_alpha": 8} | settings))
        )
        randomise(model)
        model.eval().save_pretrained(str(folder))
    return battery.logits(model)


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes lines of a configuration; the value "gone" takes a line out."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | changes
    config = {k: v for k, v in config.items() if v != "gone"}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Changes the tensors of a folder."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Gives every tensor another name."""

    def change(tensors: Tensors) -> None:
        renamed = {new(key): tensor for key, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_tensors(folder, change)


def refused(folder: Path, model: Any = None) -> str:
    """The error's text; asserts that the model is bitwise as it was."""
    model = battery.build("llama", torch.float32) if model is None else model
    before = battery.picture(model)
    with pytest.raises(AdapterError) as caught:
        files.load(model, folder)
    battery.same_picture(battery.picture(model), before)
    return str(caught.value)
