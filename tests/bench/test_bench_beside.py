"""Runs in turns: what each step took comes from the run itself, and a run that fails is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.kit import beside, stepping
from bench.kit.beside import Cost, in_turns
from bench.kit.rows import Rows, write_rows
from tests.tiny import byte_tokenizer, save_model, tiny_llama

FAKE = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
order = pathlib.Path(job["order"])
for step in range(job["steps"]):
    if step == job.get("fails"):
        sys.exit("out of tea")
    with order.open("a") as file:
        file.write(job["name"])
    line = {"step": step, "cpu_s": step + job["add"], "peak_bytes": 100 + step, "losses": [9.0] * step + [step]}
    print(json.dumps(line), flush=True)
    if not sys.stdin.readline():
        break
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that notes whose turn it is; the path is that of the notes."""
    (tmp_path / "fake_stepping.py").write_text(FAKE, "utf-8")
    monkeypatch.setattr(beside, "WORKER", "fake_stepping")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "order"


def jobs(order: Path, **more: Any) -> dict[str, dict[str, Any]]:
    """Three jobs."""
    same = {"threads": 1, "order": str(order)}
    return {name: {**same, "name": name, "add": at * 10, **more} for at, name in enumerate("abc")}


def test_each_is_first_in_its_turn_and_warm_steps_do_not_count(fake: Path, tmp_path: Path) -> None:
    found = in_turns(jobs(fake), tmp_path / "in", warm=2, counted=3)
    assert fake.read_text() == "abc" + "bca" + "cab" + "abc" + "bca"
    assert list(found) == ["a", "b", "c"]
    assert found["b"].seconds == [12, 13, 14]
    assert (found["b"].peak_bytes, found["b"].losses[-1]) == (104, 4)
    cost = Cost.of(found["b"], found["a"])
    assert (cost.time, cost.memory) == (13 / 3, 1)
    assert cost.pairs() == [
        ("processor time", "s a step", 13, 3),
        ("peak memory", "bytes", 104, 104),
    ]


def test_a_run_that_ends_early_is_an_error_with_the_end_of_its_log(
    fake: Path, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="out of tea"):
        in_turns(jobs(fake, fails=2), tmp_path / "in", warm=1, counted=3)
    with pytest.raises(RuntimeError, match="out of tea"):
        in_turns(jobs(fake, fails=0), tmp_path / "at once", warm=1, counted=3)


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job of the real worker, on a tiny model."""
    model = save_model(folder / "model", tiny_llama(), byte_tokenizer())
    made = [([1, 2, number, 9], [-100, -100, number, 9]) for number in range(10, 26)]
    write_rows(folder / "rows.json", Rows("tiny", made, []))
    job: dict[str, Any] = {
        "techniques": [{"lora": {"rank": 2}}], "train": {}, "lr": 1e-2, "seed": 0, "batch": 2, "steps": 5,
        "epoch_steps": 2,
        "model": str(model), "rows": str(folder / "rows.json"), "dtype": "fp32", "threads": 1, "max_new_tokens": 8,
    }  # fmt: skip
    return {**job, **changes}


def stepped(job: dict[str, Any], words: int) -> list[dict[str, Any]]:
    """The lines of a run that is asked for `words` steps beyond the first."""
    tells = io.StringIO()
    stepping.run(job, io.StringIO("\n" * words), tells)
    return [json.loads(line) for line in tells.getvalue().splitlines()]


def test_the_worker_makes_a_step_at_each_word_and_no_more(tmp_path: Path) -> None:
    lines = stepped(job(tmp_path), 3)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["cpu_s"] > 0 and line["peak_bytes"] > 2**20 for line in lines)
    assert [len(line["losses"]) for line in lines] == [0, 1, 2, 3]


def test_the_worker_trains_as_its_job_says(tmp_path: Path) -> None:
    plain = stepped(job(tmp_path), 3)[-1]["losses"]
    assert stepped(job(tmp_path, train={"recompute": True}), 3)[-1]["losses"] == pytest.approx(
        plain, rel=1e-6
    )
    full = [{"full": {}}]
    assert stepped(job(tmp_path, techniques=full), 3)[-1]["losses"][2] != pytest.approx(
        plain[2], rel=1e-6
    )
    packed = [{"quantize": {}}, {"lora": {"rank": 2}}]
    assert stepped(job(tmp_path, techniques=packed), 3)[-1]["losses"][0] != pytest.approx(
        plain[0], rel=1e-6
    )
