"""Runs with a curriculum: the same rows after a stop, losses of the base measured once, rates by tokens, refusals."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from afina.config import TrainSettings
from afina.data import curriculum_picture
from afina.data.curriculum import Curriculum
from afina.data.settings import DataSettings
from afina.errors import ConfigError, DataError, RunError, TechniqueError
from afina.models import cache
from afina.models.forward import packing
from afina.models.head import head_of
from afina.reports.check import check
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.prompt import PromptTuning
from afina.train import base_losses
from afina.train.base_losses import row_losses
from afina.train.metrics import read_metrics
from afina.train.options import RunOptions
from afina.train.passes import Passes
from afina.train.plan import Plan, plan_of
from afina.train.result import Run
from afina.train.run import train
from afina.train.validate import mean_loss
from afina.tree import Seams, Technique
from afina.types import Row
from tests.tiny import byte_tokenizer, tiny_gpt2, tiny_llama
from tests.train import test_classes as classifiers
from tests.train.kit import Stop, edited, ragged_rows, same, stop_after, weights
from tests.train.test_resume import Listen

BY_LOSS = Curriculum(difficulty="loss", start=0.3)
GROWING = Curriculum(pacing="length", ramp_steps=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as all the rest; one test asks for the real one."""
    monkeypatch.setattr(curriculum_picture, "draw", lambda *_: None)


def run(out: Path, *techniques: Technique, heard: Listen | None = None, **given: Any) -> Run:
    """Six steps of four of twenty rows, unless told otherwise."""
    options = {"reporter": heard or Listen(), "base": "tiny", **given.pop("options", {})}
    full = any(isinstance(technique, Full) for technique in techniques)
    chosen = list(techniques) if full else [LoRA(rank=2), *techniques]
    edit = apply(tiny_llama(), chosen, seed=1, undoable=not full)
    settings = {"rows_per_step": 4, "micro_rows": 2, "lr": 1e-2, "steps": 6, **given}
    if settings.get("tokens_per_step"):
        del settings["rows_per_step"], settings["micro_rows"]
    data, val = settings.pop("data", ragged_rows(20)), settings.pop("val", None)
    tokenizer = byte_tokenizer()
    return train(
        edit.model, tokenizer, data, edit, out, val=val, options=RunOptions(**options), **settings
    )


def shown(found: Path) -> list[list[int]]:
    return [line["rows"] for line in read_metrics(found)]


# --- going on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("technique", "settings"),
    [
        (BY_LOSS, {}),
        (Curriculum(difficulty="rarity"), {"tokens_per_step": 30, "micro_tokens": 20}),
        (GROWING, {"schedule_by": "tokens"}),
    ],
)
def test_a_run_that_goes_on_shows_the_same_rows_and_ends_the_same(
    tmp_path: Path, technique: Curriculum, settings: dict[str, Any]
) -> None:
    settings = {"save_every": 2, **settings}
    whole = run(tmp_path / "whole", technique, **settings)
    with pytest.raises(Stop):
        run(tmp_path / "run", technique, options={"seams": stop_after(3)}, **settings)
    rest = run(tmp_path / "run", technique, options={"resume": True}, **settings)
    assert shown(rest.folder) == shown(whole.folder)
    assert len(shown(whole.folder)) == 6
    assert same(weights(rest), weights(whole))
    rates = [[line["lr"] for line in read_metrics(found.folder)] for found in (whole, rest)]
    assert rates[0] == rates[1]


def test_another_curriculum_is_another_run_and_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path / "run", Curriculum(start=0.3), save_every=2, options={"seams": stop_after(3)})
    other = Curriculum(start=0.6, order="random")
    with pytest.raises(RunError) as caught:
        run(tmp_path / "run", other, save_every=2, options={"resume": True})
    assert "techniques.curriculum.start: 0.3 then, 0.6 now" in str(caught.value.got)
    assert "techniques.curriculum.order: easy_first then, random now" in str(caught.value.got)
    options = {"resume": True, "allow_changes": True}
    found = run(tmp_path / "run", other, save_every=2, options=options)
    assert found.steps == 6


def test_other_numbers_in_the_column_are_another_run(tmp_path: Path) -> None:
    def rows(sign: int) -> list[Row]:
        made = ragged_rows(20)
        return [
            Row(r.tokens, r.trained, r.id, r.source, meta={"columns": {"hard": sign * r.id}})
            for r in made
        ]

    technique = Curriculum(difficulty="column", column="hard", start=0.3)
    with pytest.raises(Stop):
        run(tmp_path / "run", technique, data=rows(1), options={"seams": stop_after(2)})
    with pytest.raises(RunError, match="the rows' difficulty"):
        run(tmp_path / "run", technique, data=rows(-1), options={"resume": True})
    assert max(shown(tmp_path / "run")[0]) < 6


# --- what a step learns is what its rows say -------------------------------------------------------------------


@pytest.mark.parametrize("technique", [Curriculum(start=0.3), GROWING])
def test_how_a_step_is_cut_or_packed_changes_nothing(tmp_path: Path, technique: Curriculum) -> None:
    found = {
        name: run(tmp_path / name, technique, **settings)
        for name, settings in {
            "one": {"micro_rows": 1},
            "four": {"micro_rows": 4},
            "padded": {"options": {"data_settings": DataSettings(packing=False)}},
        }.items()
    }
    losses = {
        name: [line["loss"] for line in read_metrics(each.folder)] for name, each in found.items()
    }
    assert losses["one"] == pytest.approx(losses["four"], abs=1e-5)
    assert losses["one"] == pytest.approx(losses["padded"], abs=1e-5)
    assert shown(found["one"].folder) == shown(found["padded"].folder)


def test_rows_that_begin_alike_are_shared_as_ever(tmp_path: Path) -> None:
    rows = [
        Row((7, 7, 9, 4, *r.tokens), (False,) * 4 + r.trained, r.id, r.source)
        for r in ragged_rows(20)
    ]
    heard = Listen()
    one = run(tmp_path / "one", Curriculum(), data=rows, heard=heard)
    assert heard.heard("rows that begin alike share their beginning")
    apart = {"data_settings": DataSettings(share_prefixes=False)}
    other = run(tmp_path / "other", Curriculum(), data=rows, options=apart)
    losses = [[line["loss"] for line in read_metrics(each.folder)] for each in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_validation_is_on_all_rows_whatever_is_shown(tmp_path: Path) -> None:
    val = ragged_rows(7, seed=3)
    model = tiny_llama()
    edit = apply(model, [LoRA(rank=2), Curriculum(order="hard_first")], seed=1)
    options = RunOptions(reporter=Listen(), base="tiny")
    found = train(
        model, None, ragged_rows(20), edit, tmp_path / "run", val=val, options=options,
        steps=2, rows_per_step=2, micro_rows=2, lr=1e-2,
    )  # fmt: skip
    with packing(model, True):
        passes = Passes(model, True, False, 0, head_of(model))
        assert found.scores["loss"] == pytest.approx(mean_loss(model, [val], passes), rel=1e-6)


def test_a_run_of_epochs_is_as_long_as_without(tmp_path: Path) -> None:
    settings = {"steps": None, "epochs": 2.0}
    assert run(tmp_path / "run", Curriculum(), **settings).steps == 10
    assert run(tmp_path / "plain", **settings).steps == 10


# --- learning rates by tokens ----------------------------------------------------------------------------------


def test_the_rate_falls_with_the_tokens_that_were_shown(tmp_path: Path) -> None:
    found = run(tmp_path / "run", GROWING, schedule_by="tokens", warmup_steps=2)
    lines = read_metrics(found.folder)
    tokens = [line["tokens"] for line in lines]
    rates = [line["lr"] for line in lines]
    assert tokens[0] < tokens[-1]
    whole = sum(tokens[2:])
    by_hand = [0.005, 0.01] + [0.01 * (1 - sum(tokens[2:t]) / whole) for t in range(2, 6)]
    assert rates == pytest.approx(by_hand, abs=1e-15)
    by_steps = run(tmp_path / "steps", GROWING, warmup_steps=2)
    assert [line["lr"] for line in read_metrics(by_steps.folder)] != rates


def test_who_lets_rows_grow_is_advised_to_go_by_tokens(tmp_path: Path) -> None:
    heard = Listen()
    run(tmp_path / "run", GROWING, heard=heard)
    assert heard.heard("--set train.schedule_by=tokens (in Python schedule_by='tokens')")
    heard = Listen()
    run(tmp_path / "other", GROWING, heard=heard, schedule_by="tokens")
    assert not heard.heard("train.schedule_by")
    assert heard.heard("rows are cut to 8 tokens at first, and whole from step 5 of 6 on")


def test_a_plain_run_goes_by_tokens_too() -> None:
    rows = ragged_rows(10)
    settings = TrainSettings(steps=5, rows_per_step=4, schedule_by="tokens")
    plan = Plan(settings, rows, 5)
    each = [sum(len(row.tokens) for row in window) for window in islice(plan.windows(), 5)]
    assert plan.shown() == [sum(each[:t]) for t in range(6)]
    assert Plan(TrainSettings(steps=5), rows, 5).shown() is None


# --- the base's losses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_row_costs_what_it_costs_alone(
    packed: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    rows = [*ragged_rows(9), *ragged_rows(2, seed=4, untrained=(0, 1))]
    rows += rows[:2]  # the same objects twice
    monkeypatch.setattr(base_losses.micro, "MOST_TOKENS", 30)
    with packing(model, packed):
        passes = Passes(model, packed, packed, 0, head_of(model))
        model.train()
        found = row_losses(passes, rows)
        assert model.training
        for row, loss in zip(rows, found, strict=True):
            alone = mean_loss(model, [[row]], passes) if row.trained_tokens else 0.0
            assert loss == pytest.approx(alone, rel=1e-5)
    assert found[:2] == pytest.approx(found[-2:], rel=1e-12)
    assert found[9:11] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["bert", "tags"])
def test_a_row_with_classes_costs_what_it_costs_alone(kind: str) -> None:
    model, rows = classifiers.build(kind), classifiers.rows_of(kind)
    passes = Passes(model, False, False, 257, None)
    alone = [mean_loss(model, [[row]], passes) for row in rows]
    assert row_losses(passes, rows) == pytest.approx(alone, rel=1e-5)
    assert len({round(loss, 6) for loss in alone}) > 1


def measuring(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Notes each time that losses are measured."""
    made: list[list[float]] = []
    real = row_losses

    def noted(passes: Passes, rows: Any) -> list[float]:
        made.append(real(passes, rows))
        return made[-1]

    monkeypatch.setattr(base_losses, "row_losses", noted)
    return made


def test_losses_are_of_the_base_and_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, heard = measuring(monkeypatch), Listen()
    with pytest.raises(Stop):
        run(tmp_path / "run", BY_LOSS, heard=heard, save_every=2, options={"seams": stop_after(3)})
    assert heard.heard("measuring how hard each row is for the base, once: a forward pass over")
    kept = json.loads((tmp_path / "run" / base_losses.FILE).read_text())["losses"]
    model = tiny_llama()
    with packing(model, True):
        plain = row_losses(Passes(model, True, False, 0, head_of(model)), ragged_rows(20))
    assert kept == pytest.approx(plain, rel=1e-6)
    run(tmp_path / "run", BY_LOSS, save_every=2, options={"resume": True})
    run(tmp_path / "again", BY_LOSS)
    # What is attached does not count, neither in what the base says nor in what it is known by.
    run(tmp_path / "prompt", PromptTuning(tokens=2), BY_LOSS)
    assert len(made) == 1
    run(tmp_path / "other", BY_LOSS, data=ragged_rows(20, seed=1))
    assert len(made) == 2
    assert len(list((cache.root() / "difficulty").iterdir())) == 2


def test_losses_that_are_lost_are_measured_again_or_the_run_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = measuring(monkeypatch)
    for name, techniques in {"lora": (BY_LOSS,), "full": (Full(), BY_LOSS)}.items():
        with pytest.raises(Stop):
            run(tmp_path / name, *techniques, save_every=2, options={"seams": stop_after(3)})
        (tmp_path / name / base_losses.FILE).unlink()
    for file in (cache.root() / "difficulty").iterdir():
        file.unlink()
    run(tmp_path / "lora", BY_LOSS, save_every=2, options={"resume": True})
    assert made[2] == pytest.approx(made[0], rel=1e-12)
    with pytest.raises(
        RunError, match="the losses by which this run chose its rows are gone"
    ) as caught:
        run(tmp_path / "full", Full(), BY_LOSS, save_every=2, options={"resume": True})
    assert "put the file back" in str(caught.value.cure)


def test_a_file_of_losses_that_is_torn_or_of_other_rows_is_none(tmp_path: Path) -> None:
    edit = edited()
    rows = ragged_rows(6)
    with packing(edit.model, True):
        passes = Passes(edit.model, True, False, 0, head_of(edit.model))

        def losses(rows: list[Row]) -> list[float]:
            return base_losses.BaseLosses(tmp_path, edit, passes, rows, 0, Listen(), "the base")()

        first = losses(rows)
        (tmp_path / base_losses.FILE).write_text('{"losses": [1')
        for file in (cache.root() / "difficulty").iterdir():
            file.write_text("{}")
        assert losses(rows) == first
        (tmp_path / base_losses.FILE).unlink()
        assert losses(ragged_rows(6, seed=9)) != first


def test_a_loss_that_is_not_finite_has_no_place_in_an_order() -> None:
    edit = edited()
    with torch.no_grad():
        edit.model.get_parameter("model.embed_tokens.weight")[ragged_rows(1)[0].tokens[0]] = (
            torch.nan
        )
    with (
        packing(edit.model, True),
        pytest.raises(DataError, match=r"rows\.jsonl:1: the base's loss is not finite"),
    ):
        row_losses(Passes(edit.model, True, False, 0, head_of(edit.model)), ragged_rows(1))


# --- before a run ----------------------------------------------------------------------------------------------


def written(folder: Path, numbers: list[Any]) -> Path:
    file = folder / "rows.jsonl"
    lines = [
        {"prompt": f"say {n}", "completion": str(n), "hard": hard} for n, hard in enumerate(numbers)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_column_of_a_file_says_how_hard_rows_are(tmp_path: Path) -> None:
    file = written(tmp_path, [9 - n for n in range(10)])
    technique = Curriculum(difficulty="column", column="hard", ramp_steps=6)
    found = run(tmp_path / "run", technique, data=str(file), rows_per_step=2)
    assert sorted(shown(found.folder)[0]) == [8, 9]


def test_a_column_with_gaps_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = written(tmp_path, [1, None, 2, "much"])
    technique = Curriculum(difficulty="column", column="hard")
    with pytest.raises(
        DataError, match="2 rows of 4 have no number in the column 'hard'"
    ) as caught:
        run(tmp_path / "run", technique, data=str(file))
    assert "rows.jsonl:2" in str(caught.value.got)
    assert "rows.jsonl:4" in str(caught.value.got)
    assert not (tmp_path / "run").exists()


def test_a_look_says_which_rows_are_shown_and_what_cannot_be(tmp_path: Path) -> None:
    def looked(technique: Curriculum, data: Any, **settings: Any) -> Any:
        model = tiny_llama()
        edit = apply(model, [LoRA(rank=2), technique], seed=1)
        made = check(
            model,
            byte_tokenizer(),
            data,
            edit,
            settings=TrainSettings(steps=6, rows_per_step=2, micro_rows=2),
            **settings,
        )
        return {finding.name: finding for finding in made.findings}

    file = written(tmp_path, list(range(8)))
    found = looked(BY_LOSS, str(file))
    assert (
        found["schedule"]
        .details[0]
        .startswith("rows are drawn by the base's loss (nats a token), once that is measured")
    )
    assert found["first step"].status == "ok"
    assert not (tmp_path / "cache").exists()
    gaps = written(tmp_path, [1, None])
    found = looked(Curriculum(difficulty="column", column="hard"), str(gaps))
    assert found["schedule"].status == "error"
    assert "1 row of 2 have no number" in found["schedule"].seen
    assert found["first step"].status == "skipped"
    assert "see schedule" in found["first step"].seen


def test_kept_inputs_go_with_a_curriculum_but_not_with_rows_that_grow(tmp_path: Path) -> None:
    upper = LoRA(rank=2, layers="1")

    def made(name: str, technique: Curriculum, **settings: Any) -> list[float]:
        edit = apply(tiny_llama(), [upper, technique], seed=1)
        options = RunOptions(reporter=Listen(), base="tiny")
        found = train(
            edit.model, byte_tokenizer(), ragged_rows(8), edit, tmp_path / name, options=options,
            steps=6, rows_per_step=4, micro_rows=2, lr=1e-2, **settings,
        )  # fmt: skip
        return [line["loss"] for line in read_metrics(found.folder)]

    kept = made("kept", Curriculum(start=0.5), cache_inputs_gib=0.1)
    assert kept == pytest.approx(made("plain", Curriculum(start=0.5)), abs=1e-5)
    with pytest.raises(TechniqueError, match="rows are cut to a length that grows"):
        made("grown", GROWING, cache_inputs_gib=0.1)


def test_one_thing_chooses_the_rows() -> None:
    twice = Seams(windows=(Curriculum().course, Curriculum().course))
    with pytest.raises(ConfigError, match="more than one thing chooses the rows"):
        plan_of(TrainSettings(steps=3), ragged_rows(4), 3, twice)


def test_a_usual_step_is_one_after_the_ramp() -> None:
    rows = ragged_rows(20)
    settings = TrainSettings(steps=9, rows_per_step=4)
    plan = plan_of(settings, rows, 9, Seams(windows=(Curriculum().course,)))
    assert plan.usual() == next(plan.windows(8))
    assert Plan(settings, rows, 9).usual() == next(Plan(settings, rows, 9).windows())


# --- what was shown --------------------------------------------------------------------------------------------


def test_a_run_leaves_what_was_shown_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    found = run(tmp_path / "run", Curriculum(start=0.3))
    assert (found.folder / "curriculum.png").read_bytes().startswith(b"\x89PNG")
    text = (found.folder / "curriculum.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    lengths = {row.id: len(row.tokens) for row in ragged_rows(20)}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["pool"] for line in lines] == [6, 12, 16, 20, 20, 20]
    for line, ids in zip(lines, shown(found.folder), strict=True):
        each = sorted(lengths[id] for id in ids)
        assert line["rows"] == 4
        assert line["difficulty"] == {"min": each[0], "median": sum(each[1:3]) / 2, "max": each[-1]}
        assert line["rank"]["max"] <= line["share"] + 1e-12


def test_a_plain_run_leaves_nothing_of_it(tmp_path: Path) -> None:
    found = run(tmp_path / "run")
    assert not list(found.folder.glob("curriculum*"))
    assert not (found.folder / base_losses.FILE).exists()
