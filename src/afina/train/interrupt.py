"""Ctrl-C and SIGTERM end a run between two steps, where its state is whole, and not inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopping:
    """Whether somebody asked the run to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Notes the signal; a second one ends the process as it would have without this."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def end(self) -> None:
        """Ends the process as the signal asks, if there was one.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with its usual status 143.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)


@contextmanager
def between_steps() -> Iterator[Stopping]:
    """Inside the block signals are noted instead of raised; elsewhere than in the main thread nothing changes."""
    stopping = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {n: signal.signal(n, stopping.ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
