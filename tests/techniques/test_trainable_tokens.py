"""Trainable tokens: by id and by text, at both ends of a tied weight, multiplied embeddings, merging, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from afina.adapters import files
from afina.errors import AdapterError, ConfigError, RunError, TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.trainable_tokens import TokenRows, TrainableTokens, chosen_rows
from afina.train.report import Silent
from afina.tree import Edit
from tests import battery
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train import kit

CHOSEN = (31, 3, 9)
TOKENS = TrainableTokens(tokens=CHOSEN)


def rows_of(edit: Edit) -> TokenRows:
    (rows,) = (delta for delta in edit.deltas.values() if isinstance(delta, TokenRows))
    return rows


def test_places_of_ids() -> None:
    place, hit = chosen_rows(torch.tensor([[9, 4, 31], [-1, 3, 40]]), torch.tensor(CHOSEN))
    assert hit.tolist() == [[True, False, True], [False, True, False]]
    assert place[hit].tolist() == [2, 0, 1]


@pytest.mark.parametrize("model", ["llama", "llama_tied", "gpt2", "bert"])
def test_it_is_a_base_whose_rows_are_others(model: str) -> None:
    """Values, and the gradient of a tied row as that of one tensor in two places."""
    changed = battery.build(model)
    edit = apply(changed, [TOKENS])
    battery.train(changed, edit)
    rows = rows_of(edit)
    plain = battery.build(model)
    weight = plain.get_input_embeddings().weight
    with torch.no_grad():
        weight[list(CHOSEN)] = rows.rows
    battery.close(battery.logits(changed), battery.logits(plain))
    battery.differs(battery.logits(changed), battery.base_logits(model))
    battery.backward(changed)
    battery.backward(plain)
    assert rows.rows.grad is not None
    battery.close(rows.rows.grad, weight.grad[list(CHOSEN)])
    assert len(edit.trainable()) == 1


def test_an_untied_head_stays_as_it_is() -> None:
    edit = apply(battery.build("llama"), [TOKENS])
    assert [name.partition(".trainable")[0] for name in edit.deltas] == ["model.embed_tokens"]


class Scaled(nn.Embedding):
    """An embedding that multiplies, as Gemma's does."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("embed_scale", torch.tensor(3.5), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.get_buffer("embed_scale").to(self.weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_embedding_that_multiplies(dtype: torch.dtype) -> None:
    model = battery.build("llama", dtype)
    scaled = Scaled(40, 16).to(dtype)
    model.set_input_embeddings(scaled)
    before = battery.logits(model)
    edit = apply(model, [TOKENS])
    assert torch.equal(battery.logits(model), before)
    with torch.no_grad():
        rows_of(edit).rows.mul_(2.0)
        changed = battery.logits(model)
        edit.undo()
        scaled.weight[list(CHOSEN)] *= 2.0
    assert torch.equal(battery.logits(model), changed)
    battery.differs(changed.double(), before.double())


def test_merged_a_tied_model_stays_tied(tmp_path: Path) -> None:
    model = battery.build("llama_tied")
    edit = apply(model, [TOKENS])
    battery.train(model, edit)
    changed = battery.logits(model)
    shared = model.lm_head.weight
    edit.merge()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    battery.close(battery.logits(model), changed)
    assert torch.equal(model.lm_head.weight[list(CHOSEN)], rows_of(edit).rows)
    edit.unmerge()
    assert model.lm_head.weight is model.model.embed_tokens.weight is shared
    edit.merge()
    edit.keep()
    model.save_pretrained(tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    battery.close(battery.logits(again), changed)


def test_beside_another_change_the_ends_are_parted() -> None:
    model = battery.build("llama_tied")
    edit = apply(model, [TOKENS, LoRA(rank=3, target=("lm_head",))])
    battery.train(model, edit)
    changed = battery.logits(model)
    edit.merge()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    battery.close(battery.logits(model), changed, 1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_merged_on_the_disk(tmp_path: Path, tied: bool) -> None:
    from afina.adapters.merge import merge

    model = tiny_llama(tie_word_embeddings=tied)
    model.to(torch.float32).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    edit = apply(model, [TrainableTokens(tokens=(258, 65))])
    with torch.no_grad():
        rows_of(edit).rows.mul_(-1.5)
    files.save(edit, tmp_path / "adapter", base=str(tmp_path / "base"))
    wanted = battery.logits(model)
    merge(tmp_path / "adapter", out=tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert again.config.tie_word_embeddings == tied
    battery.close(battery.logits(again), wanted, 1e-5)
    names = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("lm_head.weight" in names) == (not tied)


def test_by_text_with_the_tokenizer() -> None:
    technique = TrainableTokens(tokens=("<|im_start|>", 7, "a"))
    tokenizer = byte_tokenizer()
    edit = apply(tiny_llama(), [technique], tokenizer=tokenizer)
    assert rows_of(edit).ids == (258, 7, tokenizer("a")["input_ids"][0])
    with pytest.raises(TechniqueError, match="need the tokenizer"):
        apply(tiny_llama(), [technique])
    with pytest.raises(TechniqueError, match="not one token"):
        TrainableTokens(tokens=("ab",)).told(tokenizer)
    with pytest.raises(TechniqueError, match="one token twice"):
        TrainableTokens(tokens=("<|im_start|>", 258)).told(tokenizer)


def test_refusals() -> None:
    with pytest.raises(TechniqueError, match="no such token") as caught:
        apply(battery.build("llama"), [TrainableTokens(tokens=(40,))])
    assert "resize_token_embeddings" in str(caught.value.cure)
    both = TrainableTokens(tokens=(3,), modules_to_save=("embed_tokens",))
    with pytest.raises(TechniqueError, match="trains whole"):
        apply(battery.build("llama"), [both])
    with pytest.raises(TechniqueError, match="names no token"):
        apply(battery.build("llama"), [TrainableTokens()])
    for wrong in ((3, 3), (-1,)):
        with pytest.raises(ConfigError):
            TrainableTokens(tokens=wrong)


def test_a_run_resumes_and_saves(tmp_path: Path) -> None:
    technique = TrainableTokens(tokens=(65, 80, 120))
    model: Any = lambda: tiny_llama(tie_word_embeddings=True)  # noqa: E731
    whole = kit.run(tmp_path / "whole", technique, model=model(), steps=4)
    with pytest.raises(kit.Stop):
        kit.run(
            tmp_path / "parts",
            technique,
            model=model(),
            steps=4,
            save_every=2,
            options={"seams": kit.stop_after(2)},
        )
    again = kit.run(
        tmp_path / "parts",
        technique,
        model=model(),
        steps=4,
        save_every=2,
        options={"resume": True},
    )
    one, other = (load_file(r.weights / "adapter_model.safetensors") for r in (whole, again))
    assert list(one) == ["base_model.model.model.embed_tokens.trainable_tokens_delta"]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_that_were_trained_apart_at_a_tied_head_are_refused(tmp_path: Path) -> None:
    files.save(apply(battery.build("llama_tied"), [TOKENS]), tmp_path / "a", base="tiny")
    place = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(place)
    (rows,) = tensors.values()
    head = "base_model.model.lm_head.trainable_tokens_delta"
    save_file(tensors | {head: rows.clone()}, place, {"format": "pt"})
    files.load(battery.build("llama_tied"), tmp_path / "a")
    save_file(tensors | {head: rows + 1}, place, {"format": "pt"})
    with pytest.raises(AdapterError, match="trained apart"):
        files.load(battery.build("llama_tied"), tmp_path / "a")
    save_file({name: t[:-1].clone() for name, t in tensors.items()}, place, {"format": "pt"})
    with pytest.raises(AdapterError, match="rows"):
        files.load(battery.build("llama_tied"), tmp_path / "a")


def test_a_copy_of_a_tied_model_has_rows_of_its_own() -> None:
    import copy

    model = battery.build("llama_tied")
    edit = apply(model, [TOKENS])
    battery.train(model, edit)
    before = battery.logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.embed_tokens.trainable_tokens.rows.mul_(2)
    hidden = torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(battery.logits(model), before)
    rows = twin.model.embed_tokens.trainable_tokens.rows
    battery.close(twin.lm_head(hidden)[:, list(CHOSEN)], F.linear(hidden, rows))


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_no_row_has_stop_no_run_and_are_named(tmp_path: Path, tied: bool) -> None:
    """Rare tokens are what this is for: the first steps may well be without them. A tied row is in every softmax."""
    absent = (256, 258)
    lines: list[str] = []
    reporter = Silent()
    reporter.say = lines.append
    kit.run(
        tmp_path / "run",
        TrainableTokens(tokens=absent),
        model=tiny_llama(tie_word_embeddings=tied),
        steps=2,
        options={"reporter": reporter},
    )
    said = [line for line in lines if "did not change" in line]
    assert said == (
        []
        if tied
        else [
            "trainable_tokens: 2 tokens of 2 did not change, for no row that was seen has them: 256, 258"
        ]
    )


def test_what_is_never_reached_still_stops_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="did not learn"):
        kit.run(tmp_path / "run", Idle(tokens=(256,)), model=tiny_llama(), steps=2)


class Idle(TrainableTokens):
    """The control: the same without leave to be silent."""

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        edit = super().apply(model, undoable=undoable)
        rows_of(edit).silent_at_times = frozenset
        return edit


@pytest.mark.parametrize("indices", [[3, 9], {"embed_tokens": [9, 31, 2]}])
@pytest.mark.parametrize("model", ["llama", "llama_tied"])
def test_rows_in_a_loras_file_of_peft(tmp_path: Path, model: str, indices: Any) -> None:
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj"],
        trainable_token_indices=indices,
        task_type="CAUSAL_LM",
    )
    with battery.quiet():
        peer: Any = get_peft_model(battery.build(model), config)
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    with battery.quiet():
        peer.save_pretrained(str(tmp_path / "there"))
    mine = battery.build(model)
    edit = files.load(mine, tmp_path / "there")
    assert [technique.key for technique in edit.techniques] == ["trainable_tokens", "lora"]
    battery.close(battery.logits(mine), battery.logits(peer.eval()))
    battery.differs(battery.logits(mine), battery.base_logits(model))
    files.save(edit, tmp_path / "here", base="tiny")
    again = battery.build(model)
    files.load(again, tmp_path / "here")
    assert torch.equal(battery.logits(again), battery.logits(mine))
