"""Classifiers of rows and of tokens: the loss by hand, runs whole and resumed, PEFT, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import afina
from afina.adapters import files
from afina.adapters.card import head_of_base
from afina.cli import main
from afina.data.dataset import prepare
from afina.data.masks import Masked
from afina.data.packing import collate
from afina.data.tags import cut
from afina.errors import ConfigError, DataError, ModelError
from afina.evaluate.classes import Confusion
from afina.evaluate.measured import measured
from afina.models.forward import trained_losses
from afina.train import classes
from afina.types import IGNORE, Row
from tests import battery
from tests.tiny import byte_tokenizer, tiny_llama

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_labels": 3,
    "pad_token_id": 257,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "bert": (BertForSequenceClassification, BertConfig),
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "tags": (BertForTokenClassification, BertConfig),
}
CLASSES = ("aa", "bb", "cc")
TEXTS = [{"text": f"say {name} {i}", "label": name} for i in range(4) for name in CLASSES]
WORDS = [
    {"tokens": ["say", name, str(i)], "tags": ["O", name, "O"]}
    for i in range(4)
    for name in ("aa", "bb")
]


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    made, config = KINDS[kind]
    return made(config(**(SIZES | changes))).double().eval()


def tokenizer() -> Any:
    made = byte_tokenizer()
    made.model_max_length = 60
    return made


def data_of(kind: str) -> list[dict[str, Any]]:
    return WORDS if kind == "tags" else TEXTS


def rows_of(kind: str) -> list[Row]:
    row = Row((5, 9, 40, 7), (False,) * 4, 0)
    other = Row((6, 30), (False,) * 2, 1)
    if kind == "tags":
        return [replace(row, tags=(IGNORE, 2, 0, IGNORE)), replace(other, tags=(1, IGNORE))]
    return [replace(row, label=2), replace(other, label=0)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_cross_entropy_of_each_row_alone(kind: str) -> None:
    model, rows = build(kind), rows_of(kind)
    batch = collate(rows, False, 257)
    losses = trained_losses(model, batch, None)
    found: list[torch.Tensor] = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.tokens])).logits
        if kind == "tags":
            places = [i for i, tag in enumerate(row.tags or ()) if tag != IGNORE]
            logits, right = logits[0, places], [(row.tags or ())[i] for i in places]
        else:
            right = [row.label]
        found.append(F.cross_entropy(logits, torch.tensor(right), reduction="none"))
    battery.close(losses, torch.cat(found))
    assert batch.trained_tokens == len(losses) == sum(row.trained_tokens for row in rows)
    losses.sum().backward()
    padded = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.cat(found).sum().backward()
    for name, gradient in padded.items():
        battery.close(gradient, dict(model.named_parameters())[name].grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["lora", "ia3", "bottleneck"])
def test_a_run_learns_and_is_loaded_again(kind: str, key: str, tmp_path: Path) -> None:
    model, words = build(kind), tokenizer()
    head = "score.weight" if kind == "llama" else "classifier.weight"
    settings: dict[str, Any] = {"lora": {"rank": 4}, "bottleneck": {"width": 4}}.get(key, {})
    edit = afina.apply(model, [afina.table.TECHNIQUES[key](**settings)])
    assert head in edit.trainable()
    before = afina.evaluate(model, words, data_of(kind))
    run = afina.train(model, words, data_of(kind), edit, tmp_path / "run", steps=20, lr=3e-2)
    after = afina.evaluate(model, words, data_of(kind))
    assert after.loss < 0.85 * before.loss
    assert after.confusion is not None
    assert after.confusion.names[: len(set(after.confusion.names))] == after.confusion.names
    other = build(kind)
    files.load(other, run.weights)
    ids = torch.tensor([[5, 9, 40, 7]])
    assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    battery.differs(other(input_ids=ids).logits, build(kind)(input_ids=ids).logits)
    told = head_of_base(run.weights)
    assert told["task"] == ("token_classification" if kind == "tags" else "classification")
    assert told["labels"] == tuple(model.config.id2label.values())


@pytest.mark.parametrize("kind", KINDS)
def test_peft_makes_the_same_of_the_adapter(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    edit = afina.apply(model, [afina.LoRA(rank=4)])
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) / 4)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(build(kind), str(folder)).eval()
    assert type(peer).__name__ == (
        "PeftModelForTokenClassification"
        if kind == "tags"
        else "PeftModelForSequenceClassification"
    )
    ids = torch.tensor([[5, 9, 40, 7]])
    battery.close(peer(input_ids=ids).logits, model(input_ids=ids).logits)
    with battery.quiet():
        peer.save_pretrained(str(tmp_path / "b"))
    other = build(kind)
    files.load(other, tmp_path / "b")
    battery.close(other(input_ids=ids).logits, model(input_ids=ids).logits)
    (tmp_path / "a" / "afina.json").unlink()
    assert head_of_base(folder)["num_labels"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def run(out: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
        model = build(kind)
        edit = afina.apply(model, [afina.LoRA(rank=2, dropout=0.1)])
        settings: dict[str, Any] = {"save_every": 2, "schedule": "constant", "warmup_steps": 0}
        given = afina.RunOptions(**options)
        afina.train(
            model, tokenizer(), data_of(kind), edit, tmp_path / out, options=given, steps=steps,
            rows_per_step=4, **settings,
        )  # fmt: skip
        return {n: p.detach().clone() for n, p in edit.trainable().items()}

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True, allow_changes=True)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


def test_two_methods_share_the_head_and_both_are_undone() -> None:
    model = build("bert")
    before, ids = battery.picture(model), torch.tensor([[5, 9, 40, 7]])
    answer = model(input_ids=ids).logits
    edit = afina.apply(model, [afina.LoRA(rank=2), afina.IA3()])
    with torch.no_grad():
        model.classifier.weight.add_(1.0)
    battery.differs(model(input_ids=ids).logits, answer)
    edit.undo()
    battery.same_picture(battery.picture(model), before)


def test_rows_that_are_not_what_the_model_classifies_are_refused(tmp_path: Path) -> None:
    def train(model: Any, data: Any) -> None:
        edit = afina.apply(model, [afina.LoRA(rank=2)])
        afina.train(model, tokenizer(), data, edit, tmp_path / "run", steps=1)

    with pytest.raises(DataError, match="not what this model classifies"):
        train(build("bert"), WORDS)
    with pytest.raises(DataError, match="not what this model classifies"):
        train(build("tags"), TEXTS)
    with pytest.raises(DataError, match="more classes than the model"):
        train(build("bert", num_labels=2), TEXTS)
    with pytest.raises(DataError, match="no classification head"):
        train(tiny_llama(), rows_of("bert"))
    with pytest.raises(ModelError, match="two classes"):
        train(build("bert", num_labels=1), TEXTS)
    with pytest.raises(ModelError, match="no single class"):
        train(build("bert", problem_type="multi_label_classification"), TEXTS)
    with pytest.raises(ModelError, match="padding's id"):
        train(build("llama", pad_token_id=None), TEXTS)
    ends = [replace(row, tokens=(*row.tokens[:-1], 257)) for row in rows_of("llama")]
    with pytest.raises(DataError, match="end with the padding's token"):
        train(build("llama"), ends)
    assert not (tmp_path / "run").exists()


def test_a_class_that_training_did_not_have_is_refused(tmp_path: Path) -> None:
    model = build("bert")
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    val = [{"text": "x", "label": "dd"}]
    with pytest.raises(DataError, match="a class that the training rows do not have"):
        afina.train(model, tokenizer(), TEXTS, edit, tmp_path / "run", val=val, steps=1)


def test_packing_is_off_and_said() -> None:
    settings = afina.DataSettings()
    assert settings.packing
    assert not classes.unpacked(build("bert"), settings).packing
    assert classes.unpacked(battery.build("llama"), settings).packing


@pytest.mark.parametrize("kind", ["bert", "tags"])
def test_accuracy_may_choose_the_best_weights(kind: str, tmp_path: Path) -> None:
    rows = rows_of(kind)
    settings = afina.EvalSettings()
    assert measured(rows, settings, tokenizer()) == ("loss", "accuracy")
    model, words = build(kind), tokenizer()
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    options = afina.RunOptions(
        evaluate=lambda model, rows: {"accuracy": afina.evaluate(model, words, rows).accuracy or 0},
        measured=lambda rows: measured(rows, settings, words),
    )
    run = afina.train(
        model, words, data_of(kind), edit, tmp_path / "run", val=data_of(kind)[:4], options=options,
        steps=2, best="accuracy",
    )  # fmt: skip
    assert run.scores["accuracy"] == afina.evaluate(model, words, data_of(kind)[:4]).accuracy


def test_confusion_and_macro_f1_by_hand() -> None:
    pairs = [(0, 0), (0, 0), (0, 1), (1, 1), (1, 0), (2, 1)]
    found = Confusion.of(("a", "b", "c", "d"), pairs)
    assert found.counts[0] == (2, 1, 0, 0)
    assert found.accuracy == 3 / 6
    # a: 2·2/(3+3); b: 2·1/(2+3); c: 0; d does not occur.
    assert found.f1 == {"a": 4 / 6, "b": 2 / 5, "c": 0.0}
    assert found.macro_f1 == pytest.approx((4 / 6 + 2 / 5 + 0) / 3)
    assert found.worst(2) == [("a", "b", 1), ("b", "a", 1)]


def test_a_words_tag_is_at_its_first_token_and_a_cut_row_keeps_its_end() -> None:
    words = tokenizer()
    found = prepare(WORDS, words, afina.DataSettings()).rows[0]
    # One token a byte: "say" has three, of which the first is tagged.
    assert found.tags is not None
    assert found.tags[:3] == (0, IGNORE, IGNORE)
    assert sum(tag != IGNORE for tag in found.tags) == found.trained_tokens == 3
    masked = Masked((5, 6, 7, 257), (False,) * 4, (), tags=(1, 0, 2, IGNORE))
    assert cut(words, masked, 3) == ((5, 6, 257), (1, 0, IGNORE))
    with pytest.raises(DataError, match="one tag"):
        prepare([{"tokens": ["a", "b"], "tags": ["O"]}], words, afina.DataSettings())


def test_loading_gives_the_head_and_its_names(tmp_path: Path) -> None:
    model = build("bert").float()
    model.bert.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    made, _ = afina.load(tmp_path / "base", labels=["no", "yes"], dtype="fp32", device="cpu")
    again, _ = afina.load(tmp_path / "base", labels=["no", "yes"], dtype="fp32", device="cpu")
    assert made.config.id2label == {0: "no", 1: "yes"}
    assert torch.equal(made.classifier.weight, again.classifier.weight)
    tags, _ = afina.load(tmp_path / "base", task="token_classification", labels=["no", "yes"])
    assert type(tags) is BertForTokenClassification
    made.save_pretrained(tmp_path / "tuned")
    tokenizer().save_pretrained(tmp_path / "tuned")
    kept, _ = afina.load(tmp_path / "tuned", labels=["yes", "no"], dtype="fp32", device="cpu")
    assert kept.config.id2label == {0: "no", 1: "yes"}
    for wrong in (["a", "a"], "ab", [], ["a", 1]):
        with pytest.raises(ConfigError, match="names of the classes"):
            afina.load(tmp_path / "base", labels=wrong)  # type: ignore[arg-type]


def test_the_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build("bert").float().bert.save_pretrained("base")
    tokenizer().save_pretrained("base")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    given = ["base", "rows.jsonl", "--steps", "3", "--set", "train.compile=false"]
    assert main(["check", *given, "--quick"]) == 0
    assert main(["train", *given, "-o", "run", "--lr", "1e-2"]) == 0
    assert "next: afina eval run" in capsys.readouterr().err
    assert main(["eval", "run", "rows.jsonl", "--json", "scores.json", "--beside-base"]) == 0
    assert "macro_f1" in capsys.readouterr().out
    scores = json.loads(Path("scores.json").read_text())
    assert scores["confusion"]["labels"] == ["aa", "bb", "cc"]
    assert sum(map(sum, scores["confusion"]["counts"])) == len(TEXTS)
