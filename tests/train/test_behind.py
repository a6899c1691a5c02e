"""A checkpoint that is written beside training holds what was there at its step, whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.errors import RunError
from afina.parallel import together
from afina.table import apply
from afina.techniques.adalora import AdaLoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import checkpoint, manifest
from afina.train.behind import Copies
from afina.train.report import Silent
from afina.train.saving import Saving, Values
from afina.tree.twin import twin_of
from tests.tiny import tiny_llama
from tests.train.kit import Stop, run, same, stop_after, weights

BESIDE: dict[str, Any] = {"save_async": True, "save_every": 1, "keep_last": None, "steps": 4}


@pytest.mark.parametrize(
    "technique", [LoRA(rank=2), AdaLoRA(init_rank=3, target_rank=2), Full(layers=(-1,))]
)
def test_every_file_is_the_one_that_would_have_been_written_at_once(
    tmp_path: Path, technique: Any
) -> None:
    folders = [tmp_path / "beside", tmp_path / "at-once"]
    for out in folders:
        run(out, technique, **{**BESIDE, "save_async": out.name == "beside"})
    names = [
        {p.relative_to(out).as_posix() for p in (out / "checkpoints").rglob("*") if p.is_file()}
        for out in folders
    ]
    assert names[0] == names[1]
    assert [f.name for f in checkpoint.found(folders[0])] == [f"step-00000{n}" for n in range(1, 5)]
    for name in sorted(name for name in names[0] if name.endswith(".safetensors")):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert all(manifest.damage(folder) == [] for folder in checkpoint.found(folders[0]))


class Watches(Silent):
    """Lets the writer go on when a step is done, and notes which checkpoints there are after each."""

    def __init__(self, out: Path, until: int) -> None:
        self.out, self.until = out, until
        self.may = threading.Event()
        self.there: dict[int, list[str]] = {}

    def step(self, step: Any, total_steps: int) -> None:
        self.there[step.step] = [f.name for f in checkpoint.found(self.out)]
        if step.step == self.until:
            self.may.set()


def test_steps_go_on_while_it_is_written_and_change_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calm = tmp_path / "run", tmp_path / "calm"
    run(calm, **{**BESIDE, "save_async": False})
    watches = Watches(out, until=3)
    real = Saving.write

    def write(self: Saving) -> dict[str, str]:
        if threading.current_thread() is not threading.main_thread():
            assert watches.may.wait(60)
        return real(self)

    monkeypatch.setattr(Saving, "write", write)
    run(out, options={"reporter": watches}, **{**BESIDE, "save_every": 2})
    # The writer waits until the third step is done: that step did not wait for it.
    assert watches.there[3] == []
    file = "checkpoints/step-000002/optimiser.safetensors"
    assert same(load_file(out / file), load_file(calm / file))
    assert not same(load_file(out / file), load_file(calm / file.replace("2/", "3/")))


def test_a_write_that_fails_is_an_error_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    real, failed = Saving.write, threading.Event()

    def write(self: Saving) -> dict[str, str]:
        if self.now.step == 2:
            failed.set()
            raise RunError("there is no room")
        return real(self)

    monkeypatch.setattr(Saving, "write", write)
    with pytest.raises(RunError, match="there is no room"):
        run(out, **BESIDE)
    assert failed.is_set()
    assert [f.name for f in checkpoint.found(out)] == ["step-000001"]
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"step-000001", "latest"}
    monkeypatch.setattr(Saving, "write", real)
    rest = run(out, options={"resume": True}, **BESIDE)
    assert same(weights(rest), weights(run(tmp_path / "whole", **BESIDE)))


def test_a_run_that_fails_meanwhile_keeps_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "LOOKS_EVERY_S", 0.01)
    out = tmp_path / "run"
    with pytest.raises(Stop):
        run(out, options={"seams": stop_after(2)}, **BESIDE)
    assert [f.name for f in checkpoint.found(out)] == ["step-000001", "step-000002"]
    assert manifest.damage(checkpoint.found(out)[-1]) == []


def test_the_memory_of_a_copy_is_used_again() -> None:
    edit = apply(tiny_llama(), [LoRA(rank=2)], seed=1)
    copies = Copies(twin_of(edit, frozen=True))
    state = {"a.step": torch.tensor(1.0), "a.exp_avg": torch.ones(3)}
    first = copies.take(Values(edit, state, {}, {}))
    assert first.edit is not None
    where = [t.data_ptr() for t in (*first.state.values(), *first.edit.trainable().values())]
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(1)
    assert not same(dict(first.edit.trainable()), dict(edit.trainable()))
    second = copies.take(Values(edit, state, {}, {}))
    assert second.edit is first.edit
    assert same(dict(second.edit.trainable()), dict(edit.trainable()))
    assert where == [
        t.data_ptr() for t in (*second.state.values(), *second.edit.trainable().values())
    ]
    # What does not train is the run's own.
    frozen = dict(edit.model.named_parameters())["model.norm.weight"]
    assert dict(first.edit.model.named_parameters())["model.norm.weight"] is frozen
