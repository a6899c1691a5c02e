"""Children around a module's `forward`: in order, on and off, undone, copied, recomputed and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from afina.models.blocks import Blocks
from afina.tree import Around, Edit, Technique
from tests import battery

BLOCK = "model.layers.0"


class Scaled(Around):
    """The block's result, times a number that trains."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) * self.factor


class Raised(Around):
    """The block's result, plus one."""

    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) + 1


class One(Technique):
    key: ClassVar[str] = "one"

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        edit = Edit(model, [self])
        edit.attach(BLOCK, self, Scaled(2.0))
        return edit


class Two(Technique):
    key: ClassVar[str] = "two"

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        edit = Edit(model, [self])
        edit.attach(BLOCK, self, Raised())
        return edit


def given(model: Any, name: str = BLOCK) -> Tensor:
    """What a block gives for IDS."""
    found: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, y: found.append(y))
    model(battery.IDS)
    handle.remove()
    return found[0]


def test_what_is_attached_later_stands_outside() -> None:
    model = battery.build("llama")
    before = given(model)
    Two().apply(model)
    one = One().apply(model)
    assert torch.equal(given(model), (before + 1) * 2)
    one.undo()
    assert torch.equal(given(model), before + 1)


def test_undo_leaves_no_trace() -> None:
    model = battery.build("llama")
    before = dict(vars(model.get_submodule(BLOCK)))
    edits = [One().apply(model), Two().apply(model)]
    assert "forward" in vars(model.get_submodule(BLOCK))
    for edit in edits:
        edit.undo()
    after = vars(model.get_submodule(BLOCK))
    assert set(after) == set(before)


def test_a_forward_that_was_set_before_goes_on_inside() -> None:
    model = battery.build("llama")
    block = model.get_submodule(BLOCK)
    own = block.forward
    block.forward = lambda *a, **k: own(*a, **k) - 3
    before = given(model)
    edit = One().apply(model)
    assert torch.equal(given(model), before * 2)
    edit.undo()
    assert torch.equal(given(model), before)


def test_switched_off_it_stands_aside() -> None:
    model = battery.build("llama")
    before = given(model)
    edit = One().apply(model)
    with edit.disabled():
        assert torch.equal(given(model), before)
    assert torch.equal(given(model), before * 2)


def test_a_deep_copy_runs_through_its_own_child() -> None:
    model = battery.build("llama")
    before = given(model)
    One().apply(model)
    other = copy.deepcopy(model)
    other.get_submodule(f"{BLOCK}.one").get_parameter("factor").data.fill_(5.0)
    assert torch.equal(given(other), before * 5)
    assert torch.equal(given(model), before * 2)


@pytest.mark.parametrize("way", ["recomputed", "compiled"])
def test_recomputed_and_compiled_it_does_the_same(way: str) -> None:
    model = battery.build("llama")
    edit = One().apply(model)
    factor = edit.trainable()[f"{BLOCK}.one.factor"]

    def gradient() -> Tensor:
        factor.grad = None
        battery.backward(model)
        assert factor.grad is not None
        return factor.grad.clone()

    plain = gradient()
    blocks = Blocks(model, recompute=way == "recomputed")
    with blocks.running():
        blocks.compile(way == "compiled")
        torch.testing.assert_close(gradient(), plain, rtol=1e-5, atol=1e-12)
