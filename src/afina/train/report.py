"""What a run tells the user while it goes: a live line in a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Protocol, TextIO

from afina.train.work import Step


class Reporter(Protocol):
    """Where a run says what it does."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def step(self, step: Step, total_steps: int) -> None:
        """After each optimiser step."""
        ...

    def close(self) -> None:
        """At the end, also after an error."""
        ...


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, step: Step, total_steps: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """Says about twenty lines in a run, for logs and pipes.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.pace = Pace()

    def say(self, text: str) -> None:
        """A line."""
        print(text, file=self.out, flush=True)

    def step(self, step: Step, total_steps: int) -> None:
        """A line at the first, the last and every twentieth part of the run."""
        self.pace.add(step)
        each = max(1, total_steps // 20)
        if step.step == 1 or step.step == total_steps or step.step % each == 0:
            self.say(self.pace.line(step, total_steps))

    def close(self) -> None:
        """Nothing is open."""


class Live:
    """One line that renews itself, in a terminal.

    Args:
        console: of rich.
    """

    def __init__(self, console: Any) -> None:
        from rich.status import Status

        self.console = console
        self.pace = Pace()
        self.status = Status("starting", console=console)
        self._open = False

    def say(self, text: str) -> None:
        """A line above the live one."""
        self.console.print(text, highlight=False, markup=False)

    def step(self, step: Step, total_steps: int) -> None:
        """Renews the live line."""
        if not self._open:
            self.status.start()
            self._open = True
        self.pace.add(step)
        self.status.update(self.pace.line(step, total_steps))

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._open:
            self.status.stop()
            self._open = False


class Pace:
    """Tokens a second and time left, from the last steps."""

    def __init__(self) -> None:
        self.recent: deque[tuple[int, float]] = deque(maxlen=20)

    def add(self, step: Step) -> None:
        """Counts a step."""
        self.recent.append((step.tokens, step.seconds))

    def tokens_per_s(self) -> float:
        """Real tokens a second over the last steps."""
        seconds = sum(s for _, s in self.recent)
        return sum(t for t, _ in self.recent) / seconds if seconds else 0.0

    def seconds_left(self, step: int, total_steps: int) -> float:
        """Time to the end at the pace of the last steps."""
        mean = sum(s for _, s in self.recent) / len(self.recent) if self.recent else 0.0
        return mean * (total_steps - step)

    def line(self, step: Step, total_steps: int) -> str:
        """Loss, pace, memory and time left."""
        memory = f"  peak {step.peak_bytes / 2**30:.2f} GiB" if step.peak_bytes else ""
        left = time.strftime("%H:%M:%S", time.gmtime(self.seconds_left(step.step, total_steps)))
        return (
            f"step {step.step}/{total_steps}  loss {step.loss:.4f}  "
            f"{self.tokens_per_s():,.0f} tokens/s{memory}  left {left}"
        )


def reporter(console: Any | None = None) -> Reporter:
    """A live line in a terminal, plain lines elsewhere."""
    if console is None:
        from rich.console import Console

        console = Console(stderr=True)
    return Live(console) if console.is_terminal else Lines()
