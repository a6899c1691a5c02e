"""A model's folder written as one GGUF file: weights a tensor at a time, and the tokenizer, whole.

| architecture | GGUF's name | what is different |
|---|---|---|
| Llama; Mistral without a sliding window | llama | the two halves of each query and key head interleaved |
| Qwen2 | qwen2 | nothing |

Tokenizers: byte-level BPE, split into words in one of the ways of `export_tokens.PRE`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors and keys from the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quant_shape_to_byte_shape, quantize
from torch import Tensor

from afina.adapters.base_files import locate
from afina.adapters.export_tokens import backend_of, pre_of, write_tokenizer
from afina.adapters.merge_shards import Stored, read_shards
from afina.errors import ModelError
from afina.models import hub

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
}
"""Transformers' class -> what GGUF calls it."""

FORMATS: Mapping[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def refuse_uncovered(model: Path, tokenizer: Path) -> None:
    """Raises for a model or tokenizer that this file cannot write; nothing is read but configurations.

    Raises:
        ModelError: saying what is covered.
    """
    config = hub.skeleton(model).config
    _arch_of(config)
    pre_of(backend_of(hub.load_tokenizer(tokenizer)))


def export(folder: Path, file: Path, dtype: str) -> None:
    """Writes the model in `folder` to `file`.

    Args:
        folder: in Hugging Face's layout, with its tokenizer.
        file: is made new.
        dtype: of matrices, a key of `FORMATS`; vectors stay fp32, as llama.cpp expects.

    Raises:
        ModelError: the model is not covered, or a value does not fit the format.
    """
    skeleton = hub.skeleton(folder)
    arch = _arch_of(skeleton.config)
    tensors = list(_tensors(skeleton, arch, folder, dtype))
    with closing(gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])) as writer:
        # Not the stem alone: Transformers takes a file named "mistral" for another architecture.
        writer.add_name(f"{file.stem} (afina)")
        _write_settings(writer, skeleton.config, dtype)
        write_tokenizer(writer, hub.load_tokenizer(folder), skeleton.config.vocab_size)
        for one in tensors:
            size, kind = one.size_bytes, one.kind
            writer.add_tensor_info(one.name, one.byte_shape, one.numpy_dtype, size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in tensors:
            writer.write_tensor_data(one.values())


# --- the model -------------------------------------------------------------------------------------------------


def _arch_of(config: Any) -> gguf.MODEL_ARCH:
    name = (config.architectures or [type(config).__name__])[0]
    arch = ARCHITECTURES.get(name)
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.hidden_size // config.num_attention_heads if arch else 0
    problems = {
        "a rotation that is scaled": rope.get("rope_type", "default") != "default",
        "a sliding window": bool(getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True),
        "biases": bool(getattr(config, "attention_bias", False))
        or bool(getattr(config, "mlp_bias", False)),
        "heads of a width of their own": arch == gguf.MODEL_ARCH.QWEN2
        and (getattr(config, "head_dim", None) or heads) != heads,
        "another activation than SiLU": getattr(config, "hidden_act", "silu") != "silu",
    }
    found = [what for what, there in problems.items() if there]
    if arch is None or found:
        raise ModelError(
            "this model cannot be written as GGUF",
            got=name if arch is None else f"{name} with {', '.join(found)}",
            wanted=f"plain {', '.join(ARCHITECTURES)}",
            cure="merge into a folder, and convert that with llama.cpp's convert_hf_to_gguf.py",
        )
    return arch


def _write_settings(writer: gguf.GGUFWriter, config: Any, dtype: str) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_file_type(FORMATS[dtype][1])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if dtype == "Q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


@dataclass(frozen=True)
class _Tensor:
    """One tensor on its way from a model's files into a GGUF file.

    Attributes:
        name: in the GGUF file.
        stored: in the model's files.
        kind: its format in the GGUF file.
        heads: of a query or key map that GGUF wants interleaved, else 0.
    """

    name: str
    stored: Stored
    kind: gguf.GGMLQuantizationType
    heads: int

    @property
    def numpy_dtype(self) -> Any:
        plain = {
            gguf.GGMLQuantizationType.F32: np.float32,
            gguf.GGMLQuantizationType.F16: np.float16,
        }
        return np.dtype(plain.get(self.kind, np.uint8))

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of what `values` gives: of a packed format in bytes."""
        if self.numpy_dtype != np.uint8:
            return self.stored.shape
        return quant_shape_to_byte_shape(self.stored.shape, self.kind)

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.byte_shape)) * self.numpy_dtype.itemsize

    def values(self) -> np.ndarray[Any, Any]:
        """The tensor in its format, made now."""
        weight = self.stored.read().to(torch.float32)
        if self.heads:
            weight = interleaved(weight, self.heads)
        numbers = weight.contiguous().numpy()
        packed = quantize(numbers, self.kind)
        if self.kind == gguf.GGMLQuantizationType.F16 and not np.isfinite(packed).all():
            raise ModelError(
                f"{self.stored.name} has values that fp16 does not hold",
                got=f"up to {np.abs(numbers).max():g}",
                wanted="at most 65504",
                cure="choose bf16 or fp32",
            )
        return packed


def interleaved(weight_OI: Tensor, heads: int) -> Tensor:
    """Rows of a query or key map in the llama architecture's order: a head's first half alternates with its second."""
    rows, columns = weight_OI.shape
    halves = weight_OI.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _tensors(skeleton: Any, arch: gguf.MODEL_ARCH, folder: Path, dtype: str) -> Iterator[_Tensor]:
    """Every tensor of the model, under GGUF's name; a tied head is left out, as GGUF has it."""
    config, shards = skeleton.config, read_shards(folder)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    located = locate(skeleton, shards)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for stored in (one for file in shards.values() for one in file):
        own = located.get(stored.name)
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(own or stored.name, try_suffixes=(".weight", ".bias"))
        if own is None or name is None:
            raise ModelError(
                "this model has a tensor that GGUF has no name for",
                got=stored.name,
                wanted=arch.name,
            )
        kind = FORMATS[dtype][0]
        if len(stored.shape) == 1:
            kind = gguf.GGMLQuantizationType.F32
        elif dtype == "Q8_0" and stored.shape[-1] % 32:
            kind = gguf.GGMLQuantizationType.F16
        turned = heads.get(own.split(".")[-2], 0) if arch == gguf.MODEL_ARCH.LLAMA else 0
        yield _Tensor(name, stored, kind, turned)
