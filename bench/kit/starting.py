"""How long afina's command line takes until it does something. Run as `python -m bench.kit.starting JOB.json`.

The job file holds `data` (rows to train on), `base`, `times`, `threads` and `folder`. `afina --help` is timed from its
start to its end, `afina train` from its start to the end of its first step, which `metrics.jsonl` shows; it is then
stopped. Each runs once before, which is not counted and fills the caches.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .jobs import write_json
from .meter import now_s

POLL_S = 0.005
COMMAND = (sys.executable, "-m", "afina.cli")


def run(job: dict[str, Any]) -> None:
    """Leaves the seconds of each run."""
    folder = Path(job["folder"])
    helps = [help_s() for _ in range(job["times"] + 1)][1:]
    firsts = [first_step_s(job, folder / "run") for _ in range(job["times"] + 1)]
    result = {"help_s": helps, "first_step_s": firsts[1:], "uncounted_first_step_s": firsts[0]}
    write_json(folder / "result.json", result)


def help_s() -> float:
    """Seconds of `afina --help`."""
    began = now_s()
    subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
    return now_s() - began


def first_step_s(job: dict[str, Any], out: Path) -> float:
    """Seconds from the start of `afina train` to the end of its first step, as its figures show it.

    Raises:
        RuntimeError: it ended without one.
    """
    shutil.rmtree(out, ignore_errors=True)
    words = ["train", job["base"], job["data"], "-o", str(out)]
    began = now_s()
    with subprocess.Popen([*COMMAND, *words]) as process:
        figures = out / "metrics.jsonl"
        while not (figures.exists() and figures.stat().st_size):
            if process.poll() is not None:
                raise RuntimeError(f"afina {' '.join(words)} ended with {process.returncode}")
            time.sleep(POLL_S)
        took = now_s() - began
        process.kill()
    shutil.rmtree(out, ignore_errors=True)
    return took


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text("utf-8")))
