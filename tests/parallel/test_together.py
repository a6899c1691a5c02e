"""A process that fails ends the others with its words; none waits for it."""

from __future__ import annotations

import os
import time

import pytest

from afina.config import ParallelSettings
from afina.errors import AfinaError, ConfigError, RunError
from afina.parallel.processes import Processes
from afina.parallel.runtime import OneProcess
from afina.parallel.together import Failure, patiently, together
from tests.parallel.pool import Pool


def _failing(rank: int, error: Exception) -> tuple[str, str]:
    """What is raised in this process when process `rank` raises `error`."""
    mesh = Processes(ParallelSettings())
    mesh.begin()

    def do() -> int:
        if int(os.environ["RANK"]) == rank:
            raise error
        return 1

    try:
        together(mesh, do)
    except Exception as raised:
        return type(raised).__name__, str(raised)
    raise AssertionError("nothing was raised")


def _told(fails: bool) -> object:
    mesh = Processes(ParallelSettings())
    mesh.begin()

    def make() -> int:
        if fails:
            raise ConfigError("no", got=1, wanted=2, cure="take 2")
        return 7

    try:
        return mesh.told(make)
    except AfinaError as raised:
        return type(raised).__name__, str(raised)


@pytest.mark.dist
def test_an_error_of_one_process_is_raised_in_all(pool: Pool) -> None:
    full = RunError("no room", got="/a/b", cure="make room")
    assert pool.run(3, _failing, 1, full) == [("RunError", str(full))] * 3
    found = pool.run(2, _failing, 1, KeyError("x"))
    assert found[1] == ("KeyError", "'x'")
    assert found[0][0] == "RunError"
    assert "process 1 failed" in found[0][1]
    assert "KeyError: 'x'" in found[0][1]


@pytest.mark.dist
def test_what_the_first_process_tells_or_raises_reaches_all(pool: Pool) -> None:
    assert pool.run(2, _told, False) == [7, 7]
    error = ConfigError("no", got=1, wanted=2, cure="take 2")
    assert pool.run(2, _told, True) == [("ConfigError", str(error))] * 2


def _slow(seconds: float, fails: bool) -> object:
    """Work of the first process that takes longer than the processes wait for each other."""
    mesh = Processes(ParallelSettings(timeout_s=2))
    mesh.begin()

    def do() -> str:
        time.sleep(seconds)
        if fails:
            raise RunError("it went wrong")
        return f"by {os.environ['RANK']}"

    try:
        return patiently(mesh, do)
    except RunError as raised:
        return raised.what


@pytest.mark.dist
def test_long_work_of_one_is_waited_for(pool: Pool) -> None:
    assert pool.run(2, _slow, 3.5, False) == ["by 0"] * 2
    assert pool.run(2, _slow, 0, True) == ["it went wrong"] * 2


def test_one_process_raises_what_it_raised() -> None:
    assert together(OneProcess(), lambda: 3) == [3]
    with pytest.raises(ZeroDivisionError):
        together(OneProcess(), lambda: 1 // 0)


def test_an_error_survives_its_way_as_text() -> None:
    error = ConfigError("no", got=[1], wanted=None, cure="take 2")
    assert str(Failure.of(error).error(4)) == str(error)
