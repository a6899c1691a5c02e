"""A run over two machines: two network namespaces of this one, each with its own address and nothing else in common.

It needs root and `ip`; where these are missing it is skipped, and says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from afina.cli import main
from afina.train.metrics import read_metrics
from tests.tiny import byte_tokenizer, save_model, tiny_llama

pytestmark = pytest.mark.dist

NAMES = (f"afina-a-{os.getpid()}", f"afina-b-{os.getpid()}")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
WAIT_S = 400

HOW = (
    "--rank", "2", "--rows-per-step", "4", "--steps", "3", "--lr", "1e-2",
    "--set", "train.micro_rows=2", "--set", "train.dtype=fp32", "--set", "train.compile=false",
    "--set", "train.optimizer=sgd",
)  # fmt: skip


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces, and a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip(
            "two machines are made of network namespaces, which takes root and the program ip"
        )
    links = [f"af{side}{os.getpid() % 100_000}" for side in "ab"]
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            links[0],
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            NAMES[1],
        )
    except subprocess.CalledProcessError as error:
        _remove()
        pytest.skip(f"this kernel makes no network namespaces here: {error.stderr.strip()}")
    try:
        for name, link, address in zip(NAMES, links, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(machine: str, place: Path, *words: str) -> subprocess.Popen[str]:
    """`afina` on one of the machines."""
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, sys.executable, "-m", "afina.cli", *words],
        cwd=place,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a tiny model and data, on a disk that both machines see."""
    model = tiny_llama(dtype=torch.float32, initializer_range=0.05)
    save_model(tmp_path / "tiny", model, byte_tokenizer())
    rows: list[dict[str, Any]] = [{"prompt": f"say {i}", "completion": str(i)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_two_machines_make_the_run_of_one(
    machines: tuple[str, str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ("--nproc", "1", "--hosts", "2", "--master", f"{ADDRESSES[0]}:29512")
    runs = [
        start(
            machine, place, "train", "tiny", "rows.jsonl", "-o", "two", *HOW, *shared,
            "--host-rank", str(rank),
        )
        for rank, machine in enumerate(machines)
    ]  # fmt: skip
    try:
        said = [run.communicate(timeout=WAIT_S)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    assert "2 processes: 2 x data" in said[0]
    assert "done: 3 steps" in said[0]
    # The second machine says nothing of a run that goes well; torch itself misses names for these addresses.
    assert [line for line in said[1].splitlines() if "socket.cpp" not in line] == []
    monkeypatch.chdir(place)
    assert main(["train", "tiny", "rows.jsonl", "-o", "one", *HOW]) == 0
    found, expected = ([line["loss"] for line in read_metrics(place / o)] for o in ("two", "one"))
    assert found == pytest.approx(expected, rel=1e-5)
