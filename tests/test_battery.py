"""Every technique through every check of the battery, and the checks themselves through defects they must catch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from afina.table import TECHNIQUES
from afina.techniques.lora import LoRA, LoRADelta
from afina.tree import Edit
from tests import battery
from tests.battery import CASES, CHECKS, Case


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_battery(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_every_technique_of_the_table_is_in_the_battery() -> None:
    # Quantising has that of all others on it, `test_quantized_base`.
    every = set(TECHNIQUES) - set(battery.WITHOUT_ROWS)
    assert {case.technique.key for case in CASES} == every
    assert {case.technique.key for case in CASES if case.gone} == every


# --- controls: a defect put in on purpose must be caught ----------------------------------------------------------

CASE = Case("llama", LoRA(rank=4), folds=True, peft=True)
EMBEDDING = Case("llama", LoRA(rank=3, target=("embed_tokens",)), folds=True, peft=True)


def _scaled_up(self: LoRADelta, x: Tensor, y: Tensor, base: torch.nn.Module) -> Tensor:
    return y + 1.01 * torch.nn.functional.linear(x, self.scaling * self.b @ self.a)


def _loud_start(self: LoRADelta, seed: int) -> None:
    torch.nn.init.normal_(self.a)
    torch.nn.init.normal_(self.b)


def _detached(self: LoRADelta, x: Tensor, y: Tensor, base: torch.nn.Module) -> Tensor:
    return y + torch.nn.functional.linear(x, self.scaling * self.b @ self.a.detach())


@pytest.mark.parametrize(
    "check", [battery.folds, battery.peft_agrees, battery.equals_the_reference]
)
def test_a_wrong_scale_is_caught(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[Case], None]
) -> None:
    check(CASE)
    monkeypatch.setattr(LoRADelta, "forward", _scaled_up)
    with pytest.raises(AssertionError):
        check(CASE)


@pytest.mark.parametrize(
    "check", [battery.starts_as_the_base, battery.what_is_declared_trains_and_nothing_else]
)
def test_a_start_that_is_not_the_base_is_caught(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[Case], None]
) -> None:
    monkeypatch.setattr(LoRADelta, "reset", _loud_start)
    with pytest.raises(AssertionError):
        check(CASE)


def test_a_tensor_without_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRADelta, "forward", _detached)
    with pytest.raises(AssertionError):
        battery.what_is_declared_trains_and_nothing_else(CASE)


def test_an_undo_that_forgets_a_hook_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Edit.undo

    def forgets(self: Edit) -> None:
        right(self)
        self.model.get_submodule("model.norm").register_forward_hook(lambda *_: None)

    monkeypatch.setattr(Edit, "undo", forgets)
    with pytest.raises(AssertionError):
        battery.undo_restores(CASE)


def test_a_transposed_fold_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    battery.folds(EMBEDDING)
    right = LoRADelta.weight_delta
    monkeypatch.setattr(LoRADelta, "weight_delta", lambda self: right(self).flip(1))
    with pytest.raises(AssertionError):
        battery.folds(EMBEDDING)


def test_seeds_shared_between_places_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LoRADelta.reset
    monkeypatch.setattr(LoRADelta, "reset", lambda self, seed: right(self, 0))
    with pytest.raises(AssertionError):
        battery.seeds_fix_the_start(CASE)
