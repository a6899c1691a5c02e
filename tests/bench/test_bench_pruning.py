"""The bench of token pruning: its ways, the figures of what is there, and what is left out without a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import pruning
from bench.kit.results import Results


def kept(folder: Path, name: str, job: dict[str, object], result: dict[str, float]) -> None:
    Results(folder).write(f"data-{name}", job, "", result, "abc")


HOW = {
    "steps": pruning.STEPS,
    "rows": pruning.ROWS,
    "lr": pruning.LR,
    "head_lr": pruning.HEAD_LR,
    "rank": pruning.RANK,
}


def test_the_table_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, file, picture = tmp_path / "results", tmp_path / "out.json", tmp_path / "out.png"
    for way, accuracy in ((pruning.WHOLE, 0.8), (("fuse", 0.5), 0.6)):
        slug = pruning._slug(way)
        job = {**HOW, "way": list(way)}
        kept(results, f"accuracy-{slug}", job, {"accuracy": accuracy, "loss": 1.0})
    for work, factor in (("data", 1.0), ("long", 2.0), ("longer", 3.0)):
        speeds = {
            f"{kind}, {pruning.name_of(way)}": 10.0 if way == pruning.WHOLE else 10 * factor
            for kind in ("inference", "training")
            for way in pruning.WAYS
        }
        kept(results, f"speed-{work}", {"rows": work, "rank": pruning.RANK}, speeds)
    given = ["--cached", "--data", str(tmp_path / "data"), "--results", str(results)]
    assert pruning.main([*given, "--json", str(file), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "| whole rows | 80.0% | 1.00× | 1.00× | 1.00× | 1.00× | 1.00× | 1.00× |"
    assert "| fuse, keep 0.5 | 60.0% | 1.00× | 1.00× | 2.00× | 2.00× | 3.00× | 3.00× |" in said
    assert "| merge, keep 0.3 | – | 1.00× | 1.00× | 2.00× | 2.00× | 3.00× | 3.00× |" in said
    rows = json.loads(file.read_text())
    assert {row["bench"] for row in rows} == {"pruning"}
    (half,) = [r for r in rows if r["metric"] == "accuracy" and r["setting"] == "fuse, keep 0.5"]
    assert half["ratio"] == pytest.approx(0.75)
    assert half["peer_value"] == 0.8
    assert picture.stat().st_size > 1000


def test_every_way_is_a_technique_of_its_own() -> None:
    made = [pruning.techniques(way) for way in pruning.WAYS]
    assert [len(each) for each in made] == [1, *(2,) * 8]
    assert len({str(each) for each in made}) == 9
    assert sorted(pruning.WAYS, key=pruning._urgent)[:3] == [
        pruning.WHOLE,
        ("fuse", 0.5),
        ("merge", 0.5),
    ]
