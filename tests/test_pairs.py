"""Every pair of techniques outside CLASHES works in one run: trained, gone on with, saved, loaded, undone.

A pair's gradients are those of each alone wherever the other starts as the base or leaves the forward pass alone.
Triples are drawn, always the same ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afina.adapters import files
from afina.adapters.contents import is_adapter
from afina.data import curriculum_picture
from afina.errors import TechniqueError
from afina.table import CLASHES, TECHNIQUES, apply
from afina.techniques.quantize import Quantize
from afina.techniques.token_pruning import TokenPruning
from afina.train import keeper
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.report import Silent
from afina.train.run import train
from afina.tree import Seams, Technique
from tests import battery
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train import kit

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


STARTS_AS_THE_BASE = {"layer_decay", "gradient_noise", "curriculum"} | {
    case.technique.key for case in battery.CASES if case.model == "llama" and case.identity
}
"""Techniques that leave what the model says as it is until they have learnt something."""


def gradients(techniques: Sequence[Technique]) -> dict[str, torch.Tensor]:
    """Of a packed window at the start."""
    edit = apply(battery.build("llama"), techniques)
    edit.model.train()
    return battery.learnt(edit.model, edit, packed=True, shared=False)[1]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_one_that_starts_as_the_base_leaves_the_others_gradients(pair: tuple[str, str]) -> None:
    """What theory says: such a technique adds nothing to the forward pass, so the other learns as if alone."""
    together = gradients(values(pair))
    for mine, other in (pair, pair[::-1]):
        if other in STARTS_AS_THE_BASE and mine not in battery.WITHOUT_ROWS:
            alone = gradients([SMALL[mine]])
            assert alone.keys() <= together.keys()
            for name, value in alone.items():
                battery.close(together[name], value, 1e-9)


def test_one_that_does_not_start_as_the_base_changes_them() -> None:
    """The control: a prompt in front of the rows is seen in LoRA's gradients."""
    alone, together = gradients([SMALL["lora"]]), gradients([SMALL["lora"], SMALL["prompt"]])
    assert max(float((together[n] - g).abs().max()) for n, g in alone.items()) > 1e-3


def end(out: Path, techniques: list[Technique], **options: Any) -> dict[str, torch.Tensor]:
    """All that five steps leave: what trained, what techniques remember, and the losses."""
    edit = apply(tiny_llama(num_hidden_layers=3), techniques, seed=1)
    train(
        edit.model,
        byte_tokenizer(),
        kit.ragged_rows(10),
        edit,
        out,
        options=RunOptions(reporter=Silent(), base="tiny", **options),
        steps=5,
        rows_per_step=4,
        micro_rows=2,
        lr=1e-2,
        save_every=2,
        compile=False,
    )
    kept = {n: t.detach().clone() for n, t in {**edit.trainable(), **edit.state()}.items()}
    losses = torch.tensor([line["loss"] for line in read_metrics(out)], dtype=torch.float64)
    return {**kept, "losses": losses}


def seams_of_a_cut(running: Path, left: Path) -> Seams:
    """Copies the run's folder where its third step is done, as a power cut leaves it."""

    def copy(step: int) -> None:
        if step == 2:
            shutil.copytree(running, left)

    return Seams(after_step=(copy,))


def trains_and_goes_on(techniques: list[Technique], folder: Path) -> None:
    """Five steps with finite losses; and the same bit for bit when the power goes after the third.

    What a power cut leaves is what lies in the folder then: a copy of it, made while the run goes on.
    """
    cut = seams_of_a_cut(folder / "whole", folder / "run")
    whole = end(folder / "whole", techniques, seams=cut)
    assert len(whole["losses"]) == 5
    assert bool(whole["losses"].isfinite().all())
    assert len(read_metrics(folder / "run")) == 2  # the third step was moved, not yet told
    again = end(folder / "run", techniques, resume=True)
    assert again.keys() == whole.keys()
    assert [n for n, value in whole.items() if not torch.equal(again[n], value)] == []


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes as long as all the rest of a tiny run."""
    monkeypatch.setattr(keeper, "plot_loss", lambda folder: None)
    monkeypatch.setattr(curriculum_picture, "draw", lambda *arguments: None)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_trains_five_steps_and_goes_on_bit_for_bit(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    trains_and_goes_on(values(pair), tmp_path)


TRIPLES = tuple(
    three
    for three in combinations(TECHNIQUES, 3)
    if not any(clash(*pair) for pair in combinations(three, 2))
)


@pytest.mark.usefixtures("no_plot")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(three=st.sampled_from(TRIPLES))
def test_triples_train_and_go_on_and_are_undone(
    tmp_path_factory: pytest.TempPathFactory, three: tuple[str, str, str]
) -> None:
    trains_and_goes_on(values(three), tmp_path_factory.mktemp("triple"))
    model = battery.build("llama")
    before = battery.picture(model)
    edit = apply(model, values(three))
    battery.train(model, edit)
    edit.undo()
    battery.same_picture(battery.picture(model), before)


@pytest.mark.parametrize("pair", [p for p in EVERY if clash(*p)], ids="+".join)
def test_a_clash_is_refused_with_its_reason(pair: tuple[str, str]) -> None:
    with pytest.raises(TechniqueError, match=r"cannot be combined: .{20}"):
        apply(battery.build("llama"), [SMALL[key] for key in pair])


def test_clashes_name_techniques_in_the_order_in_which_they_act() -> None:
    from afina.table import ORDER

    assert set(ORDER) == set(TECHNIQUES)
    for one, other in CLASHES:
        assert ORDER.index(one) < ORDER.index(other)
