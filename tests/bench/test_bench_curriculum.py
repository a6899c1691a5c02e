"""The bench of curricula: its ways are settings that exist, and its table says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import afina
from bench import curriculum
from bench.curriculum import WAYS, figures, table


@pytest.mark.parametrize("way", [way for way, settings in WAYS.items() if settings is not None])
def test_a_way_is_a_curriculum(way: str) -> None:
    settings = WAYS[way]
    assert settings is not None
    made = afina.Curriculum(**settings)
    assert all(getattr(made, name) == value for name, value in settings.items())


def test_the_control_differs_from_the_first_way_in_its_order_alone() -> None:
    assert WAYS["control"] == {**(WAYS["length"] or {}), "order": "random"}


def test_losses_stand_beside_those_without_a_curriculum() -> None:
    found = figures(
        {"none": {0: 0.5, 1: 0.7}, "length": {0: 0.6, 1: 0.9}, "rarity": {1: 0.7}, "loss": {}},
        "tiny",
    )
    assert [(row["setting"], row["ratio"]) for row in found] == [
        ("none", 1.0),
        ("length", pytest.approx(1.25)),
        ("rarity", 1.0),  # beside the same seed
    ]
    assert table(found).splitlines()[3] == "| length | 0.6000 (0), 0.9000 (1) | 0.7500 | 1.250 |"
    assert figures({"length": {0: 0.6}}, "tiny")[0]["ratio"] is None


def test_a_finished_run_is_not_made_again_and_is_found_by_its_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def made(*call: object) -> dict[str, float]:
        ran.append(str(call[-1]))
        return {"loss": 2.0, "tokens": 3}

    monkeypatch.setattr(curriculum, "made", made)
    monkeypatch.setattr(curriculum, "read_lines", lambda file: [{"prompt": str(file)}])
    monkeypatch.setattr(curriculum, "model_hash", lambda folder: "model")
    options = curriculum.parse(["--data", str(tmp_path), "--results", str(tmp_path / "kept")])
    options.folder = ""
    first = curriculum.measured(options, "length", 0)
    assert first == curriculum.measured(options, "length", 0)
    assert ran == [f"{tmp_path.name}-length-0"]
    options.cached = True
    assert curriculum.measured(options, "length", 0) == first
    assert curriculum.measured(options, "length", 1) is None
