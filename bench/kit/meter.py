"""What a worker notes while it trains, and how speed and memory are read from it."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Notes:
    """One line a step in `metrics.jsonl`: step, loss, real tokens of the step, when it ended, compiling until then."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "metrics.jsonl"

    def write(
        self,
        step: int,
        loss: float,
        tokens: int,
        trained: int,
        end_s: float,
        compile_s: float = 0.0,
    ) -> None:
        """Appends the line of one finished step.

        Args:
            step: counted from 1.
            loss: mean over the step's trained tokens, in nats.
            tokens: real tokens of the step (no padding).
            trained: tokens of the step that were labels.
            end_s: `time.perf_counter()` when the step had ended.
            compile_s: `compile_s()` then.
        """
        line = {
            "step": step,
            "loss": loss,
            "tokens": tokens,
            "trained": trained,
            "end_s": end_s,
            "compile_s": compile_s,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_notes(folder: str | Path) -> list[dict[str, Any]]:
    """The steps of a run in order; of a step that was repeated after a restart, the last line."""
    lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = {line["step"]: line for line in map(json.loads, lines)}
    return [steps[step] for step in sorted(steps)]


def tokens_per_second(notes: list[dict[str, Any]], warm: int) -> float:
    """Real tokens a second from the end of step `warm` to the end of the last step.

    The time between steps (collating, logging) is in it: it is time a user waits. The time of compiling is not: a run
    of any length has it once.

    Raises:
        ValueError: fewer than two steps are left to measure between.
    """
    if warm < 1 or len(notes) <= warm:
        raise ValueError(f"{len(notes)} steps with {warm} warm ones leave nothing to measure")
    tokens, seconds = counted(notes, warm)
    return tokens / seconds


def counted(notes: list[dict[str, Any]], warm: int) -> tuple[int, float]:
    """Real tokens of the steps behind the warm ones, and the seconds that they took without compiling."""
    first, last = notes[warm - 1], notes[-1]
    seconds = last["end_s"] - first["end_s"] - (compiling_s(last) - compiling_s(first))
    return sum(note["tokens"] for note in notes[warm:]), seconds


def compiling_s(note: dict[str, Any]) -> float:
    """Seconds of compiling until the end of a step; those of a worker that did not count them are 0."""
    return note.get("compile_s", 0.0)


def last_tenth_loss(notes: list[dict[str, Any]]) -> float:
    """Mean loss over the last tenth of the steps, at least one, weighted by trained tokens."""
    last = notes[-max(1, len(notes) // 10) :]
    return sum(n["loss"] * n["trained"] for n in last) / sum(n["trained"] for n in last)


def peak_memory_bytes() -> int:
    """The most memory this process has held: VmHWM on Linux, `ru_maxrss` elsewhere."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def compile_s() -> float:
    """Seconds that torch's compiler has taken in this process."""
    counters: Any = sys.modules.get("torch._dynamo.utils")
    if counters is None:
        return 0.0
    spent: dict[str, float] = counters.cumulative_time_spent_ns
    return sum(spent.get(f"entire_{part}_compile", 0.0) for part in ("frame", "backward")) / 1e9


def now_s() -> float:
    """The clock of every note."""
    return time.perf_counter()
