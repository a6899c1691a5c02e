"""The bench of techniques: every way has settings that exist, figures stand beside LoRA, the frontier is marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afina.config import TrainSettings, build
from afina.table import check
from bench import techniques
from bench.kit.beside import Cost, Taken
from bench.kit.method import made
from bench.kit.points import frontier, scatter
from bench.techniques import BASELINE, WAYS, Bench, Size, figures, lines, parse

LORA = Cost([2.0, 2.0], 4, [2.0, 1.0], [2.0, 2.0], 4, [2.0, 1.0])
SMALL = Cost([3.0, 3.0], 2, [2.0, 1.5], [2.0, 2.0], 4, [2.0, 1.0])
SLOW = Cost([4.0, 4.0], 3, [2.0, 1.0], [2.0, 2.0], 4, [2.0, 1.0])


@pytest.mark.parametrize("name", WAYS)
def test_a_way_has_these_settings(name: str) -> None:
    way = WAYS[name]
    assert len(check(made(way.techniques))) == len(way.techniques)
    assert build(TrainSettings, {"rows_per_step": Size().batch, **way.train})


def test_what_no_other_beats_is_on_the_frontier() -> None:
    points = {"fast": (1.0, 3.0), "small": (3.0, 1.0), "both": (2.0, 2.0), "beaten": (3.0, 2.0)}
    assert frontier(points) == ["fast", "both", "small"]
    assert frontier({**points, "best": (1.0, 1.0)}) == ["best"]
    assert frontier({"one": (1.0, 1.0), "the same": (1.0, 1.0)}) == ["one", "the same"]
    assert frontier({}) == []


def test_figures_stand_beside_lora() -> None:
    found = {(f.setting, f.metric): f for f in figures({"lora": LORA, "small": SMALL}, "tiny")}
    assert found["small", "processor time"].ratio == 1.5
    assert found["small", "peak memory"].ratio == 0.5
    assert found["small", "loss, last step but one"].ratio == 1.5
    assert found["small", "loss, first step"].ratio == 1
    assert {f.peer for f in found.values()} == {BASELINE}


def test_the_table_and_what_it_lacks() -> None:
    table = list(lines({"lora": LORA, "reversible": SMALL, "full": SLOW}, markdown=True))
    assert table[2] == "| reversible | 1.50 | 0.50 | 1.500 | 1.000 | yes |"
    assert table[3] == "| full | 2.00 | 0.75 | 1.000 | 1.000 |  |"
    assert table[-1].startswith("not measured yet: recompute; ")
    assert "not measured" not in "".join(lines(dict.fromkeys(WAYS, LORA)))


def test_the_plot_is_the_same_file_each_time(tmp_path: Path) -> None:
    points = {"lora": (1.0, 1.0), "small": (1.5, 0.5)}
    for name in ("a.svg", "b.svg"):
        scatter(tmp_path / name, points, x="time", y="memory", marked=frontier(points))
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    assert b"small" in first
    assert len(first) < 60_000


def started(tmp_path: Path, *words: str, key: str | None = "key") -> Bench:
    """A bench over rows that nobody reads."""
    options = parse(["--work", str(tmp_path / "work"), "--results", str(tmp_path / "kept"), *words])
    given = None if key is None else ("model", tmp_path / "rows.json", key)
    return Bench(options, Size(), "tiny", given)


def test_a_rerun_measures_what_is_missing_and_one_that_fails_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[list[str]] = []

    def in_turns(jobs: dict[str, Any], folder: Path, **sizes: int) -> dict[str, Taken]:
        together.append(list(jobs))
        if "full" in jobs:
            raise RuntimeError("no memory")
        return {name: Taken([1.0 + len(name)], len(name), [1.0]) for name in jobs}

    monkeypatch.setattr(techniques, "in_turns", in_turns)
    started(tmp_path, "--only", "lora", "--only", "recompute").run()
    assert together == [["lora", "recompute"]]
    bench = started(tmp_path)
    bench.run()
    assert bench.failures == ["full"]
    assert not any("recompute" in names for names in together[1:])
    assert all(BASELINE in names for names in together)
    assert bench.cost("full") is None
    cached = started(tmp_path, "--cached", key=None)
    cached.run()
    assert [name for name in WAYS if cached.cost(name) is None] == ["full"]
    found = cached.cost("recompute")
    assert found is not None
    assert (found.time, found.memory) == (10 / 5, 9 / 4)
    assert started(tmp_path, key="other").cost("recompute") is None
