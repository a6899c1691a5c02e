"""Every pair of techniques outside CLASHES works in one run: trained, saved in one folder, loaded, undone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

from afina.adapters import files
from afina.adapters.contents import is_adapter
from afina.errors import TechniqueError
from afina.table import CLASHES, TECHNIQUES, apply
from afina.techniques.quantize import Quantize
from afina.techniques.token_pruning import TokenPruning
from afina.tree import Technique
from tests import battery

PACKED = Quantize(block=8)
SMALL: dict[str, Technique] = {"quantize": PACKED, "token_pruning": TokenPruning(score="random")}
SMALL |= {
    case.technique.key: case.technique for case in reversed(battery.CASES) if case.model == "llama"
}
"""A value of each technique: that of its first row in the battery."""
SMALL |= {key: TECHNIQUES[key]() for key in battery.WITHOUT_ROWS if key not in SMALL}


def values(pair: Sequence[str]) -> list[Technique]:
    """Those of a pair; of two that train nothing, with what trains beside them."""
    trains = not set(pair).issubset(battery.WITHOUT_ROWS)
    return [SMALL[key] for key in pair] + ([] if trains else [SMALL["lora"]])


def clash(one: str, other: str) -> bool:
    return (one, other) in CLASHES or (other, one) in CLASHES


EVERY = tuple(combinations(TECHNIQUES, 2))
PAIRS = tuple(pair for pair in EVERY if not clash(*pair))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_composes(pair: tuple[str, str], tmp_path: Path) -> None:
    techniques = values(pair)
    model = battery.build("llama")
    before = battery.picture(model)
    answer = battery.logits(model)
    edit = apply(model, techniques)
    battery.train(model, edit, steps=1)
    battery.backward(model)
    assert all(p.grad is not None for p in edit.trainable().values())
    model.zero_grad()
    battery.train(model, edit)
    changed = battery.logits(model)
    battery.differs(changed, answer)
    _each_counts(edit, changed)
    if is_adapter(edit):
        files.save(edit, tmp_path / "adapter", base="tiny")
        other = battery.build("llama")
        if PACKED in techniques:
            apply(other, [PACKED])
        answer = battery.logits(other)
        loaded = files.load(other, tmp_path / "adapter")
        assert torch.equal(battery.logits(other), changed)
        loaded.undo()
        assert torch.equal(battery.logits(other), answer)
    edit.undo()
    battery.same_picture(battery.picture(model), before)


def _each_counts(edit: battery.Edit, changed: torch.Tensor) -> None:
    """With the children of one technique off, the model says something else."""
    for technique in edit.techniques:
        deltas = edit.deltas_of(technique).values()
        if not any(next(delta.parameters(), None) is not None for delta in deltas):
            continue
        for delta in deltas:
            delta.enabled = False
        battery.differs(battery.logits(edit.model), changed)
        for delta in deltas:
            delta.enabled = True
    assert torch.equal(battery.logits(edit.model), changed)


@pytest.mark.parametrize("pair", [p for p in EVERY if clash(*p)], ids="+".join)
def test_a_clash_is_refused_with_its_reason(pair: tuple[str, str]) -> None:
    with pytest.raises(TechniqueError, match=r"cannot be combined: .{20}"):
        apply(battery.build("llama"), [SMALL[key] for key in pair])


def test_clashes_name_techniques_in_the_order_in_which_they_act() -> None:
    from afina.table import ORDER

    assert set(ORDER) == set(TECHNIQUES)
    for one, other in CLASHES:
        assert ORDER.index(one) < ORDER.index(other)
