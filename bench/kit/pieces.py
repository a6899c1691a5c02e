"""Runs workers one at a time, each in a fresh process, and keeps what they leave: a rerun continues."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cache import PLACES
from .jobs import write_json
from .meter import now_s

ROOT = Path(__file__).parents[2]
LOCK = Path(tempfile.gettempdir()) / "afina-bench.lock"
BEGAN = "began.json"
MODULES = {
    "peer": "bench.kit.peer",
    "afina": "bench.kit.ours",
    "trl": "bench.kit.peer_trl",
    "llamafactory": "bench.kit.peer_llamafactory",
    "litgpt": "bench.kit.peer_litgpt",
    "unsloth": "bench.kit.peer_unsloth",
    "answers": "bench.kit.answers",
    "start": "bench.kit.starting",
    "llama": "bench.kit.llama",
}


def result_of(folder: Path) -> dict[str, Any] | None:
    """The result in a piece's folder; None while it is not finished."""
    path = folder / "result.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def began_s(folder: Path) -> float | None:
    """When a piece's process was started, on the clock of its notes; None where that was not kept."""
    path = folder / BEGAN
    return json.loads(path.read_text("utf-8"))["began_s"] if path.exists() else None


def newest(work: Path, name: str, job: dict[str, Any]) -> Path | None:
    """The piece of that name and that job which was finished last, whatever version of the tool it is of."""
    found = [
        path.parent
        for path in work.glob(f"{name}-*/result.json")
        if path.parent.name.rpartition("-")[0] == name
        and what(json.loads((path.parent / "job.json").read_text("utf-8"))) == what(job)
    ]
    return max(found, key=lambda folder: (folder / "result.json").stat().st_mtime, default=None)


def what(job: dict[str, Any]) -> dict[str, Any]:
    """A job without where it is done: a rows file's name holds its hash, an adapter's folder the key of its run."""
    kept = {key: value for key, value in job.items() if key not in PLACES and key != "adapter"}
    if "rows" in job:
        kept["rows"] = Path(job["rows"]).name
    if "adapter" in job:
        kept["adapter"] = Path(job["adapter"]).parent.name
    return kept


def run_piece(
    worker: str, folder: Path, job: dict[str, Any], python: str | Path = sys.executable
) -> dict[str, Any]:
    """The result of a piece: read if it is there, else made by a worker of its own.

    Args:
        worker: a key of `MODULES`.
        folder: of the piece; its `log` gets what the worker says.
        job: what `job.json` shall hold.
        python: the interpreter, of this environment or another.

    Raises:
        RuntimeError: the worker failed; the message ends with the end of its log.
    """
    done = result_of(folder)
    if done is not None:
        return done
    write_json(folder / "job.json", job)
    with only_one() as lock, (folder / "log").open("a", encoding="utf-8") as log:
        began = now_s()
        write_json(folder / BEGAN, {"began_s": began})
        command = [str(python), "-m", MODULES[worker], str((folder / "job.json").resolve())]
        status = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(job),
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
        )
    done = result_of(folder)
    if status.returncode or done is None:
        tail = (folder / "log").read_text("utf-8", errors="replace")[-1500:]
        raise RuntimeError(f"{worker} ended with status {status.returncode}; its log ends:\n{tail}")
    print(f"  {folder.name}: {now_s() - began:.0f} s", flush=True)
    return done


def environment(job: dict[str, Any]) -> dict[str, str]:
    """A worker's environment: the same for every tool.

    Waiting threads sleep (OMP_WAIT_POLICY): on a machine with other work, spinning ones make a step many times slower.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "OMP_NUM_THREADS": str(job["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def only_one(lock: Path | None = None) -> Iterator[int]:
    """Waits until no other bench on this machine has a worker running; yields the lock's file descriptor.

    A worker inherits it: the lock is held until the last of the two is gone, also when the bench alone is killed.

    Args:
        lock: of something else that only one may do; None is the machine's.
    """
    lock = LOCK if lock is None else lock
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"  waiting for another bench ({lock})", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
