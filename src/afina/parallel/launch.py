"""Starts the processes of a run on this machine, and speaks for them.

Each is told what torchrun would tell it (RANK, WORLD_SIZE, MASTER_ADDR, …), so that a process does not know who started
it. torchrun itself is not used: it ends processes half a minute after a signal whether their state is saved or not, has
the store in which they meet die with one of them, and lets everything be said N times. Here

* Ctrl-C and SIGTERM are handed on, and the processes stop between two steps, saved, however long that takes;
* of what goes wrong the first is said, in the words of the process in which it happened;
* what hangs is ended with the others;
* the store outlives the processes, so that it is known in which step one died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from afina.errors import AfinaError, RunError
from afina.parallel.failures import FILE, LAUNCHED, STOPPED, TERMINATED, Record
from afina.parallel.hosts import Hosts, Meeting
from afina.parallel.together import Failure

GRACE_S = 5.0
"""After one process failed, so long others may tell what they know before they are ended; see `watch.ANSWER_S`."""

STOP_S = 60.0
"""After one process has stopped as it was asked to, so long the others may take."""

AGAIN_S = 5.0
"""The same after a second signal."""

LAST_LINES = 30
"""Of a process that died without a word."""

LOOK_S = 0.05

MEMORY = (
    "if nobody did that, memory ran out: take smaller micro-batches, or share more out (afina plan)"
)


@dataclass(frozen=True)
class Ended:
    """A process that is not there any more.

    Attributes:
        rank: of it.
        status: as the system has it: minus the number of a signal that ended it.
        when: by the clock.
        asked: it stopped as it was asked to.
        record: what it left; None for nothing.
    """

    rank: int
    status: int
    when: float
    asked: bool
    record: Record | None

    @property
    def failed(self) -> bool:
        """Whether something went wrong in it."""
        return bool(self.status) and not self.asked

    @property
    def lost(self) -> bool:
        """Whether it only misses another one."""
        return self.record is not None and self.record.lost

    @property
    def since(self) -> float:
        """When it went wrong."""
        return self.when if self.record is None else self.record.at


@dataclass
class Launcher:
    """One command in several processes.

    Attributes:
        command: of each process.
        each: how many on this machine.
        hosts: all machines.
        timeout_s: in which machines meet.
        go_on: what to type after a process was lost; None where nothing goes on.
    """

    command: Sequence[str]
    each: int
    hosts: Hosts = field(default_factory=Hosts)
    timeout_s: float = 600
    go_on: str | None = None

    def __post_init__(self) -> None:
        self._signals: list[int] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, Ended] = {}
        self._elsewhere: AfinaError | None = None

    def run(self) -> None:
        """Starts them, and comes back when all are done.

        Raises:
            AfinaError: the first thing that went wrong.
            KeyboardInterrupt: they were asked to stop by Ctrl-C, and did.
            SystemExit: the same by SIGTERM; or one had a defect, whose traceback is shown.
        """
        with tempfile.TemporaryDirectory(prefix="afina-") as name, self._noting():
            self._folder = Path(name)
            meeting = Meeting(self.hosts, self.timeout_s)
            try:
                self._start(meeting.address)
                self._follow(meeting)
            finally:
                for process in self._running.values():
                    process.kill()
                for process in self._running.values():
                    process.wait()
            cause = self._cause()
            error = None if cause is None else self._error(cause, meeting)
            if cause is not None and self._elsewhere is None and not cause.lost:
                meeting.fail(Failure.of(error or _defect(cause)), cause.rank)
            meeting.leave()
        self._judge(cause, error)

    def _start(self, address: tuple[str, int]) -> None:
        for local in range(self.each):
            rank = self.hosts.rank * self.each + local
            # What the others write is shown only if they die without a word.
            written: Any = None if rank == 0 else self._log(rank).open("wb")
            self._running[rank] = subprocess.Popen(
                self.command,
                env=self._environment(rank, local, address),
                stdout=written,
                stderr=None if written is None else subprocess.STDOUT,
                # Ctrl-C in a terminal reaches all of its processes; these get it from here, once.
                start_new_session=True,
            )
            if written is not None:
                written.close()

    def _environment(self, rank: int, local: int, address: tuple[str, int]) -> dict[str, str]:
        told: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.each * self.hosts.many,
            "LOCAL_WORLD_SIZE": self.each,
            "GROUP_RANK": self.hosts.rank,
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
            # The store is here, and not in the first process.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            FILE: self._file(rank),
            LAUNCHED: os.getpid(),
        }
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self.each))}
        said = {name: str(value) for name, value in told.items()}
        return {**threads, **self.hosts.interface(), **os.environ, **said}

    def _file(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _follow(self, meeting: Meeting) -> None:
        """Until all are done, or one has failed and the others have had their say."""
        until = float("inf")
        while self._running and time.monotonic() < until:
            for rank, process in list(self._running.items()):
                status = process.poll()
                if status is not None:
                    self._ended[rank] = self._end_of(rank, status)
                    del self._running[rank]
            self._elsewhere = meeting.failed()
            cause = self._cause()
            if self._elsewhere is not None or (cause is not None and not cause.lost):
                return
            if any(one.status for one in self._ended.values()):
                until = min(until, time.monotonic() + (STOP_S if self._signals else GRACE_S))
            if len(self._signals) > 1:
                until = min(until, time.monotonic() + AGAIN_S)
            time.sleep(LOOK_S)

    def _end_of(self, rank: int, status: int) -> Ended:
        asked = bool(self._signals) and status in (STOPPED, *(-n for n in self._signals))
        return Ended(rank, status, time.time(), asked, Record.read(self._file(rank)))

    def _cause(self) -> Ended | None:
        """The first process that failed, before those that only miss another one."""
        failed = [one for one in self._ended.values() if one.failed]
        if failed:  # one that failed before them may take longer to end
            found = {rank: Record.read(self._file(rank)) for rank in self._running}
            failed += [Ended(r, 1, time.time(), False, one) for r, one in found.items() if one]
        if self._signals:  # who has stopped is missed by others
            failed = [one for one in failed if not one.lost]
        return min(failed, key=lambda one: (one.lost, one.since), default=None)

    def _judge(self, cause: Ended | None, error: AfinaError | None) -> None:
        """Raises for what happened, if anything did; see `run`."""
        if self._elsewhere is not None and (cause is None or cause.lost):
            raise self._elsewhere
        if error is not None:
            raise error
        if cause is not None and cause.record is not None:
            print(f"process {cause.rank}:\n{cause.record.trace}", file=sys.stderr, flush=True)
            raise SystemExit(cause.record.status)
        if self._signals and any(one.status for one in self._ended.values()):
            if self._signals[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(TERMINATED)

    def _error(self, cause: Ended, meeting: Meeting) -> AfinaError | None:
        """What a process said, or what is known of one that died without a word; None for a defect."""
        if cause.record is not None:
            error = cause.record.failure.error(cause.rank)
            if cause.lost and self.go_on is not None:
                cure = f"see what became of it, then go on with: {self.go_on}"
                return RunError(error.what, got=error.got, wanted=error.wanted, cure=cure)
            return None if cause.record.trace else error
        step = meeting.step_of(cause.rank)
        when = "before its first step" if step is None else f"in step {step}"
        going = [] if self.go_on is None else [f"go on with: {self.go_on}"]
        how, why = f"ended with status {cause.status}", None
        if cause.status < 0:
            how = f"was ended by {signal.Signals(-cause.status).name}"
            why = MEMORY if cause.status == -signal.SIGKILL else None
        return RunError(
            f"process {cause.rank} {how} {when}",
            got=self._last_words(cause.rank),
            cure="; ".join([*([why] if why else []), *going]) or None,
        )

    def _last_words(self, rank: int) -> str | None:
        """What a process wrote last; None where it wrote nothing, or wrote it to the terminal."""
        try:
            text = self._log(rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return "\n          ".join(text.splitlines()[-LAST_LINES:]) or None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Signals are handed on to the processes, which know when to stop."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._hand_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if not self._running and not self._ended:  # nothing has begun that could be saved
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)
        self._signals.append(number)
        for process in self._running.values():
            process.send_signal(number)


def _defect(cause: Ended) -> Exception:
    """What other machines are told of a process that had a defect."""
    assert cause.record is not None
    return RunError(
        f"process {cause.rank} failed",
        got=f"{cause.record.failure.kind}: {cause.record.failure.what}",
    )
