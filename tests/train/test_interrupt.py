"""Ctrl-C and SIGTERM: told at once, acted on between steps, and at once when asked again."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from afina.train.interrupt import between_steps
from afina.train.report import Silent
from afina.tree import Seams
from tests.train.kit import run


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_told_while_the_call_that_it_came_into_goes_on() -> None:
    """In a C function, where Python's own handler waits: what is told comes before what that handler notes."""
    events: list[str] = []
    told = threading.Event()

    def tell(asked: int, number: int) -> None:
        events.append(f"told {asked} {number}")
        told.set()

    with between_steps(tell) as stopping:
        main = threading.main_thread().ident
        assert main is not None
        calling = threading.Event()

        def press() -> None:
            calling.wait()
            signal.pthread_kill(main, signal.SIGINT)

        other = threading.Thread(target=press)
        other.start()
        calling.set()
        while not told.is_set():
            # Some hundredths of a second without the interpreter's lock.
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)
            events.append("returned")
        other.join()
        assert stopping.signal == signal.SIGINT
    told_first = f"told 1 {int(signal.SIGINT)}"
    assert told_first in events
    # The call during which it was told returned after it.
    assert events[events.index(told_first) + 1 :] == ["returned"]


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_second_signal_ends_at_once_as_it_would_have_without_this(
    number: int, raised: type[BaseException]
) -> None:
    reached: list[int] = []

    def press_twice() -> None:
        with between_steps(lambda asked, number: None) as stopping:
            send(number)
            reached.append(stopping.signal or 0)
            send(number)
            reached.append(-1)

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(raised) as caught:
        press_twice()
    assert reached == [number]
    if raised is SystemExit:
        assert caught.value.code == 143
    assert {n: signal.getsignal(n) for n in before} == before


def test_elsewhere_than_in_the_main_thread_nothing_is_changed() -> None:
    found: list[object] = []

    def other() -> None:
        with between_steps(lambda asked, number: None) as stopping:
            found.append(stopping.signal)
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None, signal.getsignal(signal.SIGINT)]


def test_an_older_watcher_of_signals_gets_its_place_back() -> None:
    """Jupyter's event loop has one."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with between_steps(lambda asked, number: None):
            assert signal.set_wakeup_fd(-1) != writer
        assert signal.set_wakeup_fd(before) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def test_a_run_that_is_terminated_says_so_is_saved_and_ends_with_143(tmp_path: Path) -> None:
    said: list[str] = []

    class Listen(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    def terminate(step: int) -> None:
        if step == 1:
            send(signal.SIGTERM)

    options = {"seams": Seams(after_step=(terminate,)), "reporter": Listen()}
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", steps=5, options=options)
    assert caught.value.code == 143
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002"
    # The first is told by a thread of its own, which may come to it when step 2 is counted already.
    told = sorted(text for text in said if text.startswith(("finishing", "stopped")))
    assert len(told) == 2
    assert re.fullmatch(
        "finishing step [23], then saving; send the signal again to stop at once", told[0]
    )
    assert told[1] == (
        f"stopped after step 2 of 5, saved; go on with: afina train --resume -o {tmp_path / 'run'} "
        "(in Python RunOptions(resume=True))"
    )


@pytest.mark.parametrize(
    ("settings", "lost"),
    [({"save_every": None}, "no step is saved"), ({"save_every": 1}, "the steps after 1 are not")],
)
def test_a_second_signal_says_what_is_lost(
    tmp_path: Path, settings: dict[str, Any], lost: str
) -> None:
    said: list[str] = []

    class Listen(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    def twice(step: int) -> None:
        if step == 1:
            send(signal.SIGINT)
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path / "run",
            steps=5,
            options={"seams": Seams(after_step=(twice,)), "reporter": Listen()},
            **settings,
        )
    assert any(text.startswith("finishing step 2") and "press Ctrl-C" in text for text in said)
    assert any(text.startswith(f"stopping at once; {lost}") for text in said)
