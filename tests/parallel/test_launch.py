"""Who starts processes speaks for them: once, with what went wrong first; and stops them as one.

The processes here are a few lines of Python without torch, so that starting them costs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from afina.errors import ConfigError, DataError, RunError
from afina.parallel.failures import FILE, LAUNCHED, STOPPED, LostError, Record, reported
from afina.parallel.hosts import Hosts, Meeting, interface_to
from afina.parallel.launch import Launcher

pytestmark = pytest.mark.dist

BEFORE = """
import json, os, signal, sys, time
rank, place = int(os.environ["RANK"]), os.environ["PLACE"]
def fail(kind, what, at, lost=False, trace="", status=7):
    record = {"failure": {"kind": kind, "what": what, "got": "3", "wanted": None, "cure": "do"},
              "trace": trace, "status": status, "at": at, "lost": lost}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": what, "timestamp": int(at), "afina": record}, file)
    sys.exit(status)
def note(name, text=""):
    open(f"{place}/{name}-{rank}", "w").write(text)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """(body of a process, how many) -> their launcher."""
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def made(body: str, each: int = 2, hosts: Hosts | None = None) -> Launcher:
        script = tmp_path / "process.py"
        script.write_text(BEFORE + textwrap.dedent(body))
        command = [sys.executable, "-S", str(script)]
        return Launcher(command, each, hosts or Hosts(), 20, "afina train --resume -o run")

    return made


def test_processes_are_told_what_torchrun_tells(launcher, tmp_path: Path) -> None:
    launcher("note('told', json.dumps(dict(os.environ)))", 3).run()
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(3)]
    for rank, one in enumerate(told):
        assert (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert one["MASTER_ADDR"] == "127.0.0.1"
        assert one["MASTER_PORT"] == told[0]["MASTER_PORT"] != "0"
        assert one[LAUNCHED] == str(os.getpid())
        cores = len(os.sched_getaffinity(0))
        assert one["OMP_NUM_THREADS"] == str(max(1, cores // 3))
    assert len({one[FILE] for one in told}) == 3


def test_threads_that_the_user_sets_stay(
    launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launcher("note('threads', os.environ['OMP_NUM_THREADS'])").run()
    assert {(tmp_path / f"threads-{rank}").read_text() for rank in range(2)} == {"7"}


def test_the_first_speaks_and_the_others_do_not(launcher, capfd) -> None:
    launcher("print('from', rank); print('also', rank, file=sys.stderr)", 3).run()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("from 0\n", "also 0\n")


def test_what_went_wrong_first_is_raised_and_the_rest_is_ended(launcher, tmp_path: Path) -> None:
    body = """
    if rank == 0:
        time.sleep(0.3)
        fail("RunError", "later", 20.0)
    if rank == 1:
        fail("DataError", "earlier", 10.0, status=3)
    note("pid", str(os.getpid()))
    time.sleep(60)
    """
    with pytest.raises(DataError, match="earlier") as caught:
        launcher(body, 3).run()
    assert (caught.value.got, caught.value.cure, caught.value.exit_code) == ("3", "do", 3)
    if (tmp_path / "pid-2").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid-2").read_text()), 0)


def test_who_only_misses_another_is_not_the_cause(launcher) -> None:
    body = """
    if rank == 0:
        fail("RunError", "process 1 did not come", 10.0, lost=True)
    time.sleep(0.5)
    fail("ModelError", "the cause", 20.0, status=4)
    """
    with pytest.raises(Exception, match="the cause"):
        launcher(body).run()
    with pytest.raises(RunError, match="process 1 did not come") as caught:
        launcher("fail('RunError', 'process 1 did not come', 1.0, lost=True)").run()
    assert "afina train --resume -o run" in caught.value.cure


def test_a_defect_keeps_its_traceback_and_is_shown_once(launcher, capfd) -> None:
    # The first to fail takes longest to end.
    body = """
    time.sleep(0.5 * (rank != 0))
    try:
        fail('ValueError', 'x', 5.0 + rank, trace=f'Traceback of {rank}', status=1)
    finally:
        time.sleep(2 * (rank == 0))
    """
    with pytest.raises(SystemExit) as caught:
        launcher(body, 3).run()
    assert caught.value.code == 1
    said = capfd.readouterr().err
    assert said.count("Traceback of 0") == 1
    assert "Traceback of 1" not in said
    assert "process 0:" in said


def test_a_process_that_dies_without_a_word_is_named_with_its_last_words(launcher) -> None:
    body = """
    if rank == 1:
        print("one\\ntwo", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """
    with pytest.raises(RunError) as caught:
        launcher(body).run()
    assert caught.value.what == "process 1 was ended by SIGKILL before its first step"
    assert caught.value.got.split() == ["one", "two"]
    assert "memory ran out" in caught.value.cure
    with pytest.raises(RunError, match="process 1 ended with status 3"):
        launcher("sys.exit(3 * rank)").run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_waits_until_they_have_saved(
    launcher, tmp_path: Path, number: int
) -> None:
    body = f"""
    def stop(*_):
        time.sleep(0.5 * rank)
        note("saved")
        sys.exit({STOPPED})
    signal.signal({int(number)}, stop)
    note("there")
    time.sleep(60)
    """

    def send() -> None:
        while not all((tmp_path / f"there-{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    before = signal.getsignal(number)
    wanted = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(wanted) as caught:
        launcher(body).run()
    thread.join()
    assert number == signal.SIGINT or caught.value.code == 143
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert signal.getsignal(number) == before


def test_processes_stop_when_their_launcher_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "from afina.parallel import failures\n"
        "failures.PARENT_S = 0.05\n"
        "if len(sys.argv) > 1:\n"
        "    told = {**os.environ, failures.LAUNCHED: str(os.getpid())}\n"
        "    subprocess.Popen([sys.executable, sys.argv[0]], env=told, start_new_session=True)\n"
        "    time.sleep(60)\n"
        "def stop(*_):\n"
        f"    open({str(tmp_path / 'saved')!r}, 'w').close()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "failures.follow_parent()\n"
        f"open({str(tmp_path / 'there')!r}, 'w').close()\n"
        "time.sleep(60)\n"
    )
    launched = subprocess.Popen([sys.executable, str(script), "launcher"])
    _until(tmp_path / "there")
    assert not (tmp_path / "saved").exists()
    launched.kill()
    launched.wait()
    _until(tmp_path / "saved")


def _until(file: Path) -> None:
    for _ in range(600):
        if file.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{file} did not come")


def test_a_signal_before_anything_has_begun_ends_it(
    launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meets(self: Launcher, *args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(Launcher, "_start", meets)
    with pytest.raises(SystemExit) as caught:
        launcher("pass").run()
    assert caught.value.code == 143


def test_two_machines_meet_and_one_tells_the_other_what_went_wrong(launcher) -> None:
    # A port is free here and now; nobody else on this machine asks for it within a second.
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{found.getsockname()[1]}"
    body = """
    if rank == 1:
        fail("DataError", "no such file here", 10.0, status=3)
    time.sleep(60)
    """
    machines = [launcher(body, 1, Hosts(2, rank, master)) for rank in range(2)]
    raised: list[BaseException] = []
    # The handlers of signals belong to the main thread: a second machine has a process of its own.
    child = os.fork()
    if child == 0:
        try:
            machines[1].run()
        except DataError:
            os._exit(3)
        finally:
            os._exit(9)
    try:
        machines[0].run()
    except DataError as error:
        raised.append(error)
    assert [str(error) for error in raised] == ["no such file here\n  got:    3\n  cure:   do"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize(
    ("many", "rank", "master", "what"),
    [
        (1, 1, None, "for several machines"),
        (2, 0, None, "must know where they meet"),
        (2, 2, "10.0.0.1:5", "no such machine"),
        (2, 0, "10.0.0.1", "cannot be read"),
        (2, 0, "10.0.0.1:99999", "cannot be read"),
    ],
)
def test_hosts_that_do_not_go_together(many: int, rank: int, master: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Hosts(many, rank, master)


def test_a_machine_that_nobody_answers_says_so() -> None:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{found.getsockname()[1]}"
    with pytest.raises(RunError, match="the first machine does not answer") as caught:
        Meeting(Hosts(2, 1, master), 1)
    assert master in caught.value.got
    assert "--host-rank 0" in caught.value.cure


def test_the_interface_to_a_machine_is_found() -> None:
    assert Hosts(2, 1, "[fe80::1]:80").address == ("fe80::1", 80)
    assert interface_to("127.0.0.1") == "lo"


class TestReported:
    """What a process leaves, and what it says itself."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
        monkeypatch.delenv(LAUNCHED, raising=False)
        self.monkeypatch = monkeypatch
        return tmp_path / "error.json"

    def test_under_the_launcher_it_says_nothing(self, place: Path) -> None:
        self.monkeypatch.setenv(LAUNCHED, "1")
        with pytest.raises(SystemExit) as caught, reported(0):
            raise DataError("no rows", got=0)
        assert caught.value.code == 3
        record = Record.read(place)
        assert str(record.failure.error(0)) == "no rows\n  got:    0"
        assert not record.lost
        with pytest.raises(SystemExit), reported(0):
            raise LostError("process 1 did not come")
        assert Record.read(place).lost
        assert type(Record.read(place).failure.error(0)) is RunError
        with pytest.raises(SystemExit), reported(0):
            raise ValueError("x")
        assert "ValueError: x" in Record.read(place).trace
        for stop in (KeyboardInterrupt(), SystemExit(143)):
            with pytest.raises(SystemExit) as caught, reported(1):
                raise stop
            assert caught.value.code == STOPPED

    def test_under_torchrun_the_first_says_it(self, place: Path) -> None:
        with pytest.raises(DataError), reported(0):
            raise DataError("no rows")
        with pytest.raises(SystemExit), reported(1):
            raise DataError("no rows")
        with pytest.raises(ValueError, match="x"), reported(1):
            raise ValueError("x")
        assert "ValueError: x" in json.loads(place.read_text())["message"]
