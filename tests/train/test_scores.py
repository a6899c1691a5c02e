"""Evaluations that cannot be made: they cost no step, and are made when the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from afina.errors import ConfigError
from afina.train.metrics import read_metrics
from tests.train.kit import ragged_rows, run, same, weights
from tests.train.test_resume import Listen, contents

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "eval_every": 2,
    "save_every": None,
    "best": "exact_match",
    "val": ragged_rows(3, seed=3),
}


def scores(*, fails_at: int | None = None) -> Callable[..., Mapping[str, float]]:
    """Gives 0.1, 0.2, …, by what the weights are; raises at one of its calls."""
    calls: list[int] = []

    def score(model: Any, rows: Any) -> Mapping[str, float]:
        calls.append(1)
        if len(calls) == fails_at:
            raise OSError("the scorer's server is away")
        moved = sum(
            float(p.detach().abs().sum()) for n, p in model.named_parameters() if "lora" in n
        )
        return {"exact_match": -moved}

    return score


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_evaluation_that_fails_costs_no_step_and_is_made_when_the_run_goes_on(
    tmp_path: Path, fails_at: int
) -> None:
    """At the first, at one between and at the last: the end is that of an unbroken run, file by file."""
    whole = run(tmp_path / "whole", options={"evaluate": scores()}, **SETTINGS)
    heard = Listen()
    with pytest.raises(OSError, match="server is away"):
        run(
            tmp_path / "run",
            options={"evaluate": scores(fails_at=fails_at), "reporter": heard},
            **SETTINGS,
        )
    step = 2 * fails_at
    assert heard.heard(f"the evaluation after step {step} failed, and the run is saved")
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{step:06d}"
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, step + 1))
    assert "val_loss" not in lines[-1]
    # It may fail again where it is made again, and nothing is lost by that either.
    with pytest.raises(OSError, match="server is away"):
        run(
            tmp_path / "run",
            options={"evaluate": scores(fails_at=1), "resume": True},
            **SETTINGS,
        )
    rest = run(tmp_path / "run", options={"evaluate": scores(), "resume": True}, **SETTINGS)
    assert same(weights(rest), weights(whole))
    assert (rest.steps, rest.best_step, rest.scores) == (6, whole.best_step, whole.scores)
    pairs = [
        [(x["step"], x["loss"], x.get("val_exact_match")) for x in read_metrics(done.folder)]
        for done in (rest, whole)
    ]
    assert pairs[0] == pairs[1]
    assert list(contents(rest.weights).values()) == list(contents(whole.weights).values())


def test_a_score_that_only_its_absence_shows_costs_no_step_either(tmp_path: Path) -> None:
    """A scorer of one's own does not say beforehand what it measures."""

    def other(model: Any, rows: Any) -> Mapping[str, float]:
        return {"bleu": 0.5}

    with pytest.raises(ConfigError, match=r"train\.best is exact_match") as caught:
        run(tmp_path / "run", options={"evaluate": other}, **SETTINGS)
    assert caught.value.got == "loss, bleu"
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002"
    rest = run(
        tmp_path / "run",
        options={"evaluate": other, "resume": True, "allow_changes": True},
        **{**SETTINGS, "best": "loss"},
    )
    assert rest.steps == 6
    assert [line["step"] for line in read_metrics(rest.folder) if "val_bleu" in line] == [2, 4, 6]
