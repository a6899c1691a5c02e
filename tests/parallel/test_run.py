"""A whole run in several processes: its folder, its figures and its adapter are those of one process."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.config import ParallelSettings
from afina.errors import AfinaError, RunError
from afina.parallel.processes import Processes
from afina.train.metrics import read_metrics
from afina.train.report import Silent
from tests.parallel.pool import Failed, Pool
from tests.train.kit import ragged_rows
from tests.train.kit import run as one_run

pytestmark = pytest.mark.dist

# Plain SGD: AdamW makes much of the last bits of a gradient that is nearly zero.
HOW: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "steps": 5, "eval_every": 2, "save_every": 2}


def trained(out: Path, several: bool, options: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The run, in this process alone or as one of several."""
    mesh = {"mesh": Processes(ParallelSettings())} if several else {}
    made = one_run(
        out,
        options={**mesh, **options},
        val=ragged_rows(5, seed=9),
        **{**HOW, **rest},
    )
    if several:
        mesh["mesh"].end()
    return made


def figures(out: Path, name: str) -> list[Any]:
    """Of each step."""
    return [line.get(name) for line in read_metrics(out)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Of the adapter in a run's folder."""
    return load_file(out / "adapter" / "adapter_model.safetensors")


def test_a_run_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", False, {}, {})
    runs = pool.run(2, trained, tmp_path / "two", True, {}, {})
    assert [run.steps for run in runs] == [5, 5]
    assert [run.loss for run in runs] == [pytest.approx(alone.loss, abs=1e-9)] * 2
    for name in ("loss", "val_loss", "gradient_norm"):
        expected = [
            None if v is None else pytest.approx(v, abs=1e-9) for v in figures(alone.folder, name)
        ]
        assert figures(tmp_path / "two", name) == expected
    for name in ("rows", "tokens", "trained_tokens", "step"):
        assert figures(tmp_path / "two", name) == figures(alone.folder, name)
    found, expected = weights(tmp_path / "two"), weights(alone.folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9)
    # One process keeps the folder: no file more, and none that another would have written.
    files = [
        {p.relative_to(o).as_posix() for p in o.rglob("*")}
        for o in (tmp_path / "two", alone.folder)
    ]
    assert files[0] == files[1]


def test_a_run_goes_on_in_another_number_of_processes(pool: Pool, tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", False, {}, {})
    out = tmp_path / "two"
    pool.run(2, _stopped, out, 3)
    for processes in (3, 1):
        there = tmp_path / f"on-{processes}"
        shutil.copytree(out, there)
        if processes == 1:
            trained(there, False, {"resume": True}, {})
        else:
            pool.run(processes, trained, there, True, {"resume": True}, {})
        expected = [pytest.approx(v, abs=1e-9) for v in figures(alone.folder, "loss")]
        assert figures(there, "loss") == expected


def _stopped(out: Path, after: int) -> None:
    """The run, stopped by a signal to one of its processes after so many steps."""

    class Stops(Silent):
        def step(self, step: Any, total_steps: int) -> None:
            if step.step == after:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        trained(out, True, {"reporter": Stops()}, {})


def test_processes_wait_for_no_folder_that_is_in_use(pool: Pool, tmp_path: Path) -> None:
    trained(tmp_path / "run", False, {}, {})
    with pytest.raises(Failed, match="the output folder is in use"):
        pool.run(2, trained, tmp_path / "run", True, {}, {})


def test_what_works_in_one_process_alone_is_refused(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(2, _refused, tmp_path / "run", {"step_in_backward": True, "clip": None})
    assert all("train.step_in_backward works in one process alone" in words for words in told)


def _refused(out: Path, rest: dict[str, Any]) -> str:
    try:
        trained(out, True, {}, rest)
    except AfinaError as error:
        return str(error)
    raise RunError("it was not refused")
