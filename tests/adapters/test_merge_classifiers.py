"""Merging a classifier's adapter: the merged model is a classifier that Transformers loads with its head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)

import afina
from afina.adapters import files
from afina.errors import AdapterError, ModelError
from afina.models.classes import class_names
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import randomise
from tests.tiny import byte_tokenizer, tiny_llama

LABELS = ("aa", "bb", "cc")
SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
TASKS = {"llama": "classification", "bert": "classification", "tags": "token_classification"}
AUTO: dict[str, Any] = {
    "classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}
LORA = LoRA(rank=3, target=("all-linear",))
IDS = torch.tensor([[1, 77, 3, 222, 9, 4], [5, 2, 131, 8, 8, 257]])


def save_base(kind: str, folder: Path, **changes: Any) -> None:
    """A base that was made for no classes: a decoder with its head, an encoder alone."""
    torch.manual_seed(0)
    model = tiny_llama(dtype=torch.float32, **changes)
    if kind != "llama":
        model = BertModel(BertConfig(**SIZES))
    if kind == "masked":
        model = BertForMaskedLM(BertConfig(**SIZES))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def classifier(folder: Path, task: Any) -> Any:
    return afina.load(folder, dtype="fp32", device="cpu", task=task, labels=LABELS)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=(IDS != 257).long()).logits.double()


def trained(tmp_path: Path, task: Any) -> tuple[Any, Tensor]:
    """The adapter's folder is `a`; returns its edit and what it says."""
    model, tokenizer = classifier(tmp_path / "base", task)
    edit = apply(model, [LORA])
    randomise(model)
    files.save(edit, tmp_path / "a", base=str(tmp_path / "base"), tokenizer=tokenizer)
    return edit, logits(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", TASKS)
def test_transformers_loads_the_merged_classifier_with_its_head(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    save_base(kind, tmp_path / "base", tie_word_embeddings=tied)
    edit, answer = trained(tmp_path, TASKS[kind])
    merged = afina.merge(tmp_path / "a", tmp_path / "merged")
    assert merged.verified
    assert merged.written is not None
    assert merged.written.fingerprint is not None
    with battery.quiet():
        model, told = AUTO[TASKS[kind]].from_pretrained(
            tmp_path / "merged", output_loading_info=True
        )
    assert not any(told.values()), told  # nothing is missing, left over or of another shape
    battery.close(logits(model.eval()), answer, 1e-5)
    assert class_names(model) == LABELS
    assert model.config.pad_token_id == 257
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    again, _ = afina.load(tmp_path / "merged", dtype="fp32", device="cpu")
    assert type(again) is type(model)
    # In memory it is the same.
    edit.merge()
    battery.close(logits(edit.model), answer, 1e-5)


def test_another_format_and_several_files(tmp_path: Path) -> None:
    save_base("llama", tmp_path / "once")
    model, tokenizer = afina.load(tmp_path / "once", dtype="fp32", device="cpu")
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    tokenizer.save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    _, answer = trained(tmp_path, "classification")
    settings = afina.MergeSettings(dtype="bf16", tolerance=0.1)
    afina.merge(tmp_path / "a", tmp_path / "merged", settings=settings)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text("utf-8"))
    assert "score.weight" in index["weight_map"]
    assert "lm_head.weight" not in index["weight_map"]
    with battery.quiet():
        made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert made.score.weight.dtype == torch.bfloat16
    assert (logits(made.float()) - answer).norm() < 0.05 * answer.norm()


def test_into_a_base_that_is_such_a_classifier(tmp_path: Path) -> None:
    """With as many classes its head gives way to the adapter's; with another number too."""
    save_base("bert", tmp_path / "plain")
    for number, labels in enumerate((LABELS, ("no", "yes"))):
        place = tmp_path / str(number)
        made, tokenizer = afina.load(
            tmp_path / "plain", dtype="fp32", device="cpu", task="classification", labels=labels
        )
        made.save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        _, answer = trained(place, "classification")
        afina.merge(place / "a", place / "merged")
        with battery.quiet():
            model = AutoModelForSequenceClassification.from_pretrained(place / "merged")
        battery.close(logits(model.eval()), answer, 1e-5)
        assert class_names(model) == LABELS


def test_an_adapter_that_peft_wrote(tmp_path: Path) -> None:
    """Its classes have no names, and their number is the head's."""
    save_base("llama", tmp_path / "base")
    with battery.quiet():
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=4)
        base.config.pad_token_id = 257
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
        peer: Any = get_peft_model(base, config)
        randomise(peer)
        answer = logits(peer.eval())
        peer.save_pretrained(str(tmp_path / "a"))
    afina.merge(tmp_path / "a", tmp_path / "merged", base=tmp_path / "base")
    with battery.quiet():
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert model.config.num_labels == 4
    battery.close(logits(model.eval()), answer, 1e-5)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    """An encoder without the pooler that its classifier has: it was drawn, and no file has it."""
    save_base("masked", tmp_path / "base")
    edit, answer = trained(tmp_path, "classification")
    with pytest.raises(ModelError, match="lack tensors of the classifier") as caught:
        afina.merge(tmp_path / "a", tmp_path / "merged")
    assert "pooler" in str(caught.value.got)
    assert not (tmp_path / "merged").exists()
    # What the cure says.
    edit.merge()
    edit.keep()
    edit.model.save_pretrained(tmp_path / "kept")
    with battery.quiet():
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept")
    battery.close(logits(model.eval()), answer, 1e-5)
    with pytest.raises(AdapterError, match="GGUF file holds no classifier"):
        afina.merge(tmp_path / "a", tmp_path / "merged.gguf")
