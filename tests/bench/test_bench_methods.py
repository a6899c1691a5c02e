"""The methods' bench: every method exists with these settings, results are kept, and rows say what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.kit import contest, method
from bench.kit.beside import Cost, Taken
from bench.kit.contest import BEST, Contest, Rows, slug
from bench.kit.method import made
from bench.kit.results import Results
from bench.kit.standing import Standing, figures, lines, missing, plot
from bench.kit.works import BASELINE, METHODS, WORKS
from bench.methods import parse

COST = Cost([2.0, 9.0, 3.0], 3 * 2**30, [1.0], [2.0, 1.0, 2.0], 2 * 2**30, [1.0])
LORA = Standing("lora", 1e-3, 2, 100, 0.5, 0.25, 0.52, 0.24, COST)
IA3 = Standing("ia3", 1e-2, 1, 10, 0.25, 0.5)
TRAINED = {"trained_parameters": 7, "loss": 1.0, "adapter_bytes": 1}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_these_settings(name: str) -> None:
    listed = METHODS[name].techniques
    assert [t.key for t in made(listed)] == [key for each in listed for key in each]


@pytest.mark.parametrize("model", WORKS)
def test_every_method_has_two_rates_in_every_work(model: str) -> None:
    work = WORKS[model]
    assert set(work.rates) == {each.kind for each in METHODS.values()}
    assert all(0 < low < high for low, high in work.rates.values())
    assert (work.max_new_tokens is None) == (work.kind == "classes")


def test_names_of_files_differ_and_have_no_spaces() -> None:
    found = [slug(name) for name in METHODS]
    assert len(set(found)) == len(METHODS)
    assert slug("lora, rank 64, rslora") == "lora-rank-64-rslora"
    assert slug("nf4 + lora") == "nf4-lora"
    assert slug("lora+") == "lora+"


# --- results ---


def test_a_result_is_found_by_its_key_and_cached_by_its_job(tmp_path: Path) -> None:
    kept = Results(tmp_path)
    kept.write("one", {"lr": 0.1}, "key", {"loss": 1.0}, "abc")
    assert kept.read("one", {"lr": 0.1}, "key") == {"loss": 1.0}
    assert kept.read("one", {"lr": 0.1}, "other rows") is None
    assert kept.read("two", {"lr": 0.1}, "key") is None
    cached = Results(tmp_path, cached=True)
    assert cached.read("one", {"lr": 0.1}, "") == {"loss": 1.0}
    assert cached.read("one", {"lr": 0.2}, "key") is None
    body = json.loads((tmp_path / "one.json").read_text("utf-8"))
    assert list(body) == ["key", "job", "commit", "machine", "versions", "result"]
    assert body["commit"] == "abc"


def own(job: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """A job's techniques without what gives the head its rate, which is the same beside all."""
    *rest, head = job["techniques"]
    if "layer_decay" not in head:
        return job["techniques"]
    assert head["layer_decay"]["scales"] == {"classifier": pytest.approx(3e-2 / job["lr"])}
    return rest


class Ran:
    """Stands in for training: a better score at the lower rate, best for the first methods."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, job: dict[str, Any]) -> dict[str, float]:
        self.jobs.append(job)
        place = [each.techniques for each in METHODS.values()].index(own(job))
        (Path(job["folder"]) / "run").mkdir()
        return {**TRAINED, "accuracy": 1 / (1 + place) - job["lr"] / 100}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    found = Ran()
    monkeypatch.setattr(method, "run", found)
    return found


def started(tmp_path: Path, *words: str, rows: str | None = "hash") -> Contest:
    """A contest of MiniLM over rows that nobody reads."""
    options = parse(["--work", str(tmp_path / "work"), "--results", str(tmp_path / "kept"), *words])
    given = None if rows is None else Rows("tiny", tmp_path / "rows.json", rows, str(tmp_path))
    return Contest(options, WORKS["minilm-l6-v2"], "tiny", given)


def test_a_rerun_makes_what_is_missing_and_the_best_get_a_second_seed(
    tmp_path: Path, ran: Ran
) -> None:
    some = started(tmp_path, "--part", "quality", "--only", "lora", "--only", "ia3")
    some.run()
    lora, ia3 = some.rates("lora"), some.rates("ia3")
    assert [job["lr"] for job in ran.jobs] == [lora[1], ia3[1], lora[0], ia3[0]]
    assert not list((tmp_path / "work").rglob("run"))
    started(tmp_path, "--part", "quality").run()
    assert len(ran.jobs) == 2 * len(METHODS) + BEST
    again = ran.jobs[-BEST:]
    assert [own(job) for job in again] == [
        each.techniques for each in list(METHODS.values())[:BEST]
    ]
    assert all(job["seed"] == 1 for job in again)
    assert again[0]["lr"] == lora[0]
    started(tmp_path, "--part", "quality").run()
    assert len(ran.jobs) == 2 * len(METHODS) + BEST
    started(tmp_path, "--part", "quality", "--only", "lora", rows="other").run()
    assert [job["lr"] for job in ran.jobs[2 * len(METHODS) + BEST :]] == [lora[1], lora[0]]


def test_cached_takes_what_is_there_without_rows_or_model(tmp_path: Path, ran: Ran) -> None:
    started(tmp_path, "--part", "quality", "--only", "lora").run()
    cached = started(tmp_path, "--cached", rows=None)
    cached.run()
    assert len(ran.jobs) == 2
    (found,) = cached.standings(METHODS)
    assert (found.method, found.lr, found.rates) == ("lora", cached.rates("lora")[0], 2)
    assert found.score == pytest.approx(1 - found.lr / 100)
    assert cached.again() == []


def test_a_run_that_fails_is_told_and_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran()

    def run(job: dict[str, Any]) -> dict[str, float]:
        if own(job) == METHODS["ia3"].techniques:
            raise RuntimeError("no such thing")
        return ran(job)

    monkeypatch.setattr(method, "run", run)
    some = started(tmp_path, "--part", "quality", "--only", "ia3", "--only", "lora")
    some.run()
    assert len(some.failures) == 2
    assert len(ran.jobs) == 2
    assert "tiny-ia3-0.01-0 failed: no such thing" in capsys.readouterr().out


def test_costs_are_taken_in_turns_with_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[list[str]] = []

    def in_turns(jobs: dict[str, Any], folder: Path, **sizes: int) -> dict[str, Taken]:
        together.append(list(jobs))
        assert all(job["threads"] == 1 for job in jobs.values())
        return {name: Taken([3.0] if name == "ia3" else [2.0], 10 + len(name), []) for name in jobs}

    monkeypatch.setattr(contest, "in_turns", in_turns)
    started(tmp_path, "--part", "cost", "--only", "ia3").run()
    started(tmp_path, "--part", "cost").run()
    assert together[0] == ["ia3", BASELINE]
    assert all(BASELINE in names for names in together)
    assert sorted(name for names in together for name in names if name not in {BASELINE}) == sorted(
        name for name in METHODS if name != BASELINE
    )
    found = started(tmp_path, "--cached", rows=None).cost("ia3")
    assert found is not None
    assert (found.time, found.memory) == (1.5, 13 / 14)


# --- the table ---


def test_a_cost_is_a_ratio_of_medians() -> None:
    assert (COST.time, COST.memory) == (1.5, 1.5)
    taken = Taken([1.0, 5.0, 2.0], 7, [])
    assert Cost.of(taken, replace(taken, peak_bytes=14)).memory == 0.5


def test_figures_stand_beside_lora() -> None:
    found = {(f.setting, f.metric): f for f in figures([LORA, IA3], "tiny", "accuracy")}
    one = found["ia3, lr 0.01", "accuracy"]
    assert (one.value, one.peer_value, one.ratio) == (0.25, 0.5, 0.5)
    assert ("ia3, lr 0.01", "accuracy, second seed") not in found
    assert ("ia3, lr 0.01", "processor time") not in found
    time = found["lora, lr 0.001", "processor time"]
    assert (time.value, time.peer, time.peer_value) == (3.0, "lora", 2.0)


def test_the_table_and_what_it_lacks() -> None:
    table = list(lines([LORA, IA3], "exact_match", markdown=True))
    assert "exact match" in table[0]
    assert table[2] == "| lora | 100 | 0.001 | 0.500 | 0.520 | 0.250 | 1.50 | 1.50 |"
    assert table[3] == "| ia3 | 10 | 0.01 (the only one run) | 0.250 |  | 0.500 |  |  |"
    assert list(lines([], "accuracy")) == ["nothing is there yet"]
    lacks = dict(line.split(": ") for line in missing([LORA, IA3]))
    assert lacks["at one learning rate so far"] == "ia3"
    assert "dora" in lacks["not trained yet"]
    assert "lora" not in lacks["not trained yet"].split("; ")
    assert "ia3" in lacks["time and memory not taken yet"]
    whole = [replace(LORA, method=name) for name in METHODS]
    assert list(missing(whole)) == []


def test_the_plot(tmp_path: Path) -> None:
    plot([LORA, IA3], tmp_path / "methods.png", "accuracy")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
