"""An edit acts more, less, in part or not at all, while it stays attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.adapters import files
from afina.errors import AdapterError, RunError, TechniqueError
from afina.table import apply
from afina.techniques.bitfit import BitFit
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.train.fit import refuse_unfit
from afina.tree import Edit
from tests import battery
from tests.battery import Case
from tests.test_beside import put

SEEN = [case for case in battery.CASES if case.gone is not None]
"""Every technique on every model that it knows, once."""
FOLDING = [case for case in SEEN if case.folds or case.technique.key == "full"]


def base_and_changed(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of the base, and those of the model with the change in its weights, by name."""
    before = {
        n: p.detach().clone()
        for n, p in battery.build(case.model).named_parameters(remove_duplicate=False)
    }
    model, edit = battery.edited(case, moved=True)
    if case.folds:
        battery.fold(edit)
    after = dict(model.named_parameters(remove_duplicate=False))
    return before, {n: p.detach() for n, p in after.items()}


# --- on and off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.name)
def test_off_is_the_base_and_on_is_as_before_bit_for_bit(case: Case) -> None:
    model, edit = battery.edited(case, moved=True)
    base, changed = battery.base_logits(case.model), battery.logits(model)
    battery.differs(changed, base)
    edit.off()
    assert torch.equal(battery.logits(model), base)
    edit.on()
    assert torch.equal(battery.logits(model), changed)
    edit.scale(0)
    assert torch.equal(battery.logits(model), base)
    with edit.disabled():
        assert torch.equal(battery.logits(model), base)
    assert torch.equal(battery.logits(model), base)
    edit.scale(1)
    assert torch.equal(battery.logits(model), changed)
    edit.off()
    edit.undo()
    assert torch.equal(battery.logits(model), base)


def test_off_in_mid_answer_the_cache_is_what_it_was_filled_with() -> None:
    """What is off answers as the base does, with its own cache."""
    model = battery.build("llama")
    kwargs: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    base = model.generate(battery.IDS, **kwargs)
    edit = put(model, LoRA(rank=3))
    changed = model.generate(battery.IDS, **kwargs)
    assert not torch.equal(changed, base)
    edit.off()
    assert torch.equal(model.generate(battery.IDS, **kwargs), base)
    edit.on()
    assert torch.equal(model.generate(battery.IDS, **kwargs), changed)


# --- more and less ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FOLDING, ids=lambda case: case.name)
@pytest.mark.parametrize("factor", [0.5, -1.0])
def test_scaled_it_is_a_base_with_that_much_of_the_change(case: Case, factor: float) -> None:
    before, after = base_and_changed(case)
    model, edit = battery.edited(case, moved=True)
    edit.scale(factor)
    got = battery.logits(model)
    other = battery.build(case.model)
    own = dict(other.named_parameters(remove_duplicate=False))
    added = set(after) - set(before)
    if added:  # biases that the base has not
        apply(other, [BitFit(target=tuple(sorted({n.rpartition(".")[0] for n in added})))])
    with torch.no_grad():
        if case.model == "llama_tied" and not torch.equal(
            after["lm_head.weight"], after["model.embed_tokens.weight"]
        ):
            pytest.fail("the reference must not part what is tied")
        for name, old in before.items():
            own[name].copy_(old + factor * (after[name] - old))
        for name in added:
            place = other.get_submodule(name.rpartition(".")[0])
            place.bitfit.bias.copy_(factor * after[name])
    battery.differs(got, battery.base_logits(case.model))
    battery.close(got, battery.logits(other), 1e-5)
    if case.folds:
        edit.merge()
        battery.close(battery.logits(model), got, 1e-5)


@pytest.mark.parametrize(
    "bottleneck",
    [Bottleneck(width=4), Bottleneck(kind="scaled_parallel", width=4, scaling="learned")],
    ids=["houlsby", "scaled_parallel"],
)
def test_a_scaled_bottleneck_is_one_whose_second_map_is_scaled(bottleneck: Bottleneck) -> None:
    model = battery.build("llama")
    edit = put(model, bottleneck)
    edit.scale(0.3)
    got = battery.logits(model)
    edit.scale(1)
    with torch.no_grad():
        for delta in edit.deltas.values():
            delta.get_parameter("up").mul_(0.3)
            delta.get_parameter("up_bias").mul_(0.3)
    battery.close(got, battery.logits(model), 1e-6)


def test_in_halves_no_digit_of_the_change_is_lost_first() -> None:
    """In bf16 a scaled LoRA is bit for bit one whose alpha is scaled."""
    model = battery.build("llama", torch.bfloat16)
    put(model, LoRA(rank=3, alpha=8.0)).scale(0.25)
    other = battery.build("llama", torch.bfloat16)
    put(other, LoRA(rank=3, alpha=2.0))
    assert torch.equal(battery.logits(model), battery.logits(other))


# --- parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        (("self_attn",), lambda name: ".self_attn." in name),
        (("q_proj", "layers.1.mlp"), lambda name: "q_proj" in name or "layers.1.mlp" in name),
        (("layers.0",), lambda name: ".layers.0." in name),
        (("*.mlp.*_proj",), lambda name: ".mlp." in name),
    ],
    ids=["attention", "two", "a block", "a glob"],
)
def test_a_part_is_scaled_and_switched_alone(parts: tuple[str, ...], chosen: Any) -> None:
    model = battery.build("llama")
    edit = put(model, LoRA(rank=3))
    whole = battery.logits(model)
    for share, change in ((0.4, lambda: edit.scale(0.4, *parts)), (0.0, lambda: edit.off(*parts))):
        change()
        got = battery.logits(model)
        other = battery.build("llama")
        counted = 0
        with torch.no_grad():
            for name, delta in edit.deltas.items():
                counted += chosen(name)
                factor = share if chosen(name) else 1.0
                place = other.get_submodule(name.rpartition(".")[0])
                place.weight.add_(factor * delta.weight_delta())
        assert 0 < counted < len(edit.deltas)
        battery.close(got, battery.logits(other), 1e-6)
    edit.on(*parts)
    assert {edit.strengths[n] for n in edit.deltas if chosen(n)} == {0.4}
    edit.scale(1, *parts)
    with edit.disabled(*parts):
        assert torch.equal(battery.logits(model), got)
    assert torch.equal(battery.logits(model), whole)


def test_a_technique_of_several_is_a_part() -> None:
    model = battery.build("llama")
    edit = put(model, LoRA(rank=3), IA3())
    edit.off("ia3")
    got = battery.logits(model)
    edit.on("ia3")
    with torch.no_grad():
        for delta in edit.deltas_of(edit.techniques[1]).values():
            delta.get_parameter("l").fill_(1.0)
    battery.close(battery.logits(model), got, 1e-12)


def test_a_tensor_trained_in_place_is_a_part() -> None:
    model = battery.build("llama")
    edit = put(model, LoRA(rank=2, modules_to_save=("lm_head",)))
    before, trained = battery.build("llama").lm_head.weight, model.lm_head.weight.detach().clone()
    edit.scale(0.5, "lm_head")
    battery.close(model.lm_head.weight, (before + trained) / 2, 1e-12)
    assert edit.strengths["lm_head.weight"] == 0.5
    edit.off("lm_head")
    assert torch.equal(model.lm_head.weight, before)
    edit.on("lm_head")
    battery.close(model.lm_head.weight, (before + trained) / 2, 1e-12)
    edit.scale(1)
    assert torch.equal(model.lm_head.weight, trained)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = battery.build("llama")
    edit = put(model, LoRA(rank=2), PromptTuning(tokens=2))
    before = battery.logits(model)
    for factor in (float("nan"), float("inf"), "0.5", True, None):
        with pytest.raises(TechniqueError, match="a number of times"):
            edit.scale(factor)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TechniqueError, match=r"(?s)nothing in this model matches.*q_proj"):
        edit.scale(0.5, "q_prpj")
    with pytest.raises(TechniqueError, match="named by a pattern"):
        edit.off(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TechniqueError, match=r"(?s)does not act more or less.*prompt"):
        edit.scale(0.5)
    assert torch.equal(battery.logits(model), before)
    edit.scale(0.5, "lora")  # the cure
    battery.differs(battery.logits(model), before)
    lost = apply(battery.build("llama"), [Full(target=("norm",))], undoable=False)
    for change in (lost.off, lambda: lost.scale(0.5)):
        with pytest.raises(TechniqueError, match="undoable=True"):
            change()


def test_what_is_merged_is_not_scaled() -> None:
    edit = put(battery.build("llama"), LoRA(rank=2))
    edit.merge()
    for change in (edit.off, edit.on, lambda: edit.scale(0.5)):
        with pytest.raises(TechniqueError, match=r"(?s)the edit is merged.*unmerge"):
            change()
    edit.unmerge()
    edit.off()
    with pytest.raises(TechniqueError, match="disabled"):
        edit.merge()


def test_what_is_scaled_is_neither_saved_nor_trained(tmp_path: Path) -> None:
    """Its files would say what was trained, and training what is scaled."""
    edit = put(battery.build("llama"), LoRA(rank=2, modules_to_save=("norm",)))
    changes: list[tuple[Any, str]] = [
        (lambda: edit.scale(0.5), "scaled or partly off"),
        (lambda: edit.off("q_proj"), "scaled or partly off"),
        (lambda: edit.off("norm"), "scaled or partly off"),
        (edit.off, "disabled"),
    ]
    for change, says in changes:
        change()
        with pytest.raises(AdapterError, match=says):
            files.save(edit, tmp_path / "out", base="tiny")
        with pytest.raises(RunError, match=r"edit\.on"):
            refuse_unfit(edit.model, edit)
        edit.on()
        edit.scale(1)
    files.save(edit, tmp_path / "out", base="tiny")
    refuse_unfit(edit.model, edit)


def test_dora_scaled_is_a_part_of_the_way_and_merges_so() -> None:
    model = battery.build("gpt2")
    edit = put(model, DoRA(rank=3))
    whole: dict[str, Tensor] = {}
    for name, delta in edit.deltas.items():
        place = name.rpartition(".")[0]
        weight = model.get_submodule(place).weight.detach()
        whole[place] = delta.fold_weight(weight.t().clone()).t() - weight
    edit.scale(1.5)
    got = battery.logits(model)
    other = battery.build("gpt2")
    with torch.no_grad():
        for place, change in whole.items():
            other.get_submodule(place).weight.add_(1.5 * change)
    battery.close(got, battery.logits(other), 1e-9)
    edit.merge()
    battery.close(battery.logits(model), got, 1e-9)


def test_an_edit_of_nothing_is_switched_to_no_effect() -> None:
    edit = Edit(battery.build("llama"), [])
    edit.off()
    edit.on()
    assert edit.whole_strength
