"""Processes that wait for work: a test runs a function in several of them at once, and gets what each gave.

They are forked from a server that has imported all that they need, so that a dozen of them start in a second. Each
piece of work has a process group of its own. A process that dies, or does not answer in time, fails the test with its
words.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 120
"""A process that has said nothing for so long hangs."""


class Failed(AssertionError):
    """What went wrong in the processes, the first of them first."""


class Pool:
    """Up to as many processes as were ever asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.parallel.preload"])
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, processes: int, work: Callable[..., Any], *given: Any) -> list[Any]:
        """What `work(*given)` gives in each of so many processes, by rank; it finds them by its environment.

        Raises:
            Failed: one raised, died or hangs.
        """
        while len(self._workers) < processes:
            here, there = self._context.Pipe()
            worker = self._context.Process(target=_serve, args=(there,), daemon=True)
            worker.start()
            there.close()
            self._workers.append((worker, here))
        port = free_port()
        chosen = self._workers[:processes]
        for rank, (_, pipe) in enumerate(chosen):
            pipe.send((rank, processes, port, work, given))
        found, wrong = [], []
        for rank, (worker, pipe) in enumerate(chosen):
            try:
                if not pipe.poll(1 if wrong else ANSWER_S):
                    raise EOFError
                good, value = pipe.recv()
            except (EOFError, ConnectionError):
                good, value = False, f"process {rank} says nothing (exit code {worker.exitcode})"
            (found if good else wrong).append(value)
        if wrong:
            self.close()
            raise Failed("\n".join(sorted(wrong, key=_of_another)))
        return found

    def close(self) -> None:
        """Ends the processes."""
        for worker, pipe in self._workers:
            worker.kill()
            worker.join()
            pipe.close()
        self._workers.clear()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _of_another(words: str) -> bool:
    """Whether an error tells of another process: the cause goes first."""
    return "Connection" in words or "says nothing" in words


def _serve(pipe: Connection) -> None:
    while True:
        try:
            rank, processes, port, work, given = pipe.recv()
        except EOFError:
            return
        told = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        try:
            answer = True, work(*given)
        except BaseException:
            answer = False, f"process {rank}: {traceback.format_exc()}"
        finally:
            _part()
        pipe.send(answer)


def _part() -> None:
    """Leaves the process group, if there is one, whatever happened."""
    import torch.distributed as dist  # noqa: TID251 - what a piece of work left behind

    if dist.is_initialized():
        dist.destroy_process_group()
