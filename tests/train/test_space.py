"""Room on the disk: estimated before the first step, and refused in numbers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from afina.adapters.card import Record
from afina.config import TrainSettings
from afina.errors import RunError
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import checkpoint, saving, space
from afina.train.plan import optimiser_of
from afina.train.saving import Contents
from afina.train.state import State
from afina.tree import Seams
from tests.tiny import byte_tokenizer, tiny_llama
from tests.train.kit import Stop, run, same, stop_after, weights


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "rmsprop", "nadam"])
@pytest.mark.parametrize(
    ("technique", "dtype"),
    [(LoRA(rank=16), torch.float32), (Full(), torch.float32), (Full(), torch.bfloat16)],
)
def test_the_estimate_is_near_the_real_size(
    tmp_path: Path, technique: Any, dtype: torch.dtype, optimizer: str
) -> None:
    """Within 5 % and what the small text files take, of a model large enough for headers not to count."""
    model = tiny_llama(hidden_size=128, intermediate_size=256, dtype=dtype)
    edit = apply(model, [technique], seed=1)
    settings = TrainSettings(optimizer=optimizer)
    optimiser = optimiser_of(edit, settings, Seams())
    for tensor in edit.trainable().values():
        tensor.grad = torch.ones_like(tensor)
    optimiser.step()
    tokenizer = byte_tokenizer()
    estimated = space.checkpoint_bytes(edit, optimizer, tokenizer)
    contents = Contents(edit, optimiser, "tiny", tokenizer, Record())
    saved = saving.save(tmp_path, contents, State(step=1), {})
    real = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert abs(real - estimated) < 0.05 * real + 40_000


def test_so_many_checkpoints_lie_there_at_once() -> None:
    def most(validates: bool = False, total: int = 1000, **settings: Any) -> int:
        return space.checkpoints_at_once(TrainSettings(**settings), total, validates)

    assert most(save_every=100, keep_last=2) == 3  # two, and the one that is being written
    assert most(save_every=100, keep_last=None) == 10
    assert most(save_every=400, keep_last=5) == 3
    assert most(save_every=None) == 1
    assert most(True, save_every=100, keep_last=2, eval_every=50) == 4  # and the best


def test_only_what_would_take_less_room_is_advised() -> None:
    def advice(total: int = 1000, **settings: Any) -> str:
        return space.way_out(TrainSettings(**settings), total, validates=False)

    plain = "make room, or name a folder on another disk"
    assert (
        advice(keep_last=5)
        == f"{plain}, or keep fewer: --set train.keep_last=1 (in Python keep_last=1)"
    )
    fewer = "keep fewer: --set train.save_every=null (in Python save_every=None)"
    assert advice(keep_last=1) == f"{plain}, or {fewer}"
    assert advice(save_every=None) == plain
    assert advice(total=50) == plain  # one checkpoint, at the end


def test_a_run_that_cannot_fit_is_refused_before_its_first_step_and_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path / "run", steps=1)
    real = shutil.disk_usage

    def little(path: Any) -> Any:
        return real(path)._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", little)
    # What the folder holds may go, so the same run fits again.
    run(tmp_path / "run", steps=1, options={"overwrite": True})
    with pytest.raises(RunError, match="too little room") as caught:
        run(tmp_path / "run", LoRA(rank=16), steps=20, save_every=1, options={"overwrite": True})
    assert "1,000 bytes free" in str(caught.value.got)
    assert "KiB" in str(caught.value.wanted)
    assert "train.keep_last" in str(caught.value.cure)
    assert (first.weights / "adapter_model.safetensors").exists()
    with pytest.raises(RunError, match="too little room"):
        run(tmp_path / "other", steps=1)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 2 MiB, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a small disk; the same with simulated ones runs")
    try:
        yield place
    finally:
        # Lazily: tensors that were read from its files may still be mapped.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_others_fill_while_the_run_goes_on_costs_only_steps(small_disk: Path) -> None:
    """Filled to the last byte after the third step; the checkpoint before it is whole, and the run goes on later."""
    filler = small_disk / "filler"

    def fill(step: int) -> None:
        if step != 2:
            return
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 16, 1 << 10, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    settings = {"steps": 6, "save_every": 2}
    whole = weights(run(small_disk / "whole", **settings))
    shutil.rmtree(small_disk / "whole")
    out = small_disk / "run"
    with pytest.raises(RunError, match="could not be written: there is no room") as caught:
        run(out, options={"seams": Seams(after_step=(fill,))}, **settings)
    assert "0 bytes free" in str(caught.value.got)
    assert f"afina train --resume -o {out}" in str(caught.value.cure)
    assert checkpoint.latest(out) == out / "checkpoints/step-000002"
    filler.unlink()
    assert same(weights(run(out, options={"resume": True}, **settings)), whole)


def test_a_disk_that_is_too_small_is_refused_first(small_disk: Path) -> None:
    with pytest.raises(RunError, match="too little room"):
        run(small_disk / "run", LoRA(rank=16), steps=40, save_every=1, keep_last=None)
    assert not (small_disk / "run").exists()


def test_a_disk_that_is_read_only_is_refused_first(small_disk: Path) -> None:
    """Also for root, whom permissions do not keep out; and when there is a run to go on with."""

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    out = small_disk / "run"
    settings = {"steps": 4, "save_every": 2}
    with pytest.raises(Stop):
        run(out, options={"seams": stop_after(3)}, **settings)
    remount("ro")
    try:
        with pytest.raises(RunError, match="may not be written"):
            run(small_disk / "other", steps=1)
        with pytest.raises(RunError, match="may not be written"):
            run(out, options={"resume": True}, **settings)
    finally:
        remount("rw")
    assert run(out, options={"resume": True}, **settings).steps == 4
