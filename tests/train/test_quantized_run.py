"""Runs on a quantised base, from the first step to the merged model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import afina
from afina import cli
from afina.adapters import files
from afina.adapters.rounded import read_rounded
from afina.errors import AdapterError, ConfigError
from afina.ops.packed import PackedWeight, dense
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize, found_in
from afina.train.metrics import read_metrics
from tests.tiny import byte_tokenizer, save_model, tiny_gpt2, tiny_llama
from tests.train.kit import Stop, run, same, stop_after, weights

IDS = torch.tensor([[1, 70, 33, 222, 9, 4, 101, 5]])
NF4, INT8 = Quantize(), Quantize(kind="int8")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@dataclass(frozen=True)
class Trained:
    """A base's folder, and the adapter of a short run beside it quantised."""

    base: Path
    adapter: Path
    answer: Tensor
    rounded: Tensor


def trained(
    place: Path,
    quantize: Quantize,
    maker: Callable[..., Any] = tiny_llama,
    dtype: str = "fp32",
    lora: LoRA | None = None,
) -> Trained:
    """Trains a LoRA by a few steps of descent, and saves it."""
    base = save_model(place / "base", maker(), byte_tokenizer())
    model, tokenizer = afina.load(base, dtype=dtype, device="cpu", quantize=quantize)
    edit = afina.apply(model, [lora or LoRA(rank=4, target=("all-linear",))])
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    adapter = files.save(edit, place / "adapter", base=str(base), tokenizer=tokenizer)
    answer = logits(model)
    with edit.disabled():
        return Trained(base, adapter, answer, logits(model))


# --- training ------------------------------------------------------------------------------------------------------


def packed_llama(quantize: Quantize = NF4) -> Any:
    """The tiny Llama with packed weights, in fp64."""
    model = tiny_llama()
    afina.apply(model, [quantize])
    return model


def test_a_run_learns_and_its_base_stays(tmp_path: Path) -> None:
    model = packed_llama()
    before = {n: dense(p).clone() for n, p in model.named_parameters()}
    found = run(tmp_path / "run", model=model, steps=30, lr=3e-2)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert found.weights == tmp_path / "run" / "adapter"
    assert all(torch.equal(dense(model.get_parameter(n)), value) for n, value in before.items())


def test_a_run_that_dies_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = {"steps": 6, "save_every": 2}
    whole = run(tmp_path / "whole", model=packed_llama(), **settings)
    with pytest.raises(Stop):
        run(tmp_path / "run", model=packed_llama(), options={"seams": stop_after(5)}, **settings)
    again = run(tmp_path / "run", model=packed_llama(), options={"resume": True}, **settings)
    assert same(weights(again), weights(whole))
    other = run(tmp_path / "other", model=packed_llama(INT8), **settings)
    assert not same(weights(other), weights(whole))


def test_another_rounding_is_another_run(tmp_path: Path) -> None:
    settings = {"steps": 6, "save_every": 2}
    with pytest.raises(Stop):
        run(tmp_path / "run", model=packed_llama(), options={"seams": stop_after(5)}, **settings)
    with pytest.raises(afina.AfinaError, match="technique"):
        run(tmp_path / "run", model=packed_llama(INT8), options={"resume": True}, **settings)
    with pytest.raises(afina.AfinaError, match="technique"):
        run(tmp_path / "run", model=tiny_llama(), options={"resume": True}, **settings)


# --- saving and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [NF4, INT8], ids=lambda q: q.kind)
def test_the_adapter_is_an_ordinary_one_that_says_what_it_was_trained_beside(
    tmp_path: Path, quantize: Quantize
) -> None:
    made = trained(tmp_path, quantize)
    config = json.loads((made.adapter / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == str(made.base)
    record = json.loads((made.adapter / "afina.json").read_text())
    assert record["techniques"][0] == {"quantize": quantize.model_dump(mode="json")}
    assert record["base"]["quantised_from"] == "float32"
    rounded = read_rounded(made.adapter)
    assert rounded is not None
    assert (rounded.technique, rounded.dtype) == (quantize, torch.float32)


def test_loaded_beside_the_same_base_it_answers_the_same(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4)
    model, _ = afina.load(made.base, dtype="fp32", device="cpu", quantize=NF4)
    edit = afina.load_adapter(model, made.adapter)
    assert torch.equal(logits(model), made.answer)
    assert [t.key for t in edit.techniques] == ["quantize", "lora"]
    with edit.disabled():
        assert torch.equal(logits(model), made.rounded)
    edit.undo()
    assert found_in(model) == NF4


def test_loaded_beside_the_whole_base_it_says_so(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4)
    model, _ = afina.load(made.base, dtype="fp32", device="cpu")
    edit = afina.load_adapter(model, made.adapter)
    assert any("quantised" in note and "Quantize(" in note for note in edit.notes)
    assert not torch.equal(logits(model), made.answer)


@pytest.mark.parametrize("damage", ["kind", "dtype"])
def test_a_record_that_does_not_say_how_is_refused(tmp_path: Path, damage: str) -> None:
    made = trained(tmp_path, NF4)
    file = made.adapter / "afina.json"
    record = json.loads(file.read_text())
    if damage == "kind":
        record["techniques"][0]["quantize"]["kind"] = "nf5"
    else:
        record["base"].pop("quantised_from")
    file.write_text(json.dumps(record))
    with pytest.raises(AdapterError, match="how its base was quantised"):
        read_rounded(made.adapter)


def test_a_peft_adapter_fits_a_quantised_base(tmp_path: Path) -> None:
    """Without a record of ours: as PEFT writes one after QLoRA."""
    made = trained(tmp_path, NF4)
    (made.adapter / "afina.json").unlink()
    model, _ = afina.load(made.base, dtype="fp32", device="cpu", quantize=NF4)
    afina.load_adapter(model, made.adapter)
    assert torch.equal(logits(model), made.answer)
    assert read_rounded(made.adapter) is None


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"{n * n}"} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_of(place: Path, data: Path, *more: str) -> Path:
    base = save_model(place / "base", tiny_llama(), byte_tokenizer())
    words = ["train", str(base), str(data), "-o", str(place / "run"), "--steps", "4"]
    words += ["--technique", "quantize", "--technique", "lora", "--set", "train.device=cpu"]
    assert cli.main([*words, "--set", "techniques.lora.rank=2", *more]) == 0
    return place / "run"


def kind(quantize: Any) -> Quantize:
    return getattr(quantize, "technique", quantize)


def test_the_verbs_quantise_the_base_as_the_run_did(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads: list[Any] = []
    from afina.models import hub

    right = hub.load

    def load(*args: Any, **kwargs: Any) -> Any:
        loads.append(kwargs.get("quantize"))
        return right(*args, **kwargs)

    monkeypatch.setattr(hub, "load", load)
    caplog.set_level(logging.ERROR)
    out = run_of(tmp_path, data)
    assert [kind(q) for q in loads] == [NF4]
    assert read_rounded(out / "adapter") is not None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say 3"}\n')
    answers = str(tmp_path / "answers.jsonl")
    assert cli.main(["generate", str(out), str(prompts), "-o", answers]) == 0
    assert cli.main(["eval", str(out), str(data)]) == 0
    assert [kind(q) for q in loads] == [NF4] * 3
    assert cli.main(["check", "-c", str(out / "config.yaml"), "-o", str(tmp_path / "new")]) == 0
    assert [kind(q) for q in loads] == [NF4] * 4


def test_weights_are_unpacked_where_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from afina.cli.loading import Source, load_source
    from afina.train import memory

    made = trained(tmp_path, NF4)
    source = Source(str(made.adapter), dtype="fp32", device="cpu")
    answers = []
    for free, packed in ((10**12, 0), (100, 14), (None, 14)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        model = load_source(source).model
        assert sum(isinstance(p, PackedWeight) for p in model.parameters()) == packed
        answers.append(logits(model))
    assert all(torch.equal(answer, made.answer) for answer in answers)


def test_nothing_but_quantize_is_refused_with_what_to_add(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    words = ["train", str(base), str(data), "-o", str(tmp_path / "run"), "--technique", "quantize"]
    assert cli.main(words) != 0
    said = capsys.readouterr().err
    assert "nothing would train" in said
    assert "--technique lora" in said


def test_an_adapter_to_start_from_keeps_the_quantised_base(tmp_path: Path, data: Path) -> None:
    first = run_of(tmp_path, data)
    words = ["train", str(tmp_path / "base"), str(data), "-o", str(tmp_path / "next")]
    words += ["--steps", "2", "--set", "train.device=cpu", "--init-from", str(first)]
    assert cli.main([*words, "--technique", "quantize"]) == 0
    assert read_rounded(tmp_path / "next/adapter") == read_rounded(first / "adapter")
    assert cli.main([*words[:4], str(tmp_path / "whole"), *words[5:]]) == 0
    assert read_rounded(tmp_path / "whole/adapter") is None


# --- merging --------------------------------------------------------------------------------------------------------

UNCHECKED = afina.MergeSettings(verify=False)
CHECKED = afina.MergeSettings(max_new_tokens=0, device="cpu")


@pytest.mark.parametrize("quantize", [NF4, INT8, Quantize(exclude=("down_proj",))], ids=str)
def test_it_is_merged_into_the_rounded_base(tmp_path: Path, quantize: Quantize) -> None:
    made = trained(tmp_path, quantize)
    merged = afina.merge(made.adapter, tmp_path / "out", settings=CHECKED, prompts=["one", "two"])
    assert merged.verified
    assert any(quantize.kind in note for note in merged.record["notes"])
    model, _ = afina.load(tmp_path / "out", dtype="fp32", device="cpu")
    assert found_in(model) is None
    assert (logits(model) - made.answer).abs().max() < 1e-4
    assert (logits(model) - made.rounded).abs().max() > 1e-2


def test_weights_without_a_change_are_the_rounded_ones_too(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4, lora=LoRA(rank=4, target=("q_proj",)))
    afina.merge(made.adapter, tmp_path / "out", settings=UNCHECKED)
    tensors = load_file(tmp_path / "out/model.safetensors")
    base = load_file(made.base / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], tensors[name])}
    model, _ = afina.load(made.base, dtype="fp32", device="cpu")
    assert changed == set(NF4.weights(model))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors[name], dense(NF4.packed(base[name], name)))


def test_a_conv1d_is_merged_as_it_is_stored(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4, maker=tiny_gpt2)
    afina.merge(made.adapter, tmp_path / "out", settings=CHECKED, prompts=["one", "two"])
    model, _ = afina.load(tmp_path / "out", dtype="fp32", device="cpu")
    assert (logits(model) - made.answer).abs().max() < 1e-4


def test_a_base_that_was_rounded_to_bf16_before_is_so_in_the_merge(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4, dtype="bf16", lora=LoRA(rank=4, target=("q_proj",)))
    afina.merge(made.adapter, tmp_path / "out", settings=CHECKED, prompts=["one", "two"])
    tensors = load_file(tmp_path / "out/model.safetensors")
    model, _ = afina.load(made.base, dtype="bf16", device="cpu", quantize=NF4)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(tensors[name], dense(model.get_parameter(name)).float())


def test_a_merge_into_the_whole_base_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the check is for."""
    from afina.adapters import merge_files

    made = trained(tmp_path, NF4)
    monkeypatch.setattr(merge_files, "read_rounded", lambda folder: None)
    with pytest.raises(AdapterError, match="NOT VERIFIED"):
        afina.merge(made.adapter, tmp_path / "out", settings=CHECKED, prompts=["one", "two"])


@pytest.mark.parametrize("dtype", ["nf4", "int4", "4bit", "q4_0", "int8"])
def test_merging_into_few_bits_is_refused_with_the_reason(tmp_path: Path, dtype: str) -> None:
    made = trained(tmp_path, NF4)
    settings = afina.MergeSettings(dtype=dtype, verify=False)
    with pytest.raises(ConfigError, match="not merged into few bits") as caught:
        afina.merge(made.adapter, tmp_path / "out", settings=settings)
    assert "bf16" in str(caught.value.cure)
    assert not (tmp_path / "out").exists()


def test_merging_in_memory_gives_whole_weights(tmp_path: Path) -> None:
    made = trained(tmp_path, NF4)
    model, _ = afina.load(made.base, dtype="fp32", device="cpu", quantize=NF4)
    edit = afina.load_adapter(model, made.adapter)
    edit.merge()
    assert (logits(model) - made.answer).abs().max() < 1e-4
    assert not any(isinstance(p, PackedWeight) for p in model.parameters())
    edit.unmerge()
    assert torch.equal(logits(model), made.answer)


def test_why_few_bits_are_refused() -> None:
    """Rounding the sum again loses most of a small change: the reason, in numbers."""
    draw = torch.Generator().manual_seed(0)
    base = dense(NF4.packed(torch.randn(256, 256, generator=draw) * 0.02, "w"))
    change = torch.randn(256, 4, generator=draw) @ torch.randn(4, 256, generator=draw) * 2e-4
    again = dense(NF4.packed(base + change, "w")) - base
    assert (again - change).norm() > change.norm()  # nearer to no change than to this one
