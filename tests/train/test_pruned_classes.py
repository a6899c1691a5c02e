"""Classifiers whose tokens are pruned: runs whole and resumed, what is loaded from their folders, and the verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

import afina
from afina.adapters import files
from afina.cli import main
from afina.errors import AdapterError, TechniqueError
from afina.techniques.token_pruning import TokenPruning
from tests import battery
from tests.train.test_classes import TEXTS, build, data_of, tokenizer

IDS = torch.tensor([[5, 9, 40, 7, 22, 31, 8, 60], [6, 30, 11, 257, 257, 257, 257, 257]])
MASK = (IDS != 257).long()
BLOCKS = {"num_hidden_layers": 3}
SCORES: dict[str, dict[str, Any]] = {
    "attention": {"keep": 0.5},
    "similarity": {"keep": 0.5},
    "learned": {"threshold_start": 0.9, "temperature": 0.3, "penalty": 1.0},
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK).logits


def edited(kind: str, score: str, **changes: Any) -> tuple[Any, afina.Edit]:
    model = build(kind, **BLOCKS, **changes)
    pruning = TokenPruning(score=score, **SCORES[score])  # type: ignore[arg-type]
    return model, afina.apply(model, [pruning, afina.LoRA(rank=4)])


@pytest.mark.parametrize("kind", ["bert", "tags"])
@pytest.mark.parametrize("score", SCORES)
def test_a_run_learns_and_what_it_leaves_prunes_again(
    kind: str, score: str, tmp_path: Path
) -> None:
    if (kind, score) == ("tags", "learned"):
        return  # refused
    model, edit = edited(kind, score)
    before = afina.evaluate(model, tokenizer(), data_of(kind))
    run = afina.train(model, tokenizer(), data_of(kind), edit, tmp_path / "run", steps=20, lr=2e-2)
    after = afina.evaluate(model, tokenizer(), data_of(kind))
    assert after.loss < 0.9 * before.loss
    other = build(kind, **BLOCKS)
    loaded = files.load(other, run.weights)
    assert torch.equal(logits(other), logits(model))
    assert [t.key for t in loaded.techniques] == [t.key for t in edit.techniques]
    with edit.disabled(), loaded.disabled():
        assert torch.equal(logits(other), logits(model))
    said = [note for note in loaded.notes if "with token_pruning" in note]
    assert len(said) == (score != "learned")
    loaded.undo()
    assert torch.equal(logits(other), logits(build(kind, **BLOCKS)))


def test_learnt_thresholds_move_and_come_back(tmp_path: Path) -> None:
    model, edit = edited("bert", "learned")
    start = {n: p.item() for n, p in edit.trainable().items() if n.endswith("threshold")}
    run = afina.train(model, tokenizer(), TEXTS, edit, tmp_path / "run", steps=8, lr=1e-2)
    end = {n: p.item() for n, p in edit.trainable().items() if n.endswith("threshold")}
    assert len(start) == 2
    assert all(end[name] != start[name] for name in start)
    other = build("bert", **BLOCKS)
    loaded = files.load(other, run.weights)
    found = {n: p.item() for n, p in loaded.trainable().items() if n.endswith("threshold")}
    assert found == end
    (run.weights / "token_pruning" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError):
        files.load(build("bert", **BLOCKS), run.weights)


def test_thresholds_are_refused_by_another_depth(tmp_path: Path) -> None:
    _, edit = edited("bert", "learned")
    folder = files.save(edit, tmp_path / "a", base="tiny")
    with pytest.raises(AdapterError):
        files.load(build("bert", num_hidden_layers=4), folder / "token_pruning")


@pytest.mark.parametrize("score", ["attention", "similarity"])
def test_the_adapter_is_a_plain_one_of_peft(score: str, tmp_path: Path) -> None:
    model, edit = edited("bert", score)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) / 4)
    folder = files.save(edit, tmp_path / "a", base="tiny")
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(build("bert", **BLOCKS), str(folder)).eval()
    whole = build("bert", **BLOCKS)
    record = json.loads((folder / "afina.json").read_text())
    (folder / "afina.json").unlink()
    files.load(whole, folder)
    battery.close(logits(peer), logits(whole))
    battery.differs(logits(peer), logits(model))
    (said,) = (each for each in record["techniques"] if "token_pruning" in each)
    said["token_pruning"]["keep"] = 7
    (folder / "afina.json").write_text(json.dumps(record))
    with pytest.raises(AdapterError, match="how tokens were pruned"):
        files.load(build("bert", **BLOCKS), folder)


def test_what_acts_in_training_alone_is_not_put_on_again(tmp_path: Path) -> None:
    model = build("bert", **BLOCKS)
    edit = afina.apply(model, [TokenPruning(score="random"), afina.LoRA(rank=2)])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    loaded = files.load(build("bert", **BLOCKS), folder)
    assert [t.key for t in loaded.techniques] == ["lora"]
    edit.merge()  # nothing of it is to be folded
    edit.unmerge()
    _, acts = edited("bert", "attention")
    with pytest.raises(TechniqueError, match="cannot be merged"):
        acts.merge()


@pytest.mark.parametrize("score", [*SCORES, "random"])
def test_a_resumed_run_is_the_run_bit_for_bit(score: str, tmp_path: Path) -> None:
    def run(out: str, steps: int, **options: Any) -> dict[str, Tensor]:
        model = build("bert", **BLOCKS)
        pruning = TokenPruning(score=score, **SCORES.get(score, {}))  # type: ignore[arg-type]
        edit = afina.apply(model, [pruning, afina.LoRA(rank=2, dropout=0.1)])
        settings: dict[str, Any] = {"save_every": 2, "schedule": "constant", "warmup_steps": 0}
        given = afina.RunOptions(**options)
        afina.train(
            model, tokenizer(), TEXTS, edit, tmp_path / out, options=given, steps=steps,
            rows_per_step=4, **settings,
        )  # fmt: skip
        return {n: p.detach().clone() for n, p in edit.trainable().items()}

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True, allow_changes=True)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


def test_the_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build("bert", **BLOCKS).float().bert.save_pretrained("base")
    tokenizer().save_pretrained("base")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    given = ["base", "rows.jsonl", "--steps", "3", "--set", "train.compile=false"]
    keys = ["--technique", "token_pruning", "--technique", "lora"]
    more = ["--set", "techniques.token_pruning.keep=0.4"]
    assert main(["train", *given, *keys, *more, "-o", "run", "--lr", "1e-2"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "rows.jsonl", "--json", "pruned.json"]) == 0
    assert "token_pruning, 0.4 of a row's tokens kept" in capsys.readouterr().err
    record = Path("run/adapter/afina.json")
    told = json.loads(record.read_text())
    told["techniques"] = [each for each in told["techniques"] if "lora" in each]
    record.write_text(json.dumps(told))
    assert main(["eval", "run", "rows.jsonl", "--json", "whole.json"]) == 0
    pruned, whole = (json.loads(Path(f"{n}.json").read_text()) for n in ("pruned", "whole"))
    assert pruned["loss"] != whole["loss"]
