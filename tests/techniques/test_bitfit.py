"""BitFit: which biases train, what is added to a model without any, its files, and merging that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from afina.adapters import files
from afina.adapters.merge import merge_unchecked
from afina.adapters.merge_job import MergeSettings
from afina.errors import AdapterError, TechniqueError
from afina.models import hub
from afina.table import apply
from afina.techniques.bitfit import BitFit, BitFitDelta
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.tree.biases import settings_for
from tests import battery
from tests.adapters.kit import edit_tensors, randomise
from tests.tiny import byte_tokenizer, save_model, tiny_gpt2, tiny_llama
from tests.train import kit

IDS = torch.arange(9)[None]


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def qwen2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "bos_token_id": None,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**sizes)).double().eval()


def test_biases_that_are_there_train_where_they_are_and_only_others_are_added() -> None:
    model = battery.build("gpt2")
    edit = apply(model, [BitFit()])
    assert not edit.deltas
    every = {n for n, _ in model.named_parameters() if n.endswith(".bias")}
    assert set(edit.in_place) == every
    bare = apply(battery.build("llama"), [BitFit()])
    assert not bare.in_place
    assert len(bare.deltas) == 14
    assert all(not delta.get_parameter("bias").any() for delta in bare.deltas.values())
    both = apply(qwen2(), [BitFit()])
    tails = {n.split(".")[-2] for n in both.in_place}
    assert tails == {"q_proj", "k_proj", "v_proj"}
    assert {n.split(".")[-2] for n in both.deltas} == {
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_layers_and_norms() -> None:
    def places(model: str, **settings: Any) -> set[str]:
        return set(BitFit(**settings).places(battery.build(model)))

    last = places("bert", layers="-1")
    assert last
    assert all(name.startswith("bert.encoder.layer.1.") for name in last)
    assert "bert.embeddings.LayerNorm" in places("bert")
    assert places("gpt2", target=("norms",), layers="0") == {
        f"transformer.h.0.ln_{i}" for i in (1, 2)
    }
    with pytest.raises(TechniqueError, match="nothing is left"):
        places("llama", target=("norms",))


def test_a_child_adds_its_bias() -> None:
    model = battery.build("llama")
    edit = apply(model, [BitFit()])
    randomise(model)
    module = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 16, dtype=torch.float64)
    battery.close(module(x), x @ module.weight.t() + module.bitfit.bias)
    (gradient,) = torch.autograd.grad(module(x).sum(), module.bitfit.bias)
    assert torch.equal(gradient, torch.full_like(gradient, 3.0))
    assert isinstance(edit.deltas["model.layers.0.self_attn.q_proj.bitfit"], BitFitDelta)


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "llama_tied"])
def test_it_is_saved_and_loaded_and_refused_by_peft(name: str, tmp_path: Path) -> None:
    model = battery.build(name)
    whole = ("lm_head",) if name.startswith("llama") else ()
    edit = apply(model, [BitFit(modules_to_save=whole)])
    battery.train(model, edit)
    files.save(edit, tmp_path / "a", base="tiny")
    other = battery.build(name)
    loaded = files.load(other, tmp_path / "a")
    battery.differs(battery.logits(other), battery.base_logits(name))
    assert torch.equal(battery.logits(other), battery.logits(model))
    assert list(loaded.trainable()) == list(edit.trainable())
    with pytest.raises(Exception, match="BITFIT"):
        PeftModel.from_pretrained(battery.build(name), str(tmp_path / "a"))


def test_a_file_is_read_strictly(tmp_path: Path) -> None:
    first = "base_model.model.model.layers.0.mlp.up_proj.bias"
    changes: dict[str, Any] = {
        "the file lacks it": lambda t: t.pop(first),
        "no such place": lambda t: t.update({f"{first}2": torch.ones(2)}),
        "the model wants": lambda t: t.update({first: torch.ones(3)}),
    }
    edit = apply(battery.build("llama"), [BitFit()])
    for said, change in changes.items():
        folder = files.save(edit, tmp_path / "a", base="tiny")
        edit_tensors(folder, change)
        with pytest.raises(AdapterError, match=said):
            files.load(battery.build("llama"), folder)


# --- merging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("q_proj",), ("all-linear",), ("down_proj", "k_proj")])
def test_a_merged_model_is_saved_with_the_settings_that_give_it_its_biases(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = battery.build("llama")
    edit = apply(model, [BitFit(target=targets), LoRA(rank=2)])
    randomise(model)
    changed = battery.logits(model)
    edit.merge()
    edit.unmerge()
    assert not model.config.attention_bias
    assert not model.config.mlp_bias
    assert model.model.layers[0].self_attn.q_proj.bias is None
    battery.fold(edit)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(battery.logits(again), battery.logits(model))
    battery.close(battery.logits(again), changed, 1e-5)
    assert again.config.attention_bias is any("down" not in t for t in targets)
    assert again.config.mlp_bias is (targets != ("q_proj",))


@pytest.mark.parametrize(
    "make", [qwen2, lambda: battery.build("mixtral")], ids=["qwen2", "mixtral"]
)
def test_a_model_that_has_no_setting_for_them_is_not_merged(make: Any) -> None:
    """Control: without the refusal, the biases are gone when the model is loaded again."""
    model = make()
    before = battery.picture(model)
    edit = apply(model, [BitFit(target=("o_proj",))])
    with pytest.raises(TechniqueError, match="cannot be merged: no setting"):
        edit.merge()
    edit.undo()
    battery.same_picture(battery.picture(model), before)


def test_the_settings_are_found_on_a_skeleton() -> None:
    names = ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.bias"]
    found = settings_for(battery.build("llama"), names)
    assert found.settings == {"attention_bias": True, "mlp_bias": True}
    assert len(found.zero) == 12
    assert not set(found.zero) & set(names)
    assert settings_for(battery.build("llama"), []).settings == {}


@pytest.mark.parametrize(
    ("make", "others"),
    [(tiny_llama, ()), (tiny_llama, (LoRA(rank=2), IA3())), (tiny_gpt2, ())],
    ids=["llama", "llama with LoRA and IA3", "gpt2"],
)
def test_merged_on_disk(make: Any, others: tuple[Any, ...], tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", make(), byte_tokenizer())
    model, _ = hub.load(base, dtype="fp32", device="cpu")
    edit = apply(model, [BitFit(target=("all-linear",), exclude=("*.0.*",)), *others])
    randomise(model)
    changed = answer(model)
    files.save(edit, tmp_path / "adapter", base=str(base))
    settings = MergeSettings(max_new_tokens=0, compute_dtype="fp32")
    made = merge_unchecked(tmp_path / "adapter", tmp_path / "merged", settings=settings)
    assert made.verified, made.verdict
    merged, _ = hub.load(tmp_path / "merged", dtype="fp32", device="cpu")
    battery.close(answer(merged), changed, 1e-5)
    edit.undo()
    battery.differs(answer(model), changed)
    config = json.loads((tmp_path / "merged/config.json").read_text(encoding="utf-8"))
    assert config.get("mlp_bias") is (True if make is tiny_llama else None)
    if make is tiny_llama:
        assert not merged.model.layers[0].mlp.up_proj.bias.any()


def test_the_report_of_a_merge_is_of_biases_and_their_rounding(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    model, _ = hub.load(base, dtype="fp32", device="cpu")
    edit = apply(model, [BitFit(target=("q_proj",))])
    randomise(model)
    files.save(edit, tmp_path / "adapter", base=str(base))
    settings = MergeSettings(max_new_tokens=0, compute_dtype="fp32", dtype="bf16")
    merge_unchecked(tmp_path / "adapter", tmp_path / "merged", settings=settings)
    found = json.loads((tmp_path / "merged/merge.json").read_text(encoding="utf-8"))["rounding"]
    wanted = {
        f"{name}.bias": delta.bias.detach()
        for name, delta in ((n.rpartition(".")[0], d) for n, d in edit.deltas.items())
        if isinstance(delta, BitFitDelta)
    }
    assert set(found) == set(wanted)
    for name, bias in wanted.items():
        lost = float((bias - bias.bfloat16()).norm() / bias.norm())
        assert found[name] == pytest.approx(lost, rel=1e-5)
        assert lost > 1e-4


def test_on_disk_too_a_model_without_a_setting_is_refused(tmp_path: Path) -> None:
    model = qwen2()
    model.config.vocab_size = 40
    base = tmp_path / "base"
    model.float().save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    edit = apply(model, [BitFit()])
    randomise(model)
    files.save(edit, tmp_path / "adapter", base=str(base))
    settings = MergeSettings(verify=False)
    with pytest.raises(AdapterError, match="no setting of this model's configuration"):
        merge_unchecked(tmp_path / "adapter", tmp_path / "merged", settings=settings)
    assert not (tmp_path / "merged").exists()


def test_resume_is_bitwise(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 1}
    whole = kit.run(tmp_path / "whole", BitFit(), **settings)
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "run", BitFit(), options={"seams": kit.stop_after(2)}, **settings)
    rest = kit.run(tmp_path / "run", BitFit(), options={"resume": True}, **settings)
    assert kit.same(kit.weights(whole), kit.weights(rest))
