"""The only code that changes a model: patterns, attaching, flags, nesting, undo, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from afina import seams
from afina.counts import format_counts, parameter_counts
from afina.errors import TechniqueError
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA, LoRADelta
from afina.tree import Delta, Edit, match, matches, seed_of, stands_on
from tests import battery

Q0 = "model.layers.0.self_attn.q_proj"
NAMES = [f"model.layers.{i}.self_attn.{p}" for i in (0, 1, 11) for p in ("q_proj", "v_proj")]


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        (Q0, True),
        ("model.layers.*.q_proj", True),
        ("layers.0.*", True),
        ("*_proj", True),
        ("layers.[0-3].*", True),
        ("proj", False),
        ("attn.q_proj", False),
        ("v_proj", False),
        ("layers.1.*", False),
        ("Q_PROJ", False),
    ],
)
def test_patterns(pattern: str, fits: bool) -> None:
    assert matches(Q0, pattern) is fits


def test_match_keeps_the_order_of_the_names() -> None:
    assert match(NAMES, ["v_proj", "layers.1.self_attn.q_proj"], setting="x") == [
        NAMES[1], NAMES[2], NAMES[3], NAMES[5]
    ]  # fmt: skip


def test_match_names_every_pattern_that_fits_nothing() -> None:
    with pytest.raises(TechniqueError) as caught:
        match(NAMES, ["q_proj", "q_prj", "zzz"], setting="lora.target")
    said = str(caught.value)
    assert said.startswith("lora.target: nothing in this model matches")
    assert "'q_prj', 'zzz'" in said
    assert "for 'q_prj' perhaps q_proj" in said
    assert "for 'zzz' perhaps q_proj, v_proj" in said


@given(st.integers(0, 2**40), st.text(max_size=20))
def test_seeds_are_63_bits_and_differ_by_name(seed: int, name: str) -> None:
    assert 0 <= seed_of(seed, name) < 2**63
    assert seed_of(seed, name) == seed_of(seed, name)
    assert seed_of(seed, name) != seed_of(seed, name + "x")
    assert seed_of(seed, name) != seed_of(seed + 1, name)


def test_a_seed_is_the_same_for_ever() -> None:
    # sha256("0:x"), first eight bytes, little end first, halved.
    assert seed_of(0, "x") == 8_599_623_748_626_867_949


def test_an_edit_freezes_and_its_undo_puts_flags_back() -> None:
    model = battery.build("llama")
    flags = {n: i % 2 == 0 for i, (n, _) in enumerate(model.named_parameters())}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags[name])
    edit = Edit(model, [])
    edit.stand()
    assert not any(p.requires_grad for p in model.parameters())
    assert [stand.edit() for stand in stands_on(model)] == [edit]
    edit.undo()
    assert not stands_on(model)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags


# --- edits --------------------------------------------------------------------------------------------------------


def test_values_do_not_depend_on_what_else_is_there() -> None:
    alone = apply(battery.build("llama"), [LoRA(rank=4, target=("q_proj",))], seed=3).trainable()
    many = apply(battery.build("llama"), [LoRA(rank=4, modules_to_save=("norm",))], seed=3)
    assert set(alone) < set(many.trainable())
    for name, parameter in alone.items():
        assert torch.equal(parameter, many.trainable()[name])
    starts = [p for n, p in alone.items() if n.endswith(".a")]
    assert not torch.equal(starts[0], starts[1])


def test_values_do_not_touch_the_global_generator() -> None:
    model = battery.build("llama")
    torch.manual_seed(9)
    wanted = torch.randn(3)
    torch.manual_seed(9)
    apply(model, [LoRA(rank=4)])
    assert torch.equal(torch.randn(3), wanted)


def test_two_edits_undone_in_reverse() -> None:
    model = battery.build("llama")
    before, answer = battery.picture(model), battery.logits(model)
    first = apply(model, [LoRA(rank=4, target=("q_proj",))])
    battery.train(model, first)
    between, middle = battery.picture(model), battery.logits(model)
    second = apply(model, [LoRA(rank=2, target=("v_proj",), modules_to_save=("lm_head",))])
    battery.train(model, second)
    assert all(torch.equal(p, between["tensors"][n][2]) for n, p in first.trainable().items())
    battery.differs(battery.logits(model), middle)
    second.undo()
    battery.same_picture(battery.picture(model), between)
    assert torch.equal(battery.logits(model), middle)
    first.undo()
    battery.same_picture(battery.picture(model), before)
    assert torch.equal(battery.logits(model), answer)


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first maps get their child, and a later one does not."""
    model = battery.build("llama")
    edit = apply(model, [LoRA(rank=4, target=("layers.1.self_attn.v_proj",))])
    before, right = battery.picture(model), Edit.attach

    def attach(self: Edit, target: str, *rest: Any) -> None:
        if target == "model.layers.1.mlp.down_proj":
            raise TechniqueError("there is no room")
        right(self, target, *rest)

    monkeypatch.setattr(Edit, "attach", attach)
    for technique in (LoRA(rank=2), LoRA(rank=2, modules_to_save=("lm_head",))):
        with pytest.raises(TechniqueError, match="no room"):
            apply(model, [technique])
        battery.same_picture(battery.picture(model), before)
    edit.undo()


def test_a_failure_in_the_starting_values_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no values")

    monkeypatch.setattr(LoRADelta, "reset", fails)
    for undoable in (True, False):
        model = battery.build("llama")
        before = battery.picture(model)
        with pytest.raises(RuntimeError, match="no values"):
            apply(model, [LoRA(rank=2, modules_to_save=("lm_head",))], undoable=undoable)
        battery.same_picture(battery.picture(model), before)


def test_undo_drops_the_gradients_of_what_trained() -> None:
    model = battery.build("llama")
    edit = apply(model, [Full()])
    battery.backward(model)
    edit.undo()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("technique", [Full(), LoRA(rank=2, modules_to_save=("lm_head",))])
def test_without_originals_there_is_no_way_back(technique: Any) -> None:
    model = battery.build("llama")
    edit = apply(model, [technique], undoable=False)
    for attempt in (edit.undo, lambda: edit.disabled().__enter__()):
        with pytest.raises(TechniqueError, match="undoable=True"):
            attempt()
    assert edit.trainable()


def test_without_originals_a_bare_lora_still_goes_back() -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    apply(model, [LoRA(rank=2)], undoable=False).undo()
    battery.same_picture(battery.picture(model), before)


def test_integers_do_not_train() -> None:
    model = battery.build("llama")
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().to(torch.int8), requires_grad=False)
    edit = Edit(model, [])
    with pytest.raises(TechniqueError, match="int8"):
        edit.train_in_place("lm_head.weight", Full(), undoable=True)


def test_disabled_comes_back_after_an_error() -> None:
    case = next(c for c in battery.CASES if c.technique.key == "lora" and c.model == "llama")
    model, edit = battery.edited(case, moved=True)
    changed = battery.logits(model)

    def fails() -> None:
        with edit.disabled():
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(battery.logits(model), changed)


def test_a_child_follows_the_mode_of_its_module() -> None:
    model = battery.build("llama").train()
    edit = apply(model, [LoRA(rank=2)])
    assert all(d.training for d in edit.deltas.values())
    model.eval()
    assert not any(d.training for d in edit.deltas.values())


def test_a_delta_that_cannot_fold_says_so() -> None:
    class Odd(Delta):
        def forward(self, x: torch.Tensor, y: torch.Tensor, base: nn.Module) -> torch.Tensor:
            return y

        def reset(self, seed: int) -> None:
            """Nothing to set."""

    with pytest.raises(TechniqueError, match="Odd cannot be folded"):
        Odd().weight_delta()
    assert Odd().silent_at_start() == frozenset()


# --- counts -------------------------------------------------------------------------------------------------------


def test_counts_of_a_tied_llama() -> None:
    model = battery.build("llama_tied")
    edit = apply(model, [LoRA(rank=2, target=("q_proj",), modules_to_save=("norm",))])
    # q 16·16, k and v 16·8 each, o 16·16, three maps of 16·24, two norms of 16, and A and B of 2·16 each.
    block = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16 + 4 * 16
    assert parameter_counts(model, edit.trainable()) == [
        ("model.embed_tokens", 0, 40 * 16),
        ("model.layers.0", 64, block),
        ("model.layers.1", 64, block),
        ("model.norm", 16, 16),
        ("all", 144, 40 * 16 + 2 * block + 16),
    ]
    lines = edit.summary().splitlines()
    assert len(lines) == 5
    assert lines[2].split() == ["model.layers.0..1", "(each)", "64", "2,016", "3.17%"]
    assert lines[-1].split() == ["all", "144", "4,688", "3.07%"]


def test_blocks_that_differ_have_lines_of_their_own() -> None:
    counts = [("m.0", 1, 10), ("m.1", 2, 10), ("m.2", 2, 10), ("n.0", 2, 10), ("all", 7, 40)]
    labels = [line[:34].strip() for line in format_counts(counts)]
    assert labels == ["part", "m.0", "m.1..2 (each)", "n.0", "all"]


def test_warnings_and_notes_stand_below_the_table() -> None:
    edit = apply(battery.build("mixtral"), [LoRA(rank=2)])
    edit.notes.append("and so on")
    warning, note = edit.summary().splitlines()[-2:]
    assert warning.startswith("warning: 2 groups of fused experts")
    assert seams.expert_modules(edit.model)[0] in warning
    assert note == "note: and so on"
