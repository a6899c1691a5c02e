"""Several edits on one model: they act together, and each is merged and goes in any order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from afina.adapters import files
from afina.adapters.fingerprint import base_fingerprint
from afina.errors import AdapterError, TechniqueError
from afina.table import apply
from afina.techniques.adalora import AdaLoRA
from afina.techniques.bitfit import BitFit
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.p_tuning import PTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.quantize import Quantize
from afina.techniques.trainable_tokens import TrainableTokens
from afina.tree import Edit, Technique
from tests import battery

A = LoRA(rank=3, alpha=6.0, rslora=True, target=("all-linear",))
B = LoRA(rank=5, target=("q_proj", "v_proj", "up_proj"))


def put(model: Any, *techniques: Technique, seed: int = 3) -> Edit:
    """An edit of random values, larger than a start's."""
    edit = apply(model, techniques)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return edit


def changes(edit: Edit) -> dict[str, Tensor]:
    """What each child of a LoRA adds to the weight of its module, as that lies."""
    return {
        name.rpartition(".")[0]: d.weight_delta().t() if d.transposed else d.weight_delta()
        for name, d in edit.deltas.items()
    }


def written_out(name: str, *added: dict[str, Tensor]) -> Tensor:
    """The logits of the base with these sums in its weights."""
    model = battery.build(name)
    with torch.no_grad():
        for change in added:
            for place, delta in change.items():
                model.get_submodule(place).weight.add_(delta)
    return battery.logits(model)


# --- acting together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_two_loras_act_as_the_sum_of_their_changes(name: str) -> None:
    model = battery.build(name)
    one = put(model, LoRA(rank=3, rslora=True))
    two = put(model, LoRA(rank=4, layers="-1"), seed=4)
    both = battery.logits(model)
    battery.close(both, written_out(name, changes(one), changes(two)), 1e-6)
    battery.differs(both, written_out(name, changes(one)))
    with two.disabled():
        assert torch.equal(battery.logits(model), alone(name, one, LoRA(rank=3, rslora=True)))
    with one.disabled(), two.disabled():
        assert torch.equal(battery.logits(model), battery.base_logits(name))
    assert torch.equal(battery.logits(model), both)


def alone(name: str, edit: Edit, technique: Technique) -> Tensor:
    """The logits of another model with this edit's values alone."""
    other = battery.build(name)
    again = apply(other, [technique])
    with torch.no_grad():
        for mine, theirs in zip(again.trainable().values(), edit.trainable().values(), strict=True):
            mine.copy_(theirs)
    return battery.logits(other)


def test_three_of_other_kinds_act_together() -> None:
    """LoRA and AdaLoRA add up, and IA3 multiplies what it is given: the first of all is the first to act."""
    model = battery.build("llama")
    one, two = put(model, A), put(model, AdaLoRA(init_rank=2, target_rank=2, alpha=80.0), seed=4)
    three = put(model, IA3(), seed=5)
    got = battery.logits(model)
    reference = battery.build("llama")
    with torch.no_grad():
        for change in (changes(one), changes(two)):
            for place, delta in change.items():
                reference.get_submodule(place).weight.add_(delta)
        for name, delta in three.deltas.items():
            reference.get_submodule(name.rpartition(".")[0]).weight.mul_(delta.l)
    battery.close(got, battery.logits(reference), 1e-6)


def test_two_on_the_experts_act_as_their_sum_and_one_can_be_off() -> None:
    for eager in ("eager", "grouped_mm"):
        model = battery.build("mixtral", torch.float32)
        model.set_experts_implementation(eager)
        base = battery.logits(model)
        one = put(model, LoRA(rank=2, target=("experts",)))
        first = battery.logits(model)
        two = put(model, LoRA(rank=3, target=("down_proj",)), seed=4)
        both = battery.logits(model)
        battery.differs(both, first)
        reference = battery.build("mixtral", torch.float32)
        reference.set_experts_implementation(eager)
        with torch.no_grad():
            for edit in (one, two):
                for name, delta in edit.deltas.items():
                    for own, path in delta.weights().items():
                        module = reference.get_submodule(name.rpartition(".")[0])
                        module.get_parameter(own).add_(path.weight_delta())
        battery.close(both, battery.logits(reference), 1e-4)
        two.off()
        assert torch.equal(battery.logits(model), first)
        one.off()
        assert torch.equal(battery.logits(model), base)
        two.on()
        one.undo()
        battery.differs(battery.logits(model), base)
        two.undo()
        assert torch.equal(battery.logits(model), base)


def test_tokens_of_their_own_act_together() -> None:
    model = battery.build("llama_tied")
    put(model, TrainableTokens(tokens=(7, 3)))
    put(model, TrainableTokens(tokens=(22,)), seed=4)
    got = battery.logits(model)
    reference = battery.build("llama_tied")
    rows = {i: r for m in model.modules() for i, r in _rows(m)}
    with torch.no_grad():
        for token, row in rows.items():
            reference.model.embed_tokens.weight[token] = row
    battery.close(got, battery.logits(reference), 1e-6)
    with pytest.raises(TechniqueError, match="row of its own for the same tokens"):
        apply(model, [TrainableTokens(tokens=(9, 22))])


def _rows(module: nn.Module) -> Sequence[tuple[int, Tensor]]:
    ids, rows = getattr(module, "ids", ()), getattr(module, "rows", None)
    return list(zip(ids, rows, strict=True)) if isinstance(rows, nn.Parameter) else []


def test_dropout_and_gradients_are_those_of_the_one_that_trains() -> None:
    """Of two the later trains: its gradients are those beside a base with the first written in."""
    model = battery.build("llama")
    one = put(model, A.model_copy(update={"dropout": 0.4}))
    model.eval()
    two = put(model, B, seed=4)
    battery.backward(model)
    other = battery.build("llama")
    with torch.no_grad():
        for place, delta in changes(one).items():
            other.get_submodule(place).weight.add_(delta)
    again = apply(other, [B])
    with torch.no_grad():
        for mine, theirs in zip(again.trainable().values(), two.trainable().values(), strict=True):
            mine.copy_(theirs)
    battery.backward(other)
    assert all(p.grad is None for p in one.trainable().values())
    for mine, theirs in zip(two.trainable().values(), again.trainable().values(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        battery.close(mine.grad, theirs.grad, 1e-6)


def test_answers_with_a_cache_are_those_without() -> None:
    model = battery.build("llama")
    put(model, A)
    two = put(model, B, seed=4)
    two.scale(0.5, "self_attn")
    kwargs: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(battery.IDS, **kwargs)
    assert torch.equal(cached, model.generate(battery.IDS, use_cache=False, **kwargs))
    merged = copy.deepcopy(model)
    assert torch.equal(cached, merged.generate(battery.IDS, **kwargs))  # a copy acts by its own
    two.off()
    assert not torch.equal(cached, model.generate(battery.IDS, **kwargs))


def test_peft_says_the_same_with_both_active(tmp_path: Path) -> None:
    model = battery.build("llama")
    one, two = put(model, A), put(model, B, seed=4)
    for name, edit in (("one", one), ("two", two)):
        files.save(edit, tmp_path / name, base="tiny")
    with battery.quiet():
        theirs: Any = PeftModel.from_pretrained(
            battery.build("llama"), str(tmp_path / "one"), adapter_name="one"
        )
        theirs.load_adapter(str(tmp_path / "two"), "two")
        theirs.base_model.set_adapter(["one", "two"])
        battery.close(battery.logits(model), battery.logits(theirs.double()), 1e-5)


# --- what cannot --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (DoRA(rank=2), DoRA(rank=2), "acts at"),
        (DoRA(rank=2), LoRA(rank=2), "lora and dora cannot be combined"),
        (PromptTuning(tokens=2), PromptTuning(tokens=3), "which of them comes first is not said"),
        (PromptTuning(tokens=2), PTuning(tokens=3), "prompt and p_tuning cannot be combined"),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_what_cannot_act_together_is_refused(
    first: Technique, second: Technique, says: str
) -> None:
    model = battery.build("llama")
    put(model, first)
    before, answer = battery.picture(model), battery.logits(model)
    with pytest.raises(TechniqueError, match=says):
        apply(model, [second])
    battery.same_picture(battery.picture(model), before)
    assert torch.equal(battery.logits(model), answer)


# --- going --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_undone_in_any_order_it_is_the_base(order: tuple[int, ...]) -> None:
    model = battery.build("llama_tied")
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)
    before, answer = battery.picture(model), battery.logits(model)
    edits = [
        put(model, LoRA(rank=3, modules_to_save=("norm",)), IA3()),
        put(model, B, seed=4),
        put(model, LoRA(rank=2), BitFit(target=("q_proj",)), seed=5),
    ]
    said = {frozenset(range(3)): battery.logits(model)}
    for number in order:
        edits[number].undo()
        said[frozenset(n for n, e in enumerate(edits) if not e.undone)] = battery.logits(model)
    battery.same_picture(battery.picture(model), before)
    assert torch.equal(battery.logits(model), answer)
    assert len({tuple(logits.flatten().tolist()) for logits in said.values()}) == 4


@pytest.mark.parametrize("first_goes_first", [True, False])
def test_one_tensor_that_two_trained_is_the_bases_again(first_goes_first: bool) -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    one = put(model, Full(target=("norm",)))
    two = put(model, Full(target=("norm",)), seed=4)
    kept = model.model.norm.weight.detach().clone()
    if first_goes_first:
        two.off()
        two.on()
        one.undo()
        assert torch.equal(model.model.norm.weight, kept)  # the second still acts
        with two.disabled():
            assert torch.equal(battery.logits(model), battery.base_logits("llama"))
        two.undo()
    else:
        two.undo()
        one.undo()
    battery.same_picture(battery.picture(model), before)


# --- merging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("out", [(0, 1), (1, 0)], ids=str)
def test_merged_and_unmerged_in_any_order(merged: tuple[int, ...], out: tuple[int, ...]) -> None:
    model = battery.build("llama_tied", torch.float32)
    base = battery.picture(model)
    edits = [put(model, LoRA(rank=3, target=("all-linear", "lm_head"))), put(model, B, seed=4)]
    said = battery.logits(model)
    for number in merged:
        edits[number].merge()
    battery.close(battery.logits(model), said, 1e-4)
    assert not model.config.tie_word_embeddings
    with edits[0].disabled():
        rest = battery.logits(model)
    edits[out[0]].unmerge()
    battery.close(battery.logits(model), said, 1e-4)
    edits[out[1]].unmerge()
    assert model.config.tie_word_embeddings
    edits[0].off()
    battery.close(battery.logits(model), rest, 1e-4)
    for edit in edits:
        edit.undo()
    battery.same_picture(battery.picture(model), base)


def test_undone_while_the_other_is_merged() -> None:
    model = battery.build("llama")
    base = battery.picture(model)
    one, two = put(model, LoRA(rank=3, modules_to_save=("norm",))), put(model, B, seed=4)
    one.merge()
    two.merge()
    one.undo()
    battery.close(battery.logits(model), written_out("llama", changes(two)), 1e-6)
    two.undo()
    battery.same_picture(battery.picture(model), base)


def test_what_does_not_add_up_is_not_merged_alone() -> None:
    model = battery.build("llama")
    one, two = put(model, A), put(model, IA3(), seed=4)
    before = battery.picture(model)
    for edit in (one, two):
        with pytest.raises(TechniqueError, match="does not simply add up"):
            edit.merge()
    battery.same_picture(battery.picture(model), before)
    two.off()
    one.merge()
    battery.close(battery.logits(model), written_out("llama", changes(one)), 1e-6)


def test_what_was_merged_first_is_kept_first() -> None:
    model = battery.build("llama")
    one, two = put(model, A), put(model, B, seed=4)
    said = battery.logits(model)
    one.merge()
    two.merge()
    with pytest.raises(TechniqueError, match="merged before this one"):
        two.keep()
    one.keep()
    two.unmerge()
    battery.close(battery.logits(model), said, 1e-6)
    two.undo()
    battery.close(battery.logits(model), written_out("llama", changes(one)), 1e-6)


def test_nothing_trains_in_place_where_another_is_folded_in() -> None:
    model = battery.build("llama")
    one = put(model, LoRA(rank=2, target=("lm_head",)))
    one.merge()
    with pytest.raises(TechniqueError, match="unmerge the earlier edit first"):
        apply(model, [Full(target=("lm_head",))])
    one.unmerge()
    apply(model, [Full(target=("lm_head",))])


# --- from the disk ------------------------------------------------------------------------------------------------


def test_loaded_beside_one_another(tmp_path: Path) -> None:
    """The second is compared with the base itself, whatever the first trained of it in place, merged or not."""
    for name, technique in (("one", LoRA(rank=3, modules_to_save=("lm_head",))), ("two", B)):
        edit = put(battery.build("llama"), technique, seed=len(name))
        files.save(edit, tmp_path / name, base="tiny")
    model = battery.build("llama")
    base = base_fingerprint(model)
    one = files.load(model, tmp_path / "one")
    assert base_fingerprint(model) == base
    two = files.load(model, tmp_path / "two")
    assert "its base is this model, by fingerprint" in two.notes
    both = battery.logits(model)
    one.merge()
    assert base_fingerprint(model) == base
    two.undo()
    again = files.load(model, tmp_path / "two")
    battery.close(battery.logits(model), both, 1e-5)
    with pytest.raises(AdapterError, match="tensor whole that an adapter which is there has too"):
        files.load(model, tmp_path / "one")
    again.undo()
    one.undo()
    assert torch.equal(battery.logits(model), battery.base_logits("llama"))


def test_what_is_trained_beside_another_says_so() -> None:
    model = battery.build("llama")
    assert not put(model, A).notes
    assert any("learns beside what is there" in note for note in put(model, B).notes)


# --- on a quantised base ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_on_a_quantised_base_they_add_up_merge_and_go(kind: str) -> None:
    """The first edit quantises, and so goes last; the second finds its work."""
    model = battery.build("llama", torch.float32)
    before = battery.picture(model)
    base = put(model, Quantize(kind="nf4" if kind == "nf4" else "int8"))
    rounded = battery.logits(model)
    one, two = put(model, A), put(model, B, seed=4)
    one.scale(0.5)
    both = battery.logits(model)
    reference = battery.build("llama", torch.float32)
    with torch.no_grad():
        for name in base.techniques[0].weights(reference):  # pyright: ignore[reportAttributeAccessIssue]
            reference.get_parameter(name).copy_(model.get_parameter(name).unpacked())
        for share, edit in ((0.5, one), (1.0, two)):
            for place, delta in changes(edit).items():
                reference.get_submodule(place).weight.add_(share * delta)
    battery.close(both, battery.logits(reference), 1e-4)
    two.merge()
    one.merge()
    battery.close(battery.logits(model), both, 1e-4)
    two.unmerge()
    one.undo()
    two.off()
    assert torch.equal(battery.logits(model), rounded)
    two.undo()
    base.undo()
    battery.same_picture(battery.picture(model), before)
