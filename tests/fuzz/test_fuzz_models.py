"""Headers of weights, GGUF files, config.json and adapters: whatever the bytes, a model or an error of ours."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from transformers import LlamaConfig

from afina.adapters import files
from afina.adapters.target import resolve_run
from afina.errors import ModelError
from afina.models import header
from afina.models.folder import check_folder
from afina.models.weights import read_header
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery
from tests.fuzz.kit import VALUES, fuzz, mutated, result_or_error, texts

TENSORS = {
    "a.weight": torch.ones(2, 3),
    "b": torch.zeros(0),
    "c.bias": torch.ones(4, dtype=torch.bfloat16),
}
WEIGHTS = [save(TENSORS, metadata={"format": "pt"}), save({}), save({"x": torch.ones(1)})]


def with_header(text: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + body


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F4", "I64", "BOOL", "X"]) | VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3) | VALUES,
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRY | VALUES, max_size=3)
LYING = st.builds(
    with_header, HEADERS.map(lambda entries: json.dumps(entries).encode()), st.binary(max_size=24)
)


@fuzz(400)
@given(content=mutated(WEIGHTS) | LYING)
def test_headers_of_weights(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    found = result_or_error(lambda: read_header(path))
    if found is not None:  # then the library takes it too, and sees the same
        with safe_open(path, "pt") as theirs:
            assert set(theirs.keys()) == set(found)
            for name, one in found.items():
                assert tuple(theirs.get_slice(name).get_shape()) == one.shape


@fuzz(100)
@given(content=mutated(WEIGHTS, most=3))
def test_what_the_library_takes_is_taken(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        with safe_open(path, "pt") as theirs:
            names = set(theirs.keys())
    except Exception:
        with pytest.raises(ModelError):
            read_header(path)
    else:
        assert set(read_header(path)) == names


def small_gguf(folder: Path) -> bytes:
    path = folder / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("x", 1.5)
    writer.add_tensor("a", numpy.ones((2, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@fuzz(400)
@given(drawn=st.data())
def test_gguf(tmp_path_factory: Any, drawn: Any) -> None:
    place = tmp_path_factory.getbasetemp()
    if not (place / "small.gguf").exists():
        small_gguf(place)
    whole = (place / "small.gguf").read_bytes()
    path = place / "fuzzed.gguf"
    path.write_bytes(drawn.draw(mutated([whole, whole[:64], b"GGUF"])))
    found = result_or_error(lambda: header.read(path))
    assert found is None or found.end_bytes <= path.stat().st_size


CONFIG = (
    LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    .to_json_string()
    .encode()
)


@fuzz(100)
@given(
    config=mutated([CONFIG]) | VALUES.map(lambda value: json.dumps(value).encode()),
    index=mutated([b'{"weight_map": {"a": "b"}}']),
)
def test_folders(tmp_path_factory: Any, config: bytes, index: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors.index.json").write_bytes(index)
    result_or_error(lambda: check_folder(folder))
    result_or_error(lambda: resolve_run(str(folder)))


ADAPTER_KEYS = st.sampled_from(["r", "lora_alpha", "target_modules", "peft_type", "rank_pattern", "alpha_pattern",
                                "modules_to_save", "bias", "use_rslora", "layers_to_transform", "lora_dropout",
                                "base_model_name_or_path", "task_type", "exclude_modules", "fan_in_fan_out",
                                "zzz"])  # fmt: skip


@fuzz(40)
@given(
    changes=st.dictionaries(ADAPTER_KEYS, VALUES | st.lists(texts(8), max_size=2), max_size=3),
    text=st.none() | mutated([b'{"peft_type": "LORA", "r": 4}']),
    cut=st.none() | st.integers(0, 200),
    name=st.none() | texts(12),
)
def test_adapters(tmp_path_factory: Any, changes: Any, text: Any, cut: Any, name: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-adapter"
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not (folder / "whole").exists():
        edit = apply(battery.build("llama"), [LoRA(rank=2, target=("q_proj",))])
        files.save(edit, folder, base="somewhere")
        (folder / "whole").write_bytes(weights.read_bytes())
        (folder / "config").write_bytes(config.read_bytes())
    settings = json.loads((folder / "config").read_text())
    config.write_bytes(json.dumps(settings | changes).encode() if text is None else text)
    weights.write_bytes((folder / "whole").read_bytes()[:cut])
    if name is not None:
        save_file({name: torch.ones(2, 16)}, weights)
    model = battery.build("llama")
    before = set(dict(model.named_modules()))
    result_or_error(lambda: resolve_run(str(folder)))
    edit = result_or_error(lambda: files.load(model, folder))
    if edit is None:
        assert set(dict(model.named_modules())) == before  # nothing of it stays
