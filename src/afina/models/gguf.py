"""GGUF file -> Hugging Face folder, once: weights dequantised to fp32, tokenizer and configs put right.

Transformers reads the file, and leaves four things wrong which are corrected here (seen with 5.24): the config stays
marked as quantised, so that `save_pretrained` raises; pad is the end token; the pre-tokenizer is a plain byte-level
one whatever the file names in `tokenizer.ggml.pre`; and the numbers keep float32's rounding of decimal constants.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import tokenizer as tokenizers_

log = logging.getLogger(__name__)

RECIPE = 1
"""Raised whenever the conversion changes, so that folders of an older one are built anew."""


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of `file` into `folder` (which exists) as safetensors and JSON.

    Raises:
        ModelError: the file is not a readable GGUF of an architecture that transformers knows.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = read_fields(file)
    where: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    tokenizers_.repair_pre(tokenizer, fields.get("tokenizer.ggml.pre"))
    tokenizers_.repair_pad(tokenizer)
    model.hf_quantizer.remove_quantization_config(model)
    for each in (model.config, model.generation_config):
        each.pad_token_id = tokenizer.pad_token_id
        each.bos_token_id = tokenizer.bos_token_id
        each.eos_token_id = tokenizer.eos_token_id
    if hasattr(model.config, "rms_norm_eps"):
        model.config.rms_norm_eps = decimal(model.config.rms_norm_eps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def decimal(value: float) -> float:
    """The short decimal that float32 rounded to `value`: 9.999999747378752e-06 was meant as 1e-05."""
    return float(f"{value:.6g}")


def read_fields(file: Path) -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(file).fields
    return {k: f.contents() for k, f in fields.items() if len(f.data) < 1000}
