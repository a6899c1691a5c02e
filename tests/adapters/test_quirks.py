"""Files as they are met: of older PEFT, of other tools, with other names; each is right, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from afina.adapters import files
from afina.table import apply
from afina.techniques.lora import LoRA
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
    rename,
)

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def right(folder: Path, theirs: torch.Tensor, name: str = "llama") -> list[str]:
    """Asserts that the adapter acts here as it did there; returns the notes."""
    model = build(name)
    edit = files.load(model, folder)
    battery.differs(theirs, battery.base_logits(name))
    battery.close(battery.logits(model), theirs, 1e-9)
    return edit.notes


# --- older files --------------------------------------------------------------------------------------------------

OLD = {
    "base_model_name_or_path": "tiny", "bias": "none", "enable_lora": None, "fan_in_fan_out": False,
    "inference_mode": True, "lora_alpha": 8, "lora_dropout": 0.05, "merge_weights": False,
    "modules_to_save": None, "peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}  # fmt: skip
"""All keys that a file of PEFT 0.2 has."""


def test_a_file_of_an_old_version(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path, **ATTENTION)
    (tmp_path / CONFIG).write_text(json.dumps(OLD), encoding="utf-8")
    right(tmp_path, theirs)
    (lora,) = files.load(build("llama"), tmp_path).techniques
    assert isinstance(lora, LoRA)
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 8.0, 0.05)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("enable_lora", [True, False, True], "enable_lora"),
        ("r", "gone", "r is missing (it is never guessed)"),
        ("lora_alpha", "gone", "lora_alpha is missing (it is never guessed)"),
        ("bias", "some", "bias"),
    ],
)
def test_an_old_file_that_says_other_things(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    peer("llama", tmp_path, **ATTENTION)
    (tmp_path / CONFIG).write_text(json.dumps(OLD), encoding="utf-8")
    edit_config(tmp_path, **{key: value})
    assert said in refused(tmp_path, build("llama"))


def test_the_tensors_of_rank_8_do_not_stand_for_a_rank_that_is_not_given(tmp_path: Path) -> None:
    """8 is what PEFT would assume for both, and here it would even be right."""
    peer("llama", tmp_path, r=8, lora_alpha=8, **ATTENTION)
    edit_config(tmp_path, r="gone", lora_alpha="gone")
    said = refused(tmp_path, build("llama"))
    assert "r is missing" in said
    assert "lora_alpha is missing" in said


@pytest.mark.parametrize(
    "spelling",
    [
        lambda k: k.replace(".weight", ".default.weight"),
        lambda k: k.replace(".weight", ".my_task.weight"),
        lambda k: k.removesuffix(".weight"),
        lambda k: k.removesuffix(".weight") + ".default",
    ],
    ids=["default", "named", "bare", "bare and named"],
)
def test_endings_of_other_writers(tmp_path: Path, spelling: Callable[[str], str]) -> None:
    """A raw state dictionary keeps the adapter's name; loralib's tensors have no module of their own."""
    theirs = peer("llama", tmp_path, **ATTENTION)
    rename(tmp_path, spelling)
    assert set(load_file(tmp_path / WEIGHTS)) != set(files.read_tensors(tmp_path / ".")) or spelling
    notes = right(tmp_path, theirs)
    assert notes[0].endswith("applied 8 of 8 tensors")


def test_a_raw_state_dictionary_with_a_whole_module(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    head = "base_model.model.lm_head"
    own = build("llama").lm_head.weight.detach().clone()
    rename(tmp_path, lambda k: k.replace("lm_head.", "lm_head.modules_to_save.default."))
    edit_tensors(tmp_path, lambda t: t.update({f"{head}.original_module.weight": own}))
    right(tmp_path, theirs)
    edit_tensors(tmp_path, lambda t: t[f"{head}.original_module.weight"].add_(1))
    assert "other base weights" in refused(tmp_path, build("llama"))


def test_embeddings_of_an_old_file(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path, target_modules=["embed_tokens", "lm_head"])
    keys = set(load_file(tmp_path / WEIGHTS))
    assert "base_model.model.model.embed_tokens.lora_embedding_A" in keys
    rename(tmp_path, lambda k: k + ".default" if "lora_embedding" in k else k)
    right(tmp_path, theirs)


def test_several_adapters_in_one_file(tmp_path: Path) -> None:
    peer("llama", tmp_path, **ATTENTION)
    rename(tmp_path, lambda k: k.replace("A.weight", "A.one.weight").replace("B.w", "B.two.w"))
    said = refused(tmp_path, build("llama"))
    assert "several adapters" in said
    assert "one, two" in said


def test_an_adapter_under_another_name_is_found_by_the_error(tmp_path: Path) -> None:
    with battery.quiet():
        model: Any = get_peft_model(build("llama"), LoraConfig(r=4, **ATTENTION), "first")
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        randomise(model)
        model.eval().save_pretrained(str(tmp_path))
    said = refused(tmp_path, build("llama"))
    assert f"name the adapter in it: {tmp_path / 'first'} or {tmp_path / 'second'}" in said
    right(tmp_path / "first", battery.logits(model))


# --- renamed prefixes ---------------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[str], str]] = {
    "twice": lambda k: "base_model.model." + k,
    "three times": lambda k: "base_model.model.base_model.model." + k,
    "missing": lambda k: k.removeprefix("base_model.model."),
    "half": lambda k: k.removeprefix("base_model."),
    "compiled": lambda k: k.replace("base_model.model.", "base_model.model._orig_mod."),
    "wrapped": lambda k: "module." + k,
    "without the model's own": lambda k: k.replace("base_model.model.model.", "base_model.model."),
    "of a larger model": lambda k: k.replace("model.model.model.", "model.model.language_model."),
}


@pytest.mark.parametrize("head", HEADS)
def test_another_beginning_of_the_names(tmp_path: Path, head: str) -> None:
    theirs = peer("llama", tmp_path, **ATTENTION)
    rename(tmp_path, HEADS[head])
    notes = right(tmp_path, theirs)
    assert notes[0].endswith("applied 8 of 8 tensors")
    assert sum("in this model" in note for note in notes) == 1
    assert any(note.startswith("4 modules: '") for note in notes)


def test_the_standard_beginning_is_not_worth_a_note(tmp_path: Path) -> None:
    notes = right(tmp_path, peer("llama", tmp_path, **ATTENTION))
    assert not any("in this model" in note for note in notes)


def test_stack_and_head_that_moved_apart(tmp_path: Path) -> None:
    """As when Transformers took `language_model.lm_head` out of the language model and left the layers in it."""
    theirs = peer(
        "llama",
        tmp_path,
        target_modules=["q_proj", "lm_head", "embed_tokens"],
        modules_to_save=["model.norm"],
    )
    rename(tmp_path, lambda k: k.replace("base_model.model.", "base_model.model.language_model."))
    edit_config(tmp_path, modules_to_save=["language_model.model.norm"])
    right(tmp_path, theirs)


def test_patterns_are_read_under_the_names_of_the_file(tmp_path: Path) -> None:
    old = "language_model.model.layers"
    settings = {"rank_pattern": {r"^model.layers.1.*": 2}, "alpha_pattern": {"layers.0.*q_proj": 3}}
    theirs = peer("llama", tmp_path, target_modules=r"model\.layers\..*\.[qv]_proj", **settings)
    rename(tmp_path, lambda k: k.replace("model.model.layers", f"model.{old}"))
    edit_config(
        tmp_path,
        target_modules=r"language_model\.model\.layers\..*\.[qv]_proj",
        rank_pattern={r"^language_model.model.layers.1.*": 2},
    )
    right(tmp_path, theirs)


class Roof(nn.Module):
    """A model inside another one, as language models are inside models of text and images."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = build("llama")
        self.config = self.language_model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()


def test_our_own_file_follows_a_base_that_moved(tmp_path: Path) -> None:
    model = build("llama")
    edit = apply(model, [LoRA(rank=2, rank_pattern={"*.0.*": 3}, modules_to_save=("lm_head",))])
    battery.train(model, edit)
    files.save(edit, tmp_path / "a", base="tiny")
    roof = Roof()
    loaded = files.load(roof, tmp_path / "a")
    battery.close(battery.logits(roof.language_model), battery.logits(model))
    assert "its base is this model, by fingerprint" in loaded.notes
    assert loaded.notes[0].endswith("applied 29 of 29 tensors")


class Towers(nn.Module):
    """Two models of one form under one roof."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = build("llama"), build("llama")
        self.config = self.left.config

    def get_input_embeddings(self) -> nn.Module:
        return self.left.get_input_embeddings()


def test_names_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    peer("llama", tmp_path, **ATTENTION)
    model = Towers()
    said = refused(tmp_path, model)
    assert "in several ways" in said
    assert "left.model.layers.0.self_attn.q_proj" in said
    assert "right.model.layers.0.self_attn.q_proj" in said


def test_shapes_decide_between_two_ways(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path, **ATTENTION)
    model = Towers()
    model.left = battery.llama(hidden_size=32).double().eval()
    edit = files.load(model, tmp_path)
    assert all(name.startswith("right.") for name in edit.deltas)
    battery.close(battery.logits(model.right), theirs, 1e-9)


def test_a_layer_that_is_not_there_is_not_taken_for_another(tmp_path: Path) -> None:
    """Of one adapted layer, every layer of the model has the shape; its number is part of its name."""
    peer("llama", tmp_path, layers_to_transform=[1], **ATTENTION)
    rename(tmp_path, lambda k: k.replace("layers.1.", "layers.5."))
    assert "the model has no such place" in refused(tmp_path, build("llama"))


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_bias", True), ("use_qalora", True), ("bias", "some"),
        ("layer_replication", [[0, 1]]), ("alora_invocation_tokens", [1]),
        ("arrow_config", {}), ("kasa_config", {"x": 1}),
        ("velora_config", {"x": 1}), ("monteclora_config", {"x": 1}), ("use_bdlora", {"x": 1}),
        ("brand_new", 3), ("brand_new", "on"), ("brand_new", [1]),
    ],
)  # fmt: skip
def test_a_variant_or_an_unknown_setting_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    peer("llama", tmp_path, **ATTENTION)
    files.load(build("llama"), tmp_path).undo()
    edit_config(tmp_path, **{key: value})
    said = refused(tmp_path, build("llama"))
    assert f"{key} = {value!r}" in said
    assert ("a variant this version" in said) != (key == "brand_new")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("target_parameters", ["x"], "target_parameters = ['x']"),
        ("trainable_token_indices", [1], "names it, and the file lacks it"),
    ],
)
def test_experts_and_tokens_that_the_file_lacks(
    tmp_path: Path, key: str, value: Any, why: str
) -> None:
    peer("llama", tmp_path, **ATTENTION)
    edit_config(tmp_path, **{key: value})
    assert why in refused(tmp_path, build("llama"))


def test_every_setting_of_peft_is_known(tmp_path: Path) -> None:
    """A file that PEFT 0.21.2 writes with its defaults has every key it knows; none may be a stranger here."""
    peer("llama", tmp_path, **ATTENTION)
    written = json.loads((tmp_path / CONFIG).read_text(encoding="utf-8"))
    from dataclasses import fields

    assert {f.name for f in fields(LoraConfig)} <= {*written, "runtime_config"}
    from afina.adapters.peft_lora import LORA

    allowed = LORA.allowed
    known = {*allowed.needed, *allowed.types, *allowed.neutral, *allowed.free, "peft_type"}
    assert set(written) - known == set()


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_as_it_is(tmp_path: Path, start: Any) -> None:
    theirs = peer("llama", tmp_path, init_lora_weights=start, **ATTENTION, dtype=torch.float32)
    model = build("llama", torch.float32)
    files.load(model, tmp_path)
    battery.close(battery.logits(model), theirs, 1e-5)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_a_start_that_changes_the_base_is_refused_until_it_is_converted(
    tmp_path: Path, start: str
) -> None:
    """The adapter as PEFT saves it belongs to base weights that are on no disk."""
    base = build("llama", torch.float32)
    with battery.quiet():
        model: Any = get_peft_model(base, LoraConfig(r=4, init_lora_weights=start, **ATTENTION))
        model.save_pretrained(str(tmp_path / "start"))
        randomise(model)
        model.eval().save_pretrained(str(tmp_path / "as it is"))
        theirs = battery.logits(model)
        model.save_pretrained(
            str(tmp_path / "converted"),
            path_initial_model_for_weight_conversion=str(tmp_path / "start"),
        )
    said = refused(tmp_path / "as it is", build("llama", torch.float32))
    assert f"init_lora_weights = '{start}'" in said
    assert "path_initial_model_for_weight_conversion" in said
    mine = build("llama", torch.float32)
    files.load(mine, tmp_path / "converted")
    battery.close(battery.logits(mine), theirs, 1e-4)
    # The control: taken for a plain adapter it acts otherwise.
    edit_config(tmp_path / "as it is", init_lora_weights=True)
    wrong = build("llama", torch.float32)
    files.load(wrong, tmp_path / "as it is")
    battery.differs(battery.logits(wrong), theirs)


@pytest.mark.parametrize("targets", ["all-linear", "ALL-LINEAR"])
def test_all_linear_as_text(tmp_path: Path, targets: str) -> None:
    """PEFT writes the names it found; other tools write what they were given."""
    theirs = peer("llama", tmp_path, target_modules="all-linear")
    edit_config(tmp_path, target_modules=targets)
    right(tmp_path, theirs)
    edit_tensors(tmp_path, lambda t: [t.pop(k) for k in list(t) if "up_proj" in k])
    assert "up_proj: adapter_config.json names it" in refused(tmp_path, build("llama"))


def test_targets_that_are_not_given_are_those_of_the_file(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path, **ATTENTION)
    for value in (None, "gone"):
        edit_config(tmp_path, target_modules=value)
        right(tmp_path, theirs)


@pytest.mark.parametrize("layers", [1, [1], [0, 1], []])
def test_layers_to_transform(tmp_path: Path, layers: Any) -> None:
    theirs = peer(
        "llama", tmp_path, layers_to_transform=layers, layers_pattern="layers", **ATTENTION
    )
    right(tmp_path, theirs)
    edit_config(tmp_path, layers_to_transform=[0])
    assert "name" in refused(tmp_path, build("llama"))


@pytest.mark.parametrize("flag", [True, False])
def test_fan_in_fan_out_is_only_about_their_own_modules(tmp_path: Path, flag: bool) -> None:
    theirs = peer("gpt2", tmp_path, target_modules=["c_attn"], fan_in_fan_out=flag)
    right(tmp_path, theirs, "gpt2")
    edit_config(tmp_path, fan_in_fan_out=not flag)
    right(tmp_path, theirs, "gpt2")


def test_a_name_that_several_patterns_match(tmp_path: Path) -> None:
    """In training the first counts; PEFT sorts them when it saves, so the file cannot tell which that was."""
    ranks = {"layers.0.self_attn.q_proj": 3, "q_proj": 2, ".*": 1}
    theirs = peer("llama", tmp_path / "ranks", **ATTENTION, rank_pattern=ranks)
    right(tmp_path / "ranks", theirs)  # shapes tell the ranks
    alphas = {r".*v_proj": 5, r".*\.1\..*": 7}
    peer("llama", tmp_path / "alphas", **ATTENTION, alpha_pattern=alphas)
    said = refused(tmp_path / "alphas", build("llama"))
    assert "layers.1.self_attn.v_proj: 7 or 5" in said
    edit_config(tmp_path / "alphas", alpha_pattern=alphas | {r".*\.1\..*": 5})
    files.load(build("llama"), tmp_path / "alphas")


# --- whole modules and embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_tied_tensor_stands_twice_in_the_file_and_once_in_memory(
    name: str, tmp_path: Path
) -> None:
    model = build(name)
    target = "c_attn" if name == "gpt2" else "q_proj"
    edit = apply(model, [LoRA(rank=2, target=(target,), modules_to_save=("lm_head",))])
    battery.train(model, edit)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    twice = [k for k in load_file(folder / WEIGHTS) if "lora" not in k]
    assert len(twice) == 2
    loaded = files.load(other := build(name), folder)
    assert other.lm_head.weight is other.get_input_embeddings().weight
    assert len(loaded.in_place) == 1
    assert torch.equal(battery.logits(other), battery.logits(model))


def test_a_head_that_was_untied_in_training_has_a_cure_that_works(tmp_path: Path) -> None:
    theirs = peer("llama_tied", tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    said = refused(tmp_path, build("llama_tied"))
    cure = "model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())"
    assert cure in said
    model = build("llama_tied")
    exec(cure, {"model": model, "torch": torch})
    files.load(model, tmp_path)
    battery.close(battery.logits(model), theirs, 1e-9)


def test_embeddings_saved_along(tmp_path: Path) -> None:
    """PEFT does that when the vocabulary was resized, or is told to; the base's own values are no change of it."""
    with battery.quiet():
        model: Any = get_peft_model(build("llama"), LoraConfig(r=4, **ATTENTION))
        randomise(model)
        model.eval().save_pretrained(str(tmp_path), save_embedding_layers=True)
    assert "base_model.model.lm_head.weight" in load_file(tmp_path / WEIGHTS)
    notes = right(tmp_path, battery.logits(model))
    assert notes[0].endswith("applied 10 of 10 tensors")
    assert files.load(build("llama"), tmp_path).in_place == {}


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_embeddings_saved_along_after_they_changed(name: str, tmp_path: Path) -> None:
    base = build(name)
    base.resize_token_embeddings(battery.VOCABULARY + 4)
    with torch.no_grad():
        base.get_input_embeddings().weight[-4:] += 1
    with battery.quiet():
        model: Any = get_peft_model(base, LoraConfig(r=4, **ATTENTION))
        randomise(model)
        model.eval().save_pretrained(str(tmp_path), save_embedding_layers=True)
    said = refused(tmp_path, build(name))
    assert "shape (44, 16), the model wants (40, 16)" in said
    cure = "model.resize_token_embeddings(44)"
    assert cure in said
    mine = build(name)
    exec(cure, {"model": mine})
    edit = files.load(mine, tmp_path)
    battery.close(battery.logits(mine), battery.logits(model), 1e-9)
    assert any("brings its own values along" in note for note in edit.notes)


def test_peft_reads_what_was_renamed_and_saved_again(tmp_path: Path) -> None:
    theirs = peer("llama", tmp_path / "a", **ATTENTION)
    rename(tmp_path / "a", HEADS["missing"])
    edit = files.load(build("llama"), tmp_path / "a")
    files.save(edit, tmp_path / "b", base="tiny")
    with battery.quiet():
        again: Any = PeftModel.from_pretrained(build("llama"), str(tmp_path / "b"))
    battery.close(battery.logits(again.eval()), theirs, 1e-9)
