from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kit import pieces
from bench.kit.cache import job_key, model_hash, source_hash
from bench.kit.jobs import Job

JOB = Job("afina", "default", {"dtype": "float32"}, "m", "r", "f", seed=0, steps=4)
WORKER = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
print("seed", job["seed"])
if job["seed"] < 0:
    sys.exit(3)
folder = pathlib.Path(job["folder"])
count = len(list(folder.parent.glob("*/result.json")))
(folder / "result.json").write_text(json.dumps({"seed": job["seed"], "count": count}))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that writes the seed it was given, and how many pieces were finished before it."""
    (tmp_path / "fake_worker.py").write_text(WORKER, "utf-8")
    monkeypatch.setattr(pieces, "MODULES", {"fake": "fake_worker"})
    monkeypatch.setattr(pieces, "LOCK", tmp_path / "lock")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "work"


def job(folder: Path, seed: int) -> dict[str, object]:
    return {"seed": seed, "threads": 1, "folder": str(folder)}


def test_a_key_changes_with_whatever_changes_the_result() -> None:
    def key(of: Job = JOB, rows: str = "r", model: str = "m", tool: str = "t", at: str = "") -> str:
        return job_key(of, rows, model, tool, at)

    changed = [
        key(replace(JOB, seed=1)),
        key(replace(JOB, steps=5)),
        key(replace(JOB, lr=2e-3)),
        key(replace(JOB, knobs={"dtype": "bfloat16"})),
        key(rows="other"),
        key(model="other"),
        key(tool="other"),
        key(at="machine"),
    ]
    assert key() not in changed
    assert len(set(changed)) == len(changed)
    assert key(replace(JOB, folder="g", rows="s", model="n", threads=9)) == key()
    assert key(replace(JOB, threads=9), at="machine") != key(at="machine")


def test_fingerprints_follow_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "a.py").write_text("x = 1")
    before = model_hash(tmp_path), source_hash(tmp_path)
    (tmp_path / "README.md").write_text("not part of either")
    os.utime(tmp_path / "a.py", (1, 1))
    assert (model_hash(tmp_path), source_hash(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert model_hash(tmp_path) != before[0]
    assert source_hash(tmp_path) != before[1]


def test_a_finished_piece_is_not_run_again_and_an_unfinished_one_is(worker: Path) -> None:
    first, second = worker / "one-k", worker / "two-k"
    assert pieces.run_piece("fake", first, job(first, 5)) == {"seed": 5, "count": 0}
    assert pieces.run_piece("fake", first, job(first, 6)) == {"seed": 5, "count": 0}
    (second / "result.json.tmp").parent.mkdir()
    (second / "result.json.tmp").write_text('{"se')  # what a worker that was stopped may leave
    assert pieces.result_of(second) is None
    assert pieces.run_piece("fake", second, job(second, 7)) == {"seed": 7, "count": 1}
    assert json.loads((second / "job.json").read_text())["seed"] == 7
    assert (second / "log").read_text() == "seed 7\n"


def test_a_failed_worker_is_an_error_with_the_end_of_its_log(worker: Path) -> None:
    with pytest.raises(RuntimeError, match=r"status 3; its log ends:\nseed -1"):
        pieces.run_piece("fake", worker / "bad-k", job(worker / "bad-k", -1))
    assert pieces.result_of(worker / "bad-k") is None


def test_newest_takes_the_last_finished_of_exactly_that_name_and_job(tmp_path: Path) -> None:
    def made(name: str, at: int, finished: bool = True, **changes: object) -> None:
        folder = tmp_path / name
        of = {"rows": "/x/rows-1.json", "lr": 0.1, "folder": str(folder)} | changes
        pieces.write_json(folder / "job.json", of)
        if finished:
            (folder / "result.json").write_text("{}")
            os.utime(folder / "result.json", (at, at))

    made("run-a-1", 1)
    made("run-a-2", 2)
    made("run-a-b-3", 3)
    made("run-a-4", 4, lr=0.2)
    made("run-a-5", 5, rows="/x/rows-2.json")
    made("run-a-6", 6, finished=False)
    wanted = {"rows": "/elsewhere/rows-1.json", "lr": 0.1, "folder": "", "threads": 7}
    assert pieces.newest(tmp_path, "run-a", wanted) == tmp_path / "run-a-2"
    assert pieces.newest(tmp_path, "run-c", wanted) is None


def test_answers_belong_to_the_run_whose_adapter_they_used() -> None:
    one, same, other = (
        {"rows": "rows-1.json", "adapter": adapter}
        for adapter in ("/a/run-k/adapter", "/b/run-k/adapter", "/a/run-l/adapter")
    )
    assert pieces.what(one) == pieces.what(same) != pieces.what(other)


def test_every_tool_gets_the_same_environment() -> None:
    found = pieces.environment({"threads": 2})
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["OMP_WAIT_POLICY"] == os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    assert found["HF_HUB_OFFLINE"] == "1"
