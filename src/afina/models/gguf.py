"""GGUF file -> Hugging Face folder, once: weights dequantised to fp32, tokenizer and configs put right.

Transformers reads the file and leaves these wrong, which are corrected here (seen with 5.24): the model stays marked
as quantised, so that `save_pretrained` raises and trainers refuse it; pad is the end token; the pre-tokenizer is that
of GPT-2 for names it does not know; decimal constants keep float32's rounding; the longest input is not told to the
tokenizer. The chat template is kept as the file has it: the model was trained with it.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import cache, header
from .strict import check_loaded
from .tokenizer import repair_pad, repair_pre

log = logging.getLogger(__name__)

RECIPE = 2
"""Raised whenever the conversion changes, so that folders of an older one are built anew."""


def folder_of(file: Path) -> Path:
    """The converted folder of `file` in the cache, made at the first call and whenever the file has changed.

    Raises:
        ModelError: the file cannot be converted.
    """
    file = file.resolve()
    state = file.stat()
    where = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    manifest = {
        "source": str(file),
        "size_bytes": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "recipe": RECIPE,
    }
    return cache.build(f"{file.stem}-{where}", manifest, lambda folder: convert(file, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of `file` into `folder` (which exists) as safetensors and JSON.

    The weights are stored in fp32, which holds every dequantised value exactly. A tied head stays tied.

    Raises:
        ModelError: damaged file, or an architecture that transformers cannot read from GGUF.
    """
    metadata = header.read(file).metadata
    log.info("converting %s to safetensors, once", file.name)
    model, tokenizer = _read(file, metadata)
    _repair(model, tokenizer, metadata.get("tokenizer.ggml.pre"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _repair(model: Any, tokenizer: Any, pre: str | None) -> None:
    """Put right, in place, what the top of this file lists."""
    repair_pre(tokenizer, pre)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
    repair_pad(model, tokenizer)
    if hasattr(model.config, "rms_norm_eps"):
        model.config.rms_norm_eps = decimal(model.config.rms_norm_eps)
    tokenizer.model_max_length = model.config.max_position_embeddings
    _unmark(model)


def decimal(value: float) -> float:
    """The short decimal that float32 rounded to `value`: 9.999999747378752e-06 was meant as 1e-05."""
    return float(f"{value:.6g}")


def _read(file: Path, metadata: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    import transformers

    options: dict[str, Any] = {
        "gguf_file": file.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    # Releases that can keep weights in GGUF's blocks do so for some architectures unless told otherwise.
    plain = getattr(transformers, "GgufConfig", None)
    unpack = {} if plain is None else {"quantization_config": plain(dequantize=True)}
    try:
        reader: Any = transformers.AutoModelForCausalLM
        model, loaded = reader.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **options, **unpack
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    except MemoryError:
        raise
    except Exception as error:  # a reader of dozens of architectures fails in dozens of ways
        raise ModelError(
            f"transformers cannot read {file.name}",
            got=f"architecture {metadata.get('general.architecture')!r}: {type(error).__name__}: {error}",
            wanted="a causal language model of an architecture that it reads from GGUF",
            cure="use the model's Hugging Face folder or hub id instead",
        ) from error
    check_loaded(file, loaded)
    return model, tokenizer


def _unmark(model: Any) -> None:
    """The weights are plain fp32 by now: let nobody take the model for a quantised one."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
