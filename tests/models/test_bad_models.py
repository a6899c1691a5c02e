"""A model's folder that is damaged, incomplete, dangerous or something else is refused by name, with a cure."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from afina.errors import ModelError
from afina.models.hub import load
from afina.models.weights import read_header
from tests.tiny import byte_tokenizer, tiny_llama

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_llama(dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


Change = Callable[[Path], Any]


def config(**values: Any) -> Change:
    """Sets values of config.json; None takes one out."""

    def change(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text()) | values
        kept = {name: value for name, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def raw(change: Callable[[bytes], bytes], name: str = FILE) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def header(change: Callable[[dict[str, Any], int], Any]) -> Change:
    """Changes the header of the weights, given it and the size of what follows."""

    def whole_file(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        entries, body = json.loads(content[8 : 8 + length]), content[8 + length :]
        change(entries, len(body))
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + body

    return raw(whole_file)


def entry(**values: Any) -> Change:
    return header(lambda entries, _: entries[NAME].update(values))


def weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def save(folder: Path) -> None:
        save_file(change(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})

    return save


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def sharded(shard: str, index: Any = None) -> Change:
    """One shard under its usual name, and an index that says it is in `shard`."""

    def change(folder: Path) -> None:
        names = list(load_file(folder / FILE))
        (folder / FILE).rename(folder / "model-00001-of-00001.safetensors")
        table = (
            {"metadata": {}, "weight_map": dict.fromkeys(names, shard)} if index is None else index
        )
        (folder / INDEX).write_text(json.dumps(table))

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


BAD: dict[str, tuple[Change, list[str]]] = {
    "no weights": (without(FILE), ["holds no safetensors weights", "no weights at all", "download the weights too"]),
    "no config": (without("config.json"), ["holds no config.json", "cure:   copy config.json of the original model"]),
    "no config and pickles": (
        both(without(FILE, "config.json"), text("pytorch_model.bin", "x")), ["copy config.json of the original model"]),
    "a tokenizer alone": (without(FILE, "config.json"), ["check the path; a model folder holds config.json"]),
    "rows": (both(without(FILE, "config.json"), text("rows.jsonl", "{}")), ["the model comes first"]),
    "pickles": (
        both(without(FILE), text("pytorch_model.bin", "x")), ["no safetensors weights", "model.bin", "can run"]),
    "weights of another name": (
        lambda folder: (folder / FILE).rename(folder / "w.safetensors"), ["another name", "rename w.safetensors to"]),
    "empty weights": (raw(lambda _: b""), ["model.safetensors is not a whole safetensors file", "0 bytes"]),
    "a few bytes": (raw(lambda content: content[:5]), ["5 bytes, of which its header"]),
    "cut in the header": (raw(lambda content: content[:300]), ["300 bytes, of which its header is said to take 2,"]),
    "cut short": (
        raw(lambda content: content[:-100]), ["cut short by 100 bytes; model.norm.weight ends at 128,640", "again"]),
    "something after it": (raw(lambda content: content + b"xy"), ["128,642 bytes of tensors", "ends at 128,640"]),
    "a header without end": (raw(lambda content: struct.pack("<Q", 2**60) + content[8:]), ["1,152,921,504,606,846,97"]),
    "a shorter header": (raw(lambda content: struct.pack("<Q", 99) + content[8:]), ["a header that is not JSON"]),
    "no object": (raw(lambda _: struct.pack("<Q", 2) + b"[]"), ["a header that is not a JSON object"]),
    "an empty file of weights": (
        raw(lambda _: struct.pack("<Q", 2) + b"{}"), ["21 tensors of the model are not in its file", NAME[:12]]),
    "no metadata": (
        header(lambda entries, _: entries.update(__metadata__={"a": 1})), ["metadata that is no table of texts"]),
    "offsets that overlap": (entry(data_offsets=[0, 4096]), ["at byte 0 overlaps"]),
    "offsets beyond the end": (
        header(lambda entries, size: entries[NAME].update(data_offsets=[size, size + 4096])), ["leaves a gap after"]),
    "offsets backwards": (entry(data_offsets=[4096, 0]), [f"{NAME}: F32 of shape [32, 32] in -4,096 bytes"]),
    "offsets that are none": (entry(data_offsets="0"), [f"{NAME} of shape [32, 32] at 0", "lists of whole numbers"]),
    "a dtype that lies": (entry(dtype="F16"), [f"{NAME}: F16 of shape [32, 32] in 4,096 bytes", "2,048 bytes for it"]),
    "a dtype nobody knows": (entry(dtype="B16"), [f"{NAME} of dtype 'B16'", "BF16"]),
    "a shape that lies": (entry(shape=[32, 31]), [f"{NAME}: F32 of shape [32, 31] in 4,096 bytes"]),
    "a shape of less than nothing": (entry(shape=[-32, -32]), ["lists of whole numbers"]),
    "whole numbers": (
        weights(lambda found: found | {NAME: found[NAME].to(torch.int32)}), ["stored as whole numbers", NAME, "I32"]),
    "another shape": (
        weights(lambda found: found | {NAME: torch.zeros(31, 32)}),
        ["1 tensor of the model is not in its file", f"{NAME} ((31, 32) where the config says (32, 32))"]),
    "a tensor missing": (
        weights(lambda found: {name: tensor for name, tensor in found.items() if name != NAME}),
        ["1 tensor of the model is not in its file", NAME]),
    "fewer blocks": (
        config(num_hidden_layers=1), ["fewer blocks than the weights have", "model.layers.1.", "8 more tensors"]),
    "more blocks": (config(num_hidden_layers=3), ["9 tensors of the model are not in its file", "layers.2"]),
    "a width that is not said": (config(hidden_size=None), ["where the config says (260, 4096)"]),
    "another architecture": (
        config(model_type="foo"), ["names no model type that the installed transformers knows", "'foo'", "upgrade"]),
    "no model type": (config(model_type=None), ["names no model type", "no model_type", "that of an adapter"]),
    "a model type of no text": (config(model_type=5), ["names no model type", "model_type 5"]),
    "code of its own": (
        config(model_type="foo", auto_map={"AutoConfig": "configuration_foo.Foo"}),
        ["code of its own, which afina never runs", "configuration_foo.py"]),
    "architectures": (config(architectures=5), ["architectures is no list of names"]),
    "config of no JSON": (text("config.json", "{bad"), ["config.json is not a JSON object", "line 1 column 2"]),
    "config of another kind": (text("config.json", "[1]"), ["config.json is not a JSON object", "a list"]),
    "empty config": (text("config.json", ""), ["config.json is not a JSON object"]),
    "nested config": (text("config.json", "[" * 9999), ["config.json is not a JSON object"]),
    "a binary config": (raw(lambda _: b"\xff\xfe\x00", "config.json"), ["config.json is not a JSON object"]),
    "a text for a number": (config(hidden_size="abc"), ["cannot read the model's config", "expected int, got str"]),
    "no head at all": (config(num_attention_heads=0), ["cannot read the model's config.json", "modulo by zero"]),
    "a negative width": (config(hidden_size=-4), ["cannot be loaded as a model", "negative dimension"]),
    "an unheard-of function": (config(hidden_act="nope"), ["cannot be loaded as a model", "KeyError: 'nope'"]),
    "generation settings": (text("generation_config.json", "{"), ["generation_config.json is not a JSON object"]),
    "an index of no JSON": (
        both(sharded("x"), text(INDEX, "{bad")), [f"{INDEX} is not a JSON object", "line 1 column 2"]),
    "an index of nothing": (sharded("", {"weight_map": {}}), [f"{INDEX} names no file"]),
    "an index without map": (sharded("", {"a": 1}), [f"{INDEX} has no weight_map"]),
    "a shard missing": (
        sharded("model-00002-of-00002.safetensors"),
        ["a file of weights is missing: model-00002-of-00002.safetensors", "without 21 tensors"]),
    "a shard outside": (sharded("../whole/model.safetensors"), ["files outside the model's folder", "../whole"]),
    "a shard anywhere": (sharded("/etc/passwd"), ["files outside the model's folder", "/etc/passwd"]),
    "a shard without its tensors": (
        sharded("", {"weight_map": {"nowhere": "model-00001-of-00001.safetensors"}}),
        ["names 1 tensor that no file holds", "nowhere"]),
    "no tokenizer": (
        without("tokenizer.json", "tokenizer_config.json"), ["tokenizer cannot be loaded", "copy the tokenizer files"]),
    "a tokenizer without vocabulary": (
        both(without("tokenizer.json"), text("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}')),
        ["tokenizer has no vocabulary", "none of tokenizer.json, tokenizer.model"]),
    "a damaged tokenizer": (text("tokenizer.json", "{bad"), ["tokenizer cannot be loaded", "line 1 column 2"]),
    "a tokenizer of nothing": (text("tokenizer.json", "{}"), ["tokenizer cannot be loaded", "KeyError"]),
    "a tokenizer of an odd model": (
        text("tokenizer.json", '{"added_tokens": [], "model": {"type": "Odd"}}'), ["tokenizer cannot be loaded"]),
    "tokenizer settings": (text("tokenizer_config.json", "nope"), ["tokenizer cannot be loaded"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    change, said = BAD[name]
    folder = shutil.copytree(whole, tmp_path / "model")
    change(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelError) as caught:
        load(folder, "fp32", "cpu")
    for words in said:
        assert words in str(caught.value)
    assert caught.value.cure
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


GOOD: dict[str, Change] = {
    "as it is": lambda folder: None,
    "shards": sharded("model-00001-of-00001.safetensors"),
    "a pickle beside": text("pytorch_model.bin", "x"),
    "a tokenizer class nobody knows": text("tokenizer_config.json", '{"tokenizer_class": "Odd"}'),
    "no generation settings": without("generation_config.json"),
    "a byte-order mark": raw(lambda content: b"\xef\xbb\xbf" + content, "generation_config.json"),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_checks_refuse_nothing_that_is_well(name: str, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    GOOD[name](folder)
    model, _ = load(folder, "fp32", "cpu")
    assert torch.equal(model.lm_head.weight, load_file(whole / FILE)["lm_head.weight"])


def test_tensors_without_a_place_are_said(whole: Path, tmp_path: Path, caplog: Any) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    weights(lambda found: found | {"visual.extra.weight": torch.zeros(2)})(folder)
    load(folder, "fp32", "cpu")
    assert "1 tensor without a place in the model, left out: visual.extra.weight" in caplog.text


def test_the_header_is_read_as_the_library_reads_it(whole: Path) -> None:
    found = read_header(whole / FILE)
    tensors = load_file(whole / FILE)
    assert {name: one.shape for name, one in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert {one.dtype for one in found.values()} == {"F32"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "book.txt"])
def test_data_in_the_place_of_a_model_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(ModelError) as caught:
            load(place)
        assert "the model comes first, as in afina train MODEL DATA" in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "~nobody-here/model"])
def test_names_that_no_folder_can_have(name: str) -> None:
    with pytest.raises(ModelError):
        load(name, offline=True)


@pytest.mark.parametrize("name", ["with space", "ação 漢字", "-dash", "[x]*"])
def test_odd_names_are_names(name: str, whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(whole, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    model, _ = load(name, "fp32", "cpu")
    assert model.config.vocab_size == 260


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        (
            "https://huggingface.co/owner/a-model.v1/tree/main",
            "name it as the hub does: owner/a-model.v1",
        ),
        ("https://example.org/model.gguf", "download it first"),
        ("./nowhere", "the working directory is"),
    ],
)
def test_an_address_is_no_path(name: str, cure: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        load(name)
    assert cure in str(caught.value)
