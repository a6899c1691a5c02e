"""Training runs beside one another: each in a process of its own, all making their steps in turns.

What else the machine does meets all of them, each has its own peak of memory, and processor time is of one thread.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jobs import write_json
from .pieces import ROOT, environment

WORKER = "bench.kit.stepping"
"""The module that makes a run's steps."""


@dataclass
class Taken:
    """What the counted steps of one run took.

    Attributes:
        seconds: of the processor, step by step.
        peak_bytes: the most memory that its process held.
        losses: in nats, of all its steps but the last, which it has not noted when it is stopped.
    """

    seconds: list[float]
    peak_bytes: int
    losses: list[float]


@dataclass(frozen=True)
class Cost:
    """What steps of a run took, and of the baseline in turns with it; each pair as in `Taken`."""

    seconds: list[float]
    peak_bytes: int
    losses: list[float]
    beside_seconds: list[float]
    beside_peak_bytes: int
    beside_losses: list[float]

    @staticmethod
    def of(own: Taken, beside: Taken) -> Cost:
        """From what the runs told."""
        return Cost(
            own.seconds,
            own.peak_bytes,
            own.losses,
            beside.seconds,
            beside.peak_bytes,
            beside.losses,
        )

    @property
    def time(self) -> float:
        """Median step over the baseline's."""
        return statistics.median(self.seconds) / statistics.median(self.beside_seconds)

    @property
    def memory(self) -> float:
        """Peak over the baseline's."""
        return self.peak_bytes / self.beside_peak_bytes

    def pairs(self) -> list[tuple[str, str, float, float]]:
        """(metric, unit, own value, the baseline's)."""
        own, beside = map(statistics.median, (self.seconds, self.beside_seconds))
        return [
            ("processor time", "s a step", own, beside),
            ("peak memory", "bytes", self.peak_bytes, self.beside_peak_bytes),
        ]


def in_turns(
    jobs: Mapping[str, dict[str, Any]], folder: Path, *, warm: int, counted: int
) -> dict[str, Taken]:
    """Runs of `bench.kit.stepping`, each in a process of its own, that make their steps in turns.

    Args:
        jobs: by name, each as the worker reads it, without `steps`.
        folder: for the job files and what the workers say.
        warm: leading steps of each that do not count, at least one.
        counted: steps that do, at least two.

    Raises:
        RuntimeError: a worker failed; the message ends with the end of its log.
    """
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                _Run.begun(folder / f"{number}", {**job, "steps": warm + counted})
            )
            for number, (name, job) in enumerate(jobs.items())
        }
        names = list(runs)
        for turn in range(1, warm + counted):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                runs[name].step()
    return {name: run.taken(warm) for name, run in runs.items()}


class _Run:
    """A worker and the lines that it has told."""

    def __init__(self, worker: subprocess.Popen[str], log: Path) -> None:
        self.worker, self.log = worker, log
        self.lines: list[dict[str, Any]] = []

    @staticmethod
    @contextmanager
    def begun(folder: Path, job: dict[str, Any]) -> Iterator[_Run]:
        """A run that has made its first step; ended when the block ends."""
        write_json(folder / "job.json", job)
        command = [sys.executable, "-m", WORKER, str((folder / "job.json").resolve())]
        with (folder / "log").open("w", encoding="utf-8") as log, subprocess.Popen(
            command, cwd=ROOT, env=environment(job), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        ) as worker:  # fmt: skip
            run = _Run(worker, folder / "log")
            try:
                run.hear()
                yield run
            finally:
                # The end of its input ends it; a block that failed does not wait for a step.
                worker.kill() if sys.exc_info()[0] else worker.communicate()

    def step(self) -> None:
        """One step."""
        assert self.worker.stdin is not None
        self.worker.stdin.write("\n")
        self.worker.stdin.flush()
        self.hear()

    def hear(self) -> None:
        """Waits for the line of a step."""
        assert self.worker.stdout is not None
        line = self.worker.stdout.readline()
        if not line:
            tail = self.log.read_text("utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"a run ended before its steps were made; its log ends:\n{tail}")
        self.lines.append(json.loads(line))

    def taken(self, warm: int) -> Taken:
        """Of the steps after the first `warm`."""
        last = self.lines[-1]
        return Taken(
            [line["cpu_s"] for line in self.lines[warm:]], last["peak_bytes"], last["losses"]
        )
