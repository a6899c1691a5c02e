"""A process that dies, hangs or fails ends the run with its name and step; the run then goes on from its checkpoint.

These start real processes by the command line, which costs seconds each: as few as there are kinds of fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251 - the store, as a process sees it

from afina.cli import main
from afina.config import ParallelSettings
from afina.parallel.failures import LostError
from afina.parallel.hosts import Hosts, Meeting
from afina.parallel.processes import Processes
from afina.parallel.watch import ANSWER_S, STEP, Watch, is_lost
from afina.train import checkpoint
from afina.train.metrics import read_metrics
from tests.parallel.pool import Pool
from tests.tiny import byte_tokenizer, save_model, tiny_llama

pytestmark = pytest.mark.dist

WAIT_S = 240
"""Of this test, on a machine that does much else."""

HOW = (
    "--rank", "2", "--rows-per-step", "4", "--lr", "1e-2",
    "--set", "train.micro_rows=2", "--set", "train.dtype=fp32", "--set", "train.compile=false",
    "--set", "train.optimizer=sgd",
    "--set", "train.schedule=constant", "--set", "train.warmup_steps=0",
)  # fmt: skip
LONG = ("--steps", "100000", "--set", "train.save_every=5", "--set", "parallel.timeout_s=8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and data."""
    folder = tmp_path_factory.mktemp("faults")
    model = tiny_llama(dtype=torch.float32, initializer_range=0.05)
    save_model(folder / "tiny", model, byte_tokenizer())
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Call:
    """`afina train` in several processes, from outside."""

    def __init__(self, place: Path, out: str, *words: str, starter: tuple[str, ...] = ()) -> None:
        self.out = place / out
        self.said = place / f"{out}.txt"
        command = [sys.executable, "-m", *(starter or ("afina.cli",)), "train", *words, "-o", out]
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=place, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def words(self) -> str:
        return self.said.read_text()

    def steps(self) -> int:
        """How many it has made."""
        try:
            return len((self.out / "metrics.jsonl").read_text().splitlines())
        except OSError:
            return 0

    def until_step(self, step: int) -> None:
        for _ in range(WAIT_S * 10):
            if self.steps() >= step:
                return
            assert self.process.poll() is None, self.words()
            time.sleep(0.1)
        raise AssertionError(f"no step {step} within {WAIT_S} s: {self.words()}")

    def worker(self, rank: int) -> int:
        """The process of that rank."""
        for number in filter(str.isdigit, os.listdir("/proc")):
            try:
                told = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
                parent = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if f"RANK={rank}".encode() in told and int(parent) == self.process.pid:
                return int(number)
        raise AssertionError(f"there is no process {rank}")

    def end(self) -> tuple[int, str]:
        """Its status, and what it said."""
        return self.process.wait(WAIT_S), self.words()


@pytest.fixture
def call(place: Path) -> Iterator[Any]:
    """(folder of the run, words) -> a call; what is left of it is ended."""
    calls: list[Call] = []

    def made(out: str, *words: str, starter: tuple[str, ...] = ()) -> Call:
        calls.append(Call(place, out, *words, starter=starter))
        return calls[-1]

    yield made
    for one in calls:
        if one.process.poll() is None:
            one.process.kill()


def gone(number: int) -> bool:
    """Whether a process is not there any more."""
    for _ in range(50):
        if not Path(f"/proc/{number}").exists():
            return True
        time.sleep(0.1)
    return False


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)]


def test_a_killed_process_ends_the_run_which_goes_on_in_one(
    place: Path, call: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = call("killed", "tiny", "rows.jsonl", "--nproc", "2", *HOW, *LONG)
    run.until_step(12)
    other = run.worker(0)
    os.kill(run.worker(1), signal.SIGKILL)
    status, said = run.end()
    assert status == 7, said
    assert "error: process 1 was ended by SIGKILL in step" in said
    assert "go on with: afina train --resume -o killed --nproc 2" in said
    assert "Traceback" not in said
    assert said.count("error") == 1
    assert gone(other)
    saved = checkpoint.step_of(checkpoint.found(run.out)[-1])
    # The plain command, in one process; and the whole run beside one that was never stopped.
    monkeypatch.chdir(place)
    steps = ("--steps", str(saved + 3))
    assert main(["train", "--resume", "--allow-changes", *steps, "-o", "killed"]) == 0
    assert f"going on after step {saved} of {saved + 3}" in capfd.readouterr().err
    assert main(["train", "tiny", "rows.jsonl", *HOW, *steps, "-o", "alone"]) == 0
    assert losses(run.out) == pytest.approx(losses(place / "alone"), rel=1e-4)


def test_a_signal_stops_all_between_steps_and_saves_and_torchrun_goes_on(
    place: Path, call: Any
) -> None:
    run = call("stopped", "tiny", "rows.jsonl", "--nproc", "2", *HOW, *LONG)
    run.until_step(7)
    os.kill(run.process.pid, signal.SIGTERM)
    status, said = run.end()
    assert status == 143, said
    assert "then saving; send the signal again to stop at once" in said
    assert said.count("stopped after step") == 1
    step = run.steps()
    assert checkpoint.step_of(checkpoint.found(run.out)[-1]) == step
    # torchrun's own start, of the same run; only the first process speaks.
    torchrun = ("torch.distributed.run", "--nproc-per-node=2", "-m", "afina.cli")
    steps = ("--allow-changes", "--steps", str(step + 2))
    status, said = call("stopped", "--resume", *steps, starter=torchrun).end()
    assert status == 0, said
    assert said.count(f"going on after step {step} of {step + 2}") == 1
    assert said.count("done: ") == 1
    assert run.steps() == step + 2


def misses(rank: int, timeout_s: int) -> str:
    """What a process says in step 2 of a run in which process `rank` hangs then."""
    mesh = Processes(ParallelSettings(timeout_s=timeout_s))
    mesh.begin()
    try:
        with mesh.watched():
            for step in (1, 2):
                mesh.at(step)
                if step == 2 and mesh.rank == rank:
                    # Longer than the others wait for it, and for each other's word.
                    time.sleep(timeout_s + ANSWER_S + 2)
                    return "it woke up"
                mesh.sum(1.0)
    except LostError as error:
        return str(error)
    finally:
        mesh.end()
    raise AssertionError("nothing went wrong")


def test_a_process_that_hangs_is_named_by_all_that_wait_for_it(pool: Pool) -> None:
    found = pool.run(3, misses, 1, 3)
    assert found[1] == "it woke up"
    for words in (found[0], found[2]):
        assert "process 1 did not come in step 2: it hangs, or is gone" in words
        assert "parallel.timeout_s=3" in words
        assert "--resume" in words


def test_the_step_of_a_process_is_known_when_it_is_gone() -> None:
    meeting = Meeting(Hosts(), 10)
    address, port = meeting.address
    client = dist.TCPStore(address, port, is_master=False)
    assert meeting.step_of(1) is None
    watch = Watch(client, 1, 2, 10)
    watch.at(4)
    watch.at(5)
    # The store answers no set: what is asked behind it, on the same line, is answered when it is done.
    assert client.get(STEP.format(1)) == b"5"
    assert meeting.step_of(1) == 5
    assert meeting.failed() is None


def test_what_is_no_lost_message_is_left_alone() -> None:
    assert not is_lost(RuntimeError("shape '[2]' is invalid"))
    assert not is_lost(ValueError("Connection closed by peer"))
    assert is_lost(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]"))
    assert is_lost(dist.DistStoreError("wait timeout"))
