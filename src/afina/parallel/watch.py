"""Who is where: each process notes the step it is in, so that one that waits in vain can say for whom.

The notes lie in the store through which the processes met. When a message fails, all who waited for it say so there;
who does not say so within a moment is the one that hangs or is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from afina.parallel.failures import LostError

ANSWER_S = 3.0
"""Those who waited for one message give up within so many seconds of each other."""

STEP = "afina/step/{}"
WAITED = "afina/waited/{}"
"""Keys of a process's notes: its step, and that it waited in vain."""

FROM_GLOO = ("gloo/", "connection closed by peer", "connection reset by peer")
"""Words of gloo's errors, which are plain RuntimeErrors."""

GO_ON = (
    "see what became of it; then the run goes on from its newest checkpoint: afina train --resume … "
    "(in Python RunOptions(resume=True))"
)


def is_lost(error: BaseException) -> bool:
    """Whether an error is that of a message that did not come or could not be sent."""
    if isinstance(error, dist.DistError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in FROM_GLOO)


class Watch:
    """The notes of one process.

    Args:
        store: that all processes reach.
        rank: of this one.
        processes: how many there are.
        timeout_s: after which a message is given up.
        clock, sleep: of seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        processes: int,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._rank, self._processes = store, rank, processes
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep
        self._step: int | None = None

    def at(self, step: int) -> None:
        """A step begins, counted from 1."""
        self._step = step
        self._note(STEP.format(self._rank), str(step))

    def _note(self, key: str, value: str) -> None:
        # Whoever held the store may be gone, which is told where it matters.
        try:
            self._store.set(key, value)
        except RuntimeError:
            return

    def lost(self, error: BaseException) -> LostError:
        """What a failed message means."""
        self._note(WAITED.format(self._rank), str(self._step or 0))
        silent = self._silent()
        when = "before the first step" if self._step is None else f"in step {self._step}"
        if not silent:
            words = " ".join(str(error).split())[-200:]
            return LostError(f"the processes lost each other {when}", got=words, cure=GO_ON)
        who = ", ".join(map(str, silent))
        late = "timed out" in str(error).lower()
        return LostError(
            f"process {who} did not come {when}: it hangs, or is gone",
            got=f"no message within {self._timeout_s:g} s" if late else "a closed connection",
            wanted=f"a message within parallel.timeout_s={self._timeout_s:g}" if late else None,
            cure=GO_ON,
        )

    def _silent(self) -> list[int]:
        """Who says nothing for a moment, while the others say that they waited."""
        others = [rank for rank in range(self._processes) if rank != self._rank]
        until = self._clock() + ANSWER_S
        while others and self._clock() < until:
            others = [rank for rank in others if not self._said(rank)]
            self._sleep(0.05)
        return others

    def _said(self, rank: int) -> bool:
        try:
            return bool(self._store.check([WAITED.format(rank)]))
        except RuntimeError:
            return False


def met(backend: str, rank: int, processes: int, timeout: timedelta) -> Watch:
    """Meets the other processes, at the place that the environment names.

    Raises:
        LostError: some of them did not come.
    """
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, *_ = next(iter(rendezvous("env://", rank, processes, timeout=timeout)))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=processes, timeout=timeout
        )
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostError(
            f"the {processes} processes of this run did not meet",
            got=f"at {place}: {' '.join(str(error).split())[-200:]}",
            wanted=f"all of them within {timeout.total_seconds():g} s (parallel.timeout_s)",
            cure="start all of them; on several machines see that the address can be reached from each",
        ) from error
    return Watch(store, rank, processes, timeout.total_seconds())
