"""The methods' bench: every listed method exists with these settings, and its rows say what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kit.method import made
from bench.methods import METHODS, figures, lines, plot

ROW = {
    "method": "lora",
    "lr": 1e-3,
    "trained_parameters": 100,
    "exact_match": 0.5,
    "loss": 0.25,
    "tokens_per_s": 10.0,
    "peak_bytes": 2**30,
}
OTHER = {**ROW, "method": "ia3", "exact_match": 0.25, "exact_match, second seed": 0.3}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_these_settings(name: str) -> None:
    techniques, rates = METHODS[name]
    assert [t.key for t in made(techniques)] == [key for each in techniques for key in each]
    assert 0 < rates[0] < rates[1]


def test_figures_stand_beside_lora() -> None:
    found = {(f["setting"], f["metric"]): f for f in figures([OTHER, ROW], "tiny")}
    one = found["ia3, lr 0.001", "exact_match"]
    assert (one["value"], one["peer_value"], one["ratio"]) == (0.25, 0.5, 0.5)
    assert found["lora, lr 0.001", "exact_match, second seed"]["value"] is None


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    table = list(lines([OTHER, ROW]))
    assert table[2] == "| ia3 | 100 | 0.001 | 0.250 | 0.300 | 0.2500 | 10 | 1.00 |"
    assert table[3].split(" | ")[4] == ""
    plot([OTHER, ROW], tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
