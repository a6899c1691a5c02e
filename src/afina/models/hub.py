"""From what the user names to a model in memory: a folder, a hub id, a GGUF file, or a demo name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import demo


def resolve(source: str | Path) -> Path:
    """The local folder of `source`."""
    if str(source) in demo.DEMOS:
        return demo.fetch(str(source))
    return Path(source)


def load(source: str | Path, dtype: Any = None, device: Any = None) -> tuple[Any, Any]:
    """The model and tokenizer of `source`."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, AutoConfig

    folder = resolve(source)
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if "CausalLM" in config.architectures[0] else AutoModel
    model = kind.from_pretrained(folder, dtype=dtype or torch.float32, use_safetensors=True)
    return model, AutoTokenizer.from_pretrained(folder)
