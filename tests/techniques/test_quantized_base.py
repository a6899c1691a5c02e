"""Every method on a quantised base: the battery's checks with a model whose weights are packed in the base's place."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.errors import TechniqueError
from afina.ops.packed import PackedWeight
from afina.table import TECHNIQUES
from afina.techniques.quantize import Quantize
from tests import battery
from tests.battery import CASES, CHECKS, Case

PLAIN_BUILD = battery.build
ALONE = {*battery.WITHOUT_ROWS, "full"}
"""Which is the base itself, which change no tensor, and which changes the very weights that are packed."""


def first_of_each() -> list[Case]:
    """The first row of every method, on each of its models that has linears."""
    seen: dict[str, Any] = {}
    for case in CASES:
        seen.setdefault(case.technique.key, case.technique)
    chosen = [c for c in CASES if c.technique is seen[c.technique.key]]
    return [c for c in chosen if c.technique.key not in ALONE and c.model in ("llama", "gpt2")]


def quantised(quantize: Quantize) -> Callable[..., Any]:
    """`battery.build` with packed weights."""

    def build(model: str, dtype: torch.dtype = torch.float64) -> Any:
        made = PLAIN_BUILD(model, dtype)
        for name in quantize.weights(made):
            target, _, own = name.rpartition(".")
            packed = quantize.packed(made.get_parameter(name), name)
            setattr(made.get_submodule(target), own, packed)
        return made

    return build


@pytest.fixture(params=["nf4", "int8"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The battery's models are quantised."""
    build = quantised(Quantize(kind=request.param))
    monkeypatch.setattr(battery, "build", build)
    monkeypatch.setattr(battery, "base_logits", lambda model: battery.logits(build(model)))
    return build


FAIR = [
    check
    for check in CHECKS
    if check not in (battery.model_saves_under_its_own_names, battery.works_on_meta)
]
"""Saving is refused, below; the meta device, on which the battery builds by itself, is in `test_quantize`."""


@pytest.mark.parametrize("check", FAIR, ids=lambda c: c.__name__)
@pytest.mark.parametrize("case", first_of_each(), ids=lambda c: c.name)
def test_battery_on_a_quantised_base(
    base: object, case: Case, check: Callable[[Case], None]
) -> None:
    check(case)


def test_every_method_of_the_table_is_tried() -> None:
    assert {case.technique.key for case in first_of_each()} == set(TECHNIQUES) - ALONE


def test_the_base_is_really_quantised(base: Callable[..., Any]) -> None:
    made = base("llama")
    assert sum(isinstance(p, PackedWeight) for p in made.parameters()) == 14
    battery.differs(battery.logits(made), battery.logits(PLAIN_BUILD("llama")))


@pytest.mark.parametrize("case", first_of_each(), ids=lambda c: c.name)
def test_a_quantised_model_is_not_saved_as_if_it_were_whole(base: object, case: Case) -> None:
    model, _ = battery.edited(case)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.raises(TechniqueError, match="cannot be saved as it is"),
    ):
        model.save_pretrained(folder)


# --- controls ----------------------------------------------------------------------------------------------------


def test_a_base_whose_values_change_is_caught(
    base: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = first_of_each()[0]
    battery.folds(case)
    right = PackedWeight.unpacked

    def wrong(self: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
        # As if a merge read other values than the products: the fold asks for the weight's own type.
        return right(self, dtype) * (1.0 if dtype is not None else 1.05)

    monkeypatch.setattr(PackedWeight, "unpacked", wrong)
    with pytest.raises(AssertionError):
        battery.folds(case)
