"""The bench of gradient noise: its settings exist, results are kept by content, and its rows say what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afina.models import hub
from afina.optim.gradient_noise import GradientNoise
from bench import noise
from bench.noise import PLAIN, SEEDS, SETTINGS, Data, figures, jobs, lines, parse, table

DATA = Data("some", [{"prompt": "a", "completion": "b"}], [{"prompt": "c", "completion": "d"}])
NOISY = "relative, eta 0.01"
FOUND = [
    {"name": PLAIN, "seed": 0, "loss": 1.0},
    {"name": NOISY, "seed": 0, "loss": 1.1},
    {"name": PLAIN, "seed": 1, "loss": 3.0},
    {"name": NOISY, "seed": 1, "loss": 2.9},
]


def test_every_setting_is_one_of_the_technique() -> None:
    assert [GradientNoise(**values).eta for values in SETTINGS.values() if values] == [
        0.01,
        0.3,
        1.0,
        0.01,
    ]


def test_each_setting_runs_with_each_seed() -> None:
    found = [(job["name"], job["seed"]) for job in jobs(parse([]))]
    assert sorted(found) == sorted((name, seed) for name in SETTINGS for seed in SEEDS)
    assert len(list(jobs(parse(["--quick"])))) == 2
    some = [(job["name"], job["seed"]) for job in jobs(parse(["--only", NOISY]))]
    assert some == [(NOISY, seed) for seed in SEEDS]


def test_nothing_runs_twice_and_nothing_at_all_where_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def train(job: dict[str, Any], *rest: Any) -> float:
        ran.append(job["name"])
        return 2.0

    monkeypatch.setattr(noise, "train", train)
    monkeypatch.setattr(noise, "model_hash", lambda folder: "model")
    monkeypatch.setattr(hub, "resolve", lambda name: tmp_path)
    options, cached = (
        parse(["--work", str(tmp_path), "--quick", *more]) for more in ([], ["--cached"])
    )
    assert noise.results(cached, DATA) == []
    first, again = noise.results(options, DATA), noise.results(options, DATA)
    assert ran == list(SETTINGS)[:2]
    assert first == again
    assert [one["loss"] for one in first] == [2.0, 2.0]
    # By the job alone: rows and model need not be here.
    assert noise.results(cached, Data("some", [], [])) == first
    # Of other rows, or another model, it is another result.
    noise.results(options, Data("some", DATA.train, []))
    monkeypatch.setattr(noise, "model_hash", lambda folder: "another")
    noise.results(options, Data("some", DATA.train, []))
    assert ran == list(SETTINGS)[:2] * 3


def test_differences_are_taken_seed_by_seed() -> None:
    plain, noisy = table(FOUND)
    assert (plain["mean"], plain["least"], plain["most"]) == (2.0, 0.0, 0.0)
    assert noisy["mean"] == pytest.approx(2.0)
    assert (noisy["least"], noisy["most"]) == pytest.approx((-0.1, 0.1))
    assert noisy["apart"] == pytest.approx(0.0, abs=1e-12)
    assert list(lines(table(FOUND)))[-1] == (
        "| relative, eta 0.01 | 1.1000, 2.9000 | +0.0000 | -0.1000, +0.1000 |"
    )


def test_rows_are_in_the_form_of_every_bench() -> None:
    rows = figures(table(FOUND), "some")
    keys = {"bench", "work", "setting", "metric", "unit", "value", "peer", "peer_value", "ratio"}
    assert all(set(row) == keys for row in rows)
    loss = next(r for r in rows if (r["setting"], r["metric"]) == (NOISY, "validation loss"))
    assert (loss["value"], loss["peer_value"], loss["ratio"]) == pytest.approx((2.0, 2.0, 1.0))
