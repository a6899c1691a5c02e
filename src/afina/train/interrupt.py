"""Ctrl-C and SIGTERM end a run between two steps, where its state is whole, and not inside one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
END = b"\0"
"""Ends the watching thread: no signal has this number."""


class Stopping:
    """Whether somebody asked the run to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Notes the signal; a second one ends the process as it would have without this.

        Raises:
            KeyboardInterrupt, SystemExit: as `end`, at the second signal.
        """
        again = self.signal is not None
        self.signal = number
        if again:
            self.end()

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
def between_steps(tell: Callable[[int, int], None]) -> Iterator[Stopping]:
    """Inside the block signals are noted instead of raised; elsewhere than in the main thread nothing changes.

    Args:
        tell: called with 1, 2, … at the first signal, the second, …, and with the signal's number, at once and from
            another thread: Python's own handlers wait until the C++ call that is going on (a whole backward pass) has
            returned.
    """
    stopping = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    with _watched(tell):
        before = {n: signal.signal(n, stopping.ask) for n in NUMBERS}
        try:
            yield stopping
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _watched(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Calls `tell` from a thread when a signal arrives, through the descriptor that the C handler writes to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        asked = 0
        while (byte := os.read(reader, 1)) != END:
            if byte[0] in NUMBERS:
                asked += 1
                tell(asked, byte[0])

    thread = threading.Thread(target=watch, name="afina-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, END)
        thread.join()
        os.close(reader)
        os.close(writer)
