"""Every method of the battery in two processes: the step of one process, or a written reason.

Each row of a window is a micro-batch of its own, so that what is computed of a row is the same to the bit wherever it
is computed, and what differs is what processes tell each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.config import ParallelSettings, TrainSettings
from afina.data.curriculum import Curriculum
from afina.models.forward import packing
from afina.models.head import head_of
from afina.optim.gradient_noise import GradientNoise
from afina.optim.layer_decay import LayerDecay
from afina.optim.optimisers import Optimiser
from afina.parallel.beside import ZERO_3
from afina.parallel.processes import Processes
from afina.parallel.runtime import Mesh, OneProcess
from afina.table import TECHNIQUES, apply
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from afina.techniques.reversible import Reversible
from afina.techniques.token_pruning import TokenPruning
from afina.train.ahead import made
from afina.train.loop import backward, loop
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.passes import Passes
from afina.train.report import Silent
from afina.train.run import train
from afina.train.work import Work
from afina.tree import Seams, Technique
from tests import battery
from tests.parallel.parity import joined, placed, whole
from tests.parallel.pool import Pool
from tests.train.kit import run, weights
from tests.train.test_classes import build as classifier
from tests.train.test_classes import data_of, tokenizer

pytestmark = pytest.mark.dist

STEPS = 10
"""Of the run that the techniques are told of; one of them is made."""

PARTS = 4
"""The rows go to the processes in so many parts, so that none of them is long."""

BESIDE: tuple[tuple[tuple[Technique, ...], str], ...] = (
    ((LoRA(rank=2), GradientNoise(eta=1.0)), "llama"),
    ((LoRA(rank=3), GradientNoise(eta=0.1, mode="absolute")), "gpt2"),
    ((LoRA(rank=2), LayerDecay(decay=0.5)), "llama"),
    ((LoRA(rank=2, loraplus_ratio=4.0), LayerDecay(decay=0.5)), "llama_tied"),
    ((LoRA(rank=2), Reversible(plain=1)), "llama"),
    ((LoRA(rank=2), TokenPruning(score="predictor", layers="0-1")), "llama"),
    ((LoRA(rank=2), TokenPruning(score="random", layers="0-1")), "llama"),
    ((LoRA(rank=2), TokenPruning(score="loss", layers="1", dropped="cut")), "llama"),
    ((Quantize(), LoRA(rank=2)), "llama"),
)
"""Techniques that train nothing by themselves, beside one that does."""

REASONS = {
    "curriculum": "says which rows a step has, before they are dealt out; it has a run of its own below",
    "dropout": "draws for each micro-batch by its number, and several processes cut a step otherwise: the rows here "
    "have it off",
    "bert": "predicts no next token, so that no run trains it as these rows do; as a classifier it has runs below",
}
"""What has no row here."""


@dataclass(frozen=True)
class Row:
    """Techniques on a model."""

    techniques: tuple[Technique, ...]
    model: str

    @property
    def name(self) -> str:
        return f"{self.model}: {', '.join(map(repr, self.techniques))}"


def without_dropout(technique: Technique) -> Technique:
    dropped = getattr(technique, "dropout", 0.0)
    return technique.model_copy(update={"dropout": 0.0}) if dropped else technique


def rows() -> list[Row]:
    """The first model of each row of the battery that can be trained here, and the techniques beside."""
    found = [
        Row((without_dropout(technique),), next(m for m in models if m not in battery.NOT_PACKED))
        for technique, models, _ in battery.ROWS
        if set(models) - set(battery.NOT_PACKED)
    ]
    return [*found, *(Row(techniques, model) for techniques, model in BESIDE)]


def work_of(row: Row, mesh: Mesh) -> Work:
    """The changed model, a little trained, so that nothing of it is zero."""
    model = battery.build(row.model)
    edit = apply(model, list(row.techniques), seed=0)
    battery.train(model, edit, steps=1)
    model.train()
    settings = TrainSettings(steps=STEPS, lr=0.05, optimizer="sgd", micro_rows=1, clip=None)
    seams = edit.seams(STEPS)
    mesh.begin()
    mesh.hold(model, edit.trainable())
    edit.renew()
    with mesh.opened():
        head = head_of(model)
    passes = Passes(model, True, False, 0, head, mesh.within)
    scales = edit.lr_scales()
    for change in seams.param_groups:
        scales = change(scales)
    return Work(
        model,
        edit,
        Optimiser(mesh.own(edit.trainable()), scales, "sgd", {"lr": 0.05}),
        settings,
        lambda rows: passes.cut(rows, rows_each=1, tokens_each=None),
        passes,
        mesh,
        seams,
        STEPS,
        0,
    )


Found = dict[str, dict[str, Tensor]]


def step(row: Row, settings: ParallelSettings | None) -> Found:
    """Gradients of a window, what trains after a step on it, and what techniques remember."""
    mesh = OneProcess() if settings is None else Processes(settings)
    work = work_of(row, mesh)
    gradients: dict[str, Tensor] = {}

    def look(step: int, own: dict[str, nn.Parameter]) -> None:
        gradients.update(whole(own))

    work = replace(work, seams=Seams(before_step=(look,)).and_then(work.seams))
    with packing(work.model, True):
        norm = next(loop(work, iter([list(battery.SAMPLE)]))).gradient_norm
    own = mesh.own(work.edit.trainable())
    return {
        "norm": {"norm": torch.tensor(norm, dtype=torch.float64)},
        "gradients": gradients,
        "values": {name: placed(p, p.detach()) for name, p in own.items()},
        "state": {name: tensor.double() for name, tensor in work.edit.state().items()},
    }


def every(chosen: list[Row], settings: ParallelSettings) -> list[Found]:
    return [step(row, settings) for row in chosen]


@functools.cache
def alone(number: int) -> Found:
    return step(rows()[number], None)


def chosen_for(zero: int) -> list[tuple[int, Row]]:
    """Every row, and where weights are shared out one of each technique, less those that are refused there."""
    found = list(enumerate(rows()))
    if zero < 3:
        return found
    firsts = {tuple(t.key for t in row.techniques): (n, row) for n, row in reversed(found)}
    return [one for keys, one in firsts.items() if not set(keys) & set(ZERO_3)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_two_processes_make_the_step_of_one(pool: Pool, zero: int, part: int) -> None:
    chosen = chosen_for(zero)[part::PARTS]
    settings = ParallelSettings.model_validate({"zero": zero})
    found = pool.run(2, every, [row for _, row in chosen], settings)
    wrong: list[str] = []
    for (number, row), ones in zip(chosen, zip(*found, strict=True), strict=True):
        for kind, wanted in alone(number).items():
            together = joined([one[kind] for one in ones])
            assert together.keys() == wanted.keys(), (row.name, kind)
            apart = {n: float((together[n] - w).abs().sum()) for n, w in wanted.items()}
            wrong += [f"{row.name}: {kind} {n} {a}" for n, a in apart.items() if not a < 1e-9]
    assert wrong == []


def test_every_technique_of_the_table_has_a_row_or_a_reason() -> None:
    keys = {technique.key for row in rows() for technique in row.techniques}
    assert set(TECHNIQUES) - keys == set(TECHNIQUES) & set(REASONS)


def test_what_differs_is_seen() -> None:
    """The control: half of a window by itself does not make the whole one's gradient."""
    row = rows()[0]
    work: Any = work_of(row, OneProcess())
    with packing(work.model, True):
        backward(work, made(work, battery.SAMPLE[:2]), 0)
    half = whole(work.edit.trainable())
    expected = alone(0)["gradients"]
    assert max(float((half[n] - expected[n]).abs().max()) for n in expected) > 1e-3


def ordered(out: Path, settings: ParallelSettings | None) -> dict[str, Tensor]:
    """The adapter of a run whose rows a curriculum chooses, by what they cost the base."""
    options = {} if settings is None else {"mesh": Processes(settings)}
    techniques = [LoRA(rank=2), Curriculum(start=0.5, difficulty="loss")]
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "steps": 3, "micro_rows": 1}
    made = run(out, techniques, options=options, **how)
    return {name: tensor.clone() for name, tensor in weights(made).items()}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_curriculum(pool: Pool, tmp_path: Path, zero: int) -> None:
    expected = ordered(tmp_path / "alone", None)
    settings = ParallelSettings.model_validate({"zero": zero})
    for found in pool.run(2, ordered, tmp_path / "two", settings):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9)
    shown = [[line["rows"] for line in read_metrics(tmp_path / n)] for n in ("alone", "two")]
    assert shown[0] == shown[1]


def classified(out: Path, kind: str, settings: ParallelSettings | None) -> list[dict[str, Any]]:
    """The steps of an encoder that learns classes and, for rows, thresholds, which are numbers without dimensions."""
    options = RunOptions(mesh=OneProcess() if settings is None else Processes(settings))
    options = replace(options, reporter=Silent())
    model = classifier(kind, num_hidden_layers=3).double()
    learnt = TokenPruning(score="learned", threshold_start=0.9, temperature=0.3, penalty=1.0)
    kept = TokenPruning(score="attention", keep=0.5)
    edit = apply(model, [LoRA(rank=4), learnt if kind == "bert" else kept], seed=1)
    how: dict[str, Any] = {"steps": 4, "lr": 0.05, "optimizer": "sgd", "micro_rows": 1}
    train(model, tokenizer(), data_of(kind), edit, out, options=options, rows_per_step=3, **how)
    return read_metrics(out)


@pytest.mark.parametrize("kind", ["bert", "tags"])
def test_classifiers_whose_tokens_are_pruned(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = classified(tmp_path / "alone", kind, None)
    for zero in (0, 1, 3):
        settings = ParallelSettings.model_validate({"zero": zero})
        for found in pool.run(2, classified, tmp_path / str(zero), kind, settings):
            for name in ("loss", "gradient_norm"):
                wanted = [pytest.approx(line[name], abs=1e-9) for line in expected]
                assert [line[name] for line in found] == wanted, (zero, name)
