"""One folder of PEFT's with a LoRA and more: rows of tokens, and biases of the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from afina.adapters import files
from afina.adapters.inspection import inspect
from afina.adapters.sources import read_source
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.bitfit import BitFit
from afina.techniques.dora import DoRA
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.trainable_tokens import TrainableTokens
from afina.tree import Technique
from tests import battery
from tests.adapters.kit import (
    CONFIG,
    WEIGHTS,
    build,
    edit_config,
    edit_tensors,
    peer,
    randomise,
    refused,
)

TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "llama_tied": ["q_proj"],
    "gpt2": ["c_attn"],
    "bert": ["query", "value"],
    "classifier": ["q_proj"],
}


def read_by_peft(name: str, folder: Path) -> torch.Tensor:
    """What PEFT makes of a folder."""
    with battery.quiet():
        model: Any = PeftModel.from_pretrained(build(name), str(folder))
    return battery.logits(model.double().eval())


# --- rows of tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
@pytest.mark.parametrize(
    "lora",
    [LoRA(rank=3, rslora=True), DoRA(rank=2), LoRA(rank=2, modules_to_save=("norm", "ln_f"))],
    ids=["lora", "dora", "whole"],
)
def test_a_lora_with_tokens_is_one_folder_that_peft_reads(
    name: str, lora: LoRA, tmp_path: Path
) -> None:
    if lora.modules_to_save:
        lora = lora.model_copy(update={"modules_to_save": ("ln_f" if name == "gpt2" else "norm",)})
    model = build(name)
    base = battery.logits(model)
    edit = apply(model, [lora, TrainableTokens(tokens=(31, 3, 22))])
    randomise(model)
    changed = battery.logits(model)
    battery.differs(changed, base)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    config = json.loads((folder / CONFIG).read_text())
    assert config["peft_type"] == "LORA"
    assert config["trainable_token_indices"] == [31, 3, 22]
    assert not [path for path in folder.iterdir() if path.is_dir()]
    battery.close(read_by_peft(name, folder), changed, 1e-6)
    again = build(name)
    loaded = files.load(again, folder)
    assert torch.equal(battery.logits(again), changed)
    assert {t.key for t in loaded.techniques} == {lora.key, "trainable_tokens"}
    assert set(files.peft_tensors(loaded)) == set(files.read_tensors(folder))
    files.restore(edit, files.read_tensors(folder))  # as a run does that goes on
    assert torch.equal(battery.logits(model), changed)
    loaded.undo()
    assert torch.equal(battery.logits(again), base)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_what_peft_wrote_is_read_and_written_again(name: str, tmp_path: Path) -> None:
    theirs = peer(
        name,
        tmp_path / "a",
        target_modules=TARGETS[name],
        trainable_token_indices=[5, 9],
    )
    model = build(name)
    edit = files.load(model, tmp_path / "a")
    battery.close(battery.logits(model), theirs, 1e-9)
    files.save(edit, tmp_path / "b", base="tiny")
    battery.close(read_by_peft(name, tmp_path / "b"), theirs, 1e-6)


def test_rows_beside_a_lora_on_the_same_embedding_are_two_folders(tmp_path: Path) -> None:
    """PEFT has no such thing; each part is as it has it."""
    model = build("llama")
    techniques: list[Technique] = [
        LoRA(rank=2, target=("embed_tokens", "q_proj")),
        TrainableTokens(tokens=(3,)),
    ]
    edit = apply(model, techniques)
    randomise(model)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    assert (folder / "lora" / CONFIG).is_file()
    again = build("llama")
    files.load(again, folder)
    assert torch.equal(battery.logits(again), battery.logits(model))


def test_with_a_third_technique_they_are_three_folders(tmp_path: Path) -> None:
    model = build("llama")
    edit = apply(model, [LoRA(rank=2), TrainableTokens(tokens=(3,)), IA3()])
    randomise(model)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [
        "ia3",
        "lora",
        "trainable_tokens",
    ]
    again = build("llama")
    files.load(again, folder)
    assert torch.equal(battery.logits(again), battery.logits(model))


# --- biases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("tokens", [None, [5, 9]], ids=["biases", "and tokens"])
def test_an_adapter_of_peft_with_biases(
    name: str, bias: str, tokens: list[int] | None, tmp_path: Path
) -> None:
    if name == "bert" and tokens:
        pytest.skip("PEFT leaves the bias of a tied head out where tokens train")
    settings = {"target_modules": TARGETS[name], "bias": bias, "trainable_token_indices": tokens}
    theirs = peer(name, tmp_path / "a", **settings)
    model = build(name)
    before = battery.picture(model)
    edit = files.load(model, tmp_path / "a")
    battery.close(battery.logits(model), theirs, 1e-9)
    keys = {technique.key for technique in edit.techniques}
    assert ("bitfit" in keys) == (name != "llama")  # which has no biases
    if name != "llama":
        edit.off("bitfit")
        assert (battery.logits(model) - theirs).abs().max() > 1e-3
        edit.on()
    files.save(edit, tmp_path / "b", base="tiny")
    again = build(name)
    files.load(again, tmp_path / "b")
    assert torch.equal(battery.logits(again), battery.logits(model))
    edit.undo()
    battery.same_picture(battery.picture(model), before)


def test_a_head_that_is_saved_whole_keeps_its_bias(tmp_path: Path) -> None:
    settings = {"target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["ln_f"]}
    theirs = peer("gpt2", tmp_path, **settings)
    model = build("gpt2")
    edit = files.load(model, tmp_path)
    battery.close(battery.logits(model), theirs, 1e-9)
    (lora,) = [t for t in edit.techniques if isinstance(t, LoRA)]
    assert lora.modules_to_save == ("transformer.ln_f",)


def test_biases_that_are_lost_or_strange_are_named(tmp_path: Path) -> None:
    peer("gpt2", tmp_path, target_modules=["c_attn"], bias="lora_only")
    key = "base_model.model.transformer.h.1.attn.c_attn.base_layer.bias"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(key))
    assert "transformer.h.1.attn.c_attn.bias: the file lacks it" in refused(tmp_path, build("gpt2"))
    assert "no such place" in refused(tmp_path, build("llama")) or "not the biases" in refused(
        tmp_path, build("llama")
    )
    edit_config(tmp_path, bias="some")
    assert "bias = 'some'" in refused(tmp_path, build("gpt2"))


def test_lora_and_bitfit_are_one_folder_of_which_peft_reads_the_lora(tmp_path: Path) -> None:
    """PEFT can train both, but reads no zero biases that a model without any gets; the LoRA is its own."""
    for name in ("gpt2", "bert"):
        model = build(name)
        edit = apply(model, [LoRA(rank=2), BitFit()])
        randomise(model)
        both = battery.logits(model)
        folder = files.save(edit, tmp_path / name, base="tiny")
        with edit.disabled("bitfit"):
            alone = battery.logits(model)
        battery.differs(alone, both)
        battery.close(read_by_peft(name, folder / "lora"), alone, 1e-6)
        with battery.quiet(), pytest.raises(Exception, match="AFINA_STACK"):
            read_by_peft(name, folder)
        with battery.quiet(), pytest.raises(Exception, match="BITFIT"):
            read_by_peft(name, folder / "bitfit")


# --- verbs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trainable_token_indices": [5, 9]}, "rows of tokens beside its LoRA"),
        ({"bias": "all"}, "biases of the base beside its LoRA"),
    ],
    ids=["tokens", "biases"],
)
def test_arithmetic_refuses_it_and_inspection_shows_it(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    peer("gpt2", tmp_path, target_modules=["c_attn"], **settings)
    edit_config(tmp_path, base_model_name_or_path="tiny")
    with pytest.raises(AdapterError, match=f"(?s){says}.*afina extract"):
        read_source(tmp_path)
    found = inspect(tmp_path)
    assert not found.strange
    count = sum(tensor.numel() for tensor in load_file(tmp_path / WEIGHTS).values())
    assert found.facts["parameters"] == count
