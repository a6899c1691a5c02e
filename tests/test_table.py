"""The table: keys, order, clashes, and what is refused before anything is changed."""

from __future__ import annotations

import itertools

import pytest

from afina import table
from afina.errors import TechniqueError
from afina.table import CLASHES, ORDER, TECHNIQUES, apply, check
from afina.techniques.lora import LoRA
from tests import battery


def test_keys_are_those_of_the_order() -> None:
    assert set(TECHNIQUES) == set(ORDER)
    assert len(ORDER) == len(set(ORDER))
    assert all(technique.key == key for key, technique in TECHNIQUES.items())


def test_every_technique_has_defaults_and_a_word_on_each_setting() -> None:
    for technique in TECHNIQUES.values():
        technique()
        assert all(f.description for f in technique.model_fields.values())
        assert technique.__doc__


def test_clashes_are_pairs_in_the_order_with_a_reason() -> None:
    for (one, other), reason in CLASHES.items():
        assert ORDER.index(one) < ORDER.index(other)
        assert reason


@pytest.mark.parametrize("pair", CLASHES)
def test_every_clash_is_refused_both_ways(pair: tuple[str, str]) -> None:
    for keys in (pair, pair[::-1]):
        model = battery.build("llama")
        before = battery.picture(model)
        with pytest.raises(TechniqueError) as caught:
            apply(model, [TECHNIQUES[key]() for key in keys])
        assert CLASHES[pair] in str(caught.value)
        battery.same_picture(battery.picture(model), before)


def test_every_other_pair_composes() -> None:
    # As in the battery, for defaults are not made for so small a model.
    small = {c.technique.key: c.technique for c in reversed(battery.CASES) if c.model == "llama"}
    for pair in itertools.combinations(ORDER, 2):
        if pair not in CLASHES:
            model = battery.build("llama")
            before = battery.picture(model)
            apply(model, [small.get(key) or TECHNIQUES[key]() for key in pair]).undo()
            battery.same_picture(battery.picture(model), before)


def test_twice_is_refused() -> None:
    with pytest.raises(TechniqueError, match="given twice"):
        check([LoRA(rank=2), LoRA(rank=4)])


def test_techniques_act_in_the_order_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CLASHES", {})
    every = [technique() for technique in TECHNIQUES.values()]
    for given in (every, every[::-1]):
        assert [t.key for t in check(given)] == list(ORDER)


def test_no_technique_freezes_all() -> None:
    model = battery.build("llama")
    edit = apply(model, [])
    assert edit.trainable() == {}
    assert not any(p.requires_grad for p in model.parameters())
    edit.undo()
    assert all(p.requires_grad for p in model.parameters())
