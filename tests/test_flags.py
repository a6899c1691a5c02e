"""What acts and what trains are two things: no loading, switching or merging turns a tensor's training on or off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from afina.adapters import files
from afina.errors import RunError
from afina.optim.optimisers import Optimiser
from afina.table import apply
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.train.fit import refuse_unfit
from afina.tree import Edit
from tests import battery


def trains(model: nn.Module) -> set[str]:
    """Names of the tensors that autograd gives a gradient."""
    return {name for name, p in model.named_parameters() if p.requires_grad}


def edited(*, whole: bool = True) -> Edit:
    """A LoRA that was trained a little, with or without a module that trains whole."""
    saved = ("lm_head",) if whole else ()
    edit = apply(battery.build("llama"), [LoRA(rank=2, modules_to_save=saved)])
    battery.train(edit.model, edit)
    return edit


def test_what_trains_is_what_the_edit_and_the_optimiser_hold() -> None:
    edit = edited()
    optimiser = Optimiser(edit.trainable(), edit.lr_scales(), "adamw", {"lr": 1e-3})
    held = {id(p) for group in optimiser.inner.param_groups for p in group["params"]}
    flagged = {id(p) for p in edit.model.parameters() if p.requires_grad}
    assert held == flagged == {id(p) for p in edit.trainable().values()}


def test_switching_off_and_on_leaves_it() -> None:
    edit = edited()
    before = trains(edit.model)
    assert before
    with edit.disabled():
        assert trains(edit.model) == before
    assert trains(edit.model) == before
    edit.model.train()
    assert trains(edit.model) == before
    edit.model.eval()
    assert trains(edit.model) == before


def test_merging_and_unmerging_leave_it() -> None:
    edit = edited(whole=False)
    before = trains(edit.model)
    edit.merge()
    assert trains(edit.model) == before
    edit.unmerge()
    assert trains(edit.model) == before


def test_a_loaded_adapter_trains_what_it_trained(tmp_path: Path) -> None:
    edit = edited()
    files.save(edit, tmp_path / "adapter", base="tiny")
    assert trains(files.load(battery.build("llama"), tmp_path / "adapter").model) == trains(
        edit.model
    )


def test_the_last_edit_trains_and_its_undo_gives_every_flag_back() -> None:
    """An edit under another one acts on and does not train: a run of it is refused, with the way out."""
    first = edited()
    before, answer = trains(first.model), battery.logits(first.model)
    second = apply(first.model, [IA3()])
    assert trains(first.model) == set(second.trainable())
    assert torch.equal(
        battery.logits(first.model), answer
    )  # the first acts, and the second starts as 1
    with pytest.raises(RunError, match="lies under a later one"):
        refuse_unfit(first.model, first)
    refuse_unfit(first.model, second)
    second.undo()
    assert trains(first.model) == before
    refuse_unfit(first.model, first)


def test_an_edit_that_goes_before_a_later_one_leaves_its_flags() -> None:
    first = edited(whole=False)
    model = first.model
    second = apply(model, [LoRA(rank=3, modules_to_save=("lm_head",))])
    mine = trains(model)
    assert mine == set(second.trainable())
    first.undo()
    assert trains(model) == mine
    refuse_unfit(model, second)
    second.undo()
    assert trains(model) == {name for name, _ in model.named_parameters()}


def test_peft_turns_flags_on_and_off(tmp_path: Path) -> None:
    """The control: there, choosing an adapter that was loaded to answer makes it train; switching off freezes."""

    def flags(model: Any) -> set[bool]:
        return {p.requires_grad for n, p in model.named_parameters() if "lora_" in n}

    with battery.quiet():
        made: Any = get_peft_model(
            battery.build("llama"), LoraConfig(r=2, target_modules=["q_proj"])
        )
        made.save_pretrained(str(tmp_path))
        model: Any = PeftModel.from_pretrained(battery.build("llama"), str(tmp_path))
        assert flags(model) == {False}
        model.set_adapter("default")
        assert flags(model) == {True}
        with model.disable_adapter():
            assert flags(model) == {False}
