"""Prompt tuning, P-tuning and prefix tuning beside PEFT's own: the same values, gradients and files.

PEFT's logits of prompt and P-tuning begin with those of the prompt; ours are of the row's own tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from afina.adapters import files
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.tree import Edit, Technique
from tests.battery import IDS, TARGETS, build, close, differs, quiet, train

N = 3
METHODS: dict[str, Technique] = {
    "prompt": PromptTuning(tokens=N, start="random"),
    "p_tuning": PTuning(tokens=N, network="none"),
    "prefix": PrefixTuning(tokens=N, start="random"),
}
CONFIGS: dict[str, Any] = {
    "prompt": PromptTuningConfig,
    "p_tuning": PromptEncoderConfig,
    "prefix": PrefixTuningConfig,
}
DECODERS = ("llama", "gpt2", "mixtral")


def theirs(peer: Any, ids: Tensor = IDS) -> Tensor:
    """A model of PEFT's: logits of the row's own tokens."""
    with quiet():
        out = peer(input_ids=ids, attention_mask=torch.ones_like(ids))
    return out.logits[:, -ids.shape[1] :]


def edited(model_name: str, technique: Technique) -> tuple[Any, Edit]:
    model = build(model_name)
    edit = apply(model, [technique], seed=3)
    train(model, edit)
    in_fp32(edit)
    return model, edit


def in_fp32(edit: Edit) -> None:
    """Rounds what trains, for PEFT keeps it in fp32 beside a model in fp64."""
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.copy_(parameter.float())


def loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


@pytest.mark.parametrize("model_name", DECODERS)
@pytest.mark.parametrize("key", METHODS)
def test_one_file_is_the_same_in_both(key: str, model_name: str, tmp_path: Path) -> None:
    model, edit = edited(model_name, METHODS[key])
    files.save(edit, tmp_path / "here", base="tiny")
    with quiet(), torch.no_grad():
        peer: Any = PeftModel.from_pretrained(build(model_name), str(tmp_path / "here"))
        ours = model(input_ids=IDS).logits
        close(theirs(peer.eval()), ours)
        for parameter in peer.prompt_encoder.parameters():
            parameter.mul_(-1.3)
        peer.save_pretrained(str(tmp_path / "there"))
        other = build(model_name)
        loaded = files.load(other, tmp_path / "there")
        close(theirs(peer), other(input_ids=IDS).logits)
        differs(other(input_ids=IDS).logits, ours)
    assert list(loaded.trainable()) == list(edit.trainable())
    assert loaded.techniques[0].key == key


def twins(model_name: str, technique: Technique, **options: Any) -> tuple[Any, Edit, Any]:
    """A model of ours and one of PEFT's, of equal values throughout, network and all."""
    model, edit = edited(model_name, technique)
    (delta,) = edit.deltas.values()
    with quiet():
        config = CONFIGS[technique.key](num_virtual_tokens=N, task_type="CAUSAL_LM", **options)
        peer: Any = get_peft_model(build(model_name), config).double().eval()
    encoder = peer.prompt_encoder["default"]
    values = {
        name.replace("maps.", "transform." if technique.key == "prefix" else "mlp_head.")
        .replace("lstm.", "lstm_head.")
        .replace("weight", "embedding.weight", int(name == "weight")): tensor
        for name, tensor in delta.named_parameters()
    }
    assert set(values) == {name for name, _ in encoder.named_parameters()}
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(values[name])
    return model, edit, (peer, {name: values[name] for name, _ in encoder.named_parameters()})


NETWORKS: tuple[tuple[Technique, dict[str, Any]], ...] = (
    (METHODS["prompt"], {}),
    (METHODS["prefix"], {}),
    (PrefixTuning(tokens=N, projection=True, hidden=5), {"prefix_projection": True}),
    (PTuning(tokens=N, hidden=5), {}),
    (
        PTuning(tokens=N, hidden=5, network="lstm", lstm_layers=2),
        {"encoder_reparameterization_type": "LSTM", "encoder_num_layers": 2},
    ),
)


@pytest.mark.parametrize("model_name", DECODERS)
@pytest.mark.parametrize(
    ("technique", "options"), NETWORKS, ids=["prompt", "prefix", "projected", "mlp", "lstm"]
)
def test_gradients_are_the_same_in_both(
    technique: Technique, options: dict[str, Any], model_name: str
) -> None:
    if technique.key != "prompt" and getattr(technique, "hidden", None):
        options = {**options, "encoder_hidden_size": 5}
    model, _, (peer, pairs) = twins(model_name, technique, **options)
    logits = model(input_ids=IDS).logits
    close(theirs(peer), logits)
    loss(logits).backward()
    loss(theirs(peer)).backward()
    for name, parameter in peer.prompt_encoder["default"].named_parameters():
        assert parameter.grad.abs().max() > 0
        close(pairs[name].grad, parameter.grad, 1e-9)


@pytest.mark.parametrize("key", METHODS)
@pytest.mark.parametrize("model_name", DECODERS)
def test_answers_are_what_peft_predicts_token_by_token(key: str, model_name: str) -> None:
    """Cached and not. (PEFT's own `generate` with this Transformers gives other tokens with a cache than without.)"""
    model, _, (peer, _) = twins(
        model_name, METHODS[key] if key != "p_tuning" else PTuning(tokens=N)
    )
    wanted = IDS.clone()
    with torch.no_grad():
        for _ in range(6):
            wanted = torch.cat((wanted, theirs(peer, wanted)[:, -1:].argmax(-1)), dim=1)
    for cached in (True, False):
        answer = model.generate(
            input_ids=IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=6,
            do_sample=False,
            use_cache=cached,
            pad_token_id=0,
        )
        assert torch.equal(answer, wanted)


def classifier() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        num_labels=3,
    )
    return BertForSequenceClassification(config).double().eval()


@pytest.mark.parametrize("key", ["prompt", "p_tuning"])
def test_a_classifier_with_its_head(key: str, tmp_path: Path) -> None:
    """Keys of the head have one `base_model.`; segments of two texts go along; padding is on the right."""
    given: dict[str, Tensor] = {
        "input_ids": IDS,
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
        "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
    }
    model = classifier()
    edit = apply(
        model, [METHODS[key].model_copy(update={"modules_to_save": ("classifier",)})], seed=3
    )
    F.cross_entropy(model(**given).logits, torch.tensor([2, 0])).backward()
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    in_fp32(edit)
    files.save(edit, tmp_path / "here", base="tiny")
    stored = load_file(tmp_path / "here" / "adapter_model.safetensors")
    assert set(stored) == {
        "prompt_embeddings",
        "base_model.classifier.weight",
        "base_model.classifier.bias",
    }
    with quiet(), torch.no_grad():
        peer: Any = PeftModel.from_pretrained(classifier(), str(tmp_path / "here")).eval()
        close(peer(**given).logits, model(**given).logits)
        differs(peer(**given).logits, classifier()(**given).logits)
        peer.prompt_encoder["default"].embedding.weight.mul_(-1.3)
        peer.base_model.classifier.modules_to_save["default"].weight.mul_(1.2)
        peer.save_pretrained(str(tmp_path / "there"))
        other = classifier()
        files.load(other, tmp_path / "there")
        close(other(**given).logits, peer(**given).logits)
        differs(other(**given).logits, model(**given).logits)


# --- strictness -------------------------------------------------------------------------------------------------------


def spoilt(tmp_path: Path, key: str, change: Any = None, tensors: Any = None) -> Path:
    _, edit = edited("llama", METHODS[key])
    folder = files.save(edit, tmp_path / "adapter", base="tiny")
    (folder / "afina.json").unlink()
    if change:
        config = json.loads((folder / "adapter_config.json").read_text())
        change(config)
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors:
        values = load_file(folder / "adapter_model.safetensors")
        tensors(values)
        save_file(values, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path) -> str:
    model = build("llama")
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(AdapterError) as caught:
        files.load(model, folder)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.config._attn_implementation == build("llama").config._attn_implementation
    return str(caught.value)


@pytest.mark.parametrize("key", METHODS)
def test_what_does_not_fit_is_refused(key: str, tmp_path: Path) -> None:
    def count(config: dict[str, Any]) -> None:
        config["num_virtual_tokens"] = 5

    def twice(config: dict[str, Any]) -> None:
        config["num_transformer_submodules"] = 2

    def strange(config: dict[str, Any]) -> None:
        config["soft_prompt_scale"] = 2

    def gone(values: dict[str, Tensor]) -> None:
        values["prompt_embedding"] = values.pop("prompt_embeddings")

    assert "prompt_embeddings: shape (3, " in refused(spoilt(tmp_path / "a", key, count))
    assert "encoder-decoder" in refused(spoilt(tmp_path / "b", key, twice))
    assert "soft_prompt_scale" in refused(spoilt(tmp_path / "c", key, strange))
    told = refused(spoilt(tmp_path / "d", key, None, gone))
    assert "the file lacks it" in told
    assert "prompt_embedding: the model has no such place" in told


@pytest.mark.parametrize("kind", ["CPT", "MULTITASK_PROMPT_TUNING", "CARTRIDGE"])
def test_other_methods_of_the_family_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    def named(config: dict[str, Any]) -> None:
        config["peft_type"] = kind

    assert f"peft_type '{kind}'" in refused(spoilt(tmp_path, "prompt", named))


def test_what_a_network_gave_cannot_go_back_through_it(tmp_path: Path) -> None:
    _, edit = edited("llama", PTuning(tokens=N))
    files.save(edit, tmp_path / "adapter", base="tiny")
    tensors = files.read_tensors(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="a network makes these vectors"):
        files.restore(edit, tensors)


@pytest.mark.parametrize(
    "technique",
    [PTuning(tokens=N, network="lstm"), PrefixTuning(tokens=N, projection=True)],
    ids=["p_tuning", "prefix"],
)
def test_a_network_is_folded_away(technique: Technique, tmp_path: Path) -> None:
    model, edit = edited("llama", technique)
    folder = files.save(edit, tmp_path / "adapter", base="tiny")
    assert set(load_file(folder / "adapter_model.safetensors")) == {"prompt_embeddings"}
    other = build("llama")
    loaded = files.load(other, folder)
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert list(loaded.trainable()) == [f"model.{technique.key}.weight"]
    train(other, loaded)
    again = files.save(loaded, tmp_path / "again", base="tiny")
    third = build("llama")
    files.load(third, again)
    with torch.no_grad():
        assert torch.equal(third(input_ids=IDS).logits, other(input_ids=IDS).logits)
        differs(third(input_ids=IDS).logits, model(input_ids=IDS).logits)
