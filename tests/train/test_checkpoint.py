"""A checkpoint: on the disk before it is named, known to be whole before it is used, and the last ones kept."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afina.adapters.card import Record
from afina.config import TrainSettings
from afina.errors import RunError
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train import checkpoint, durable, folder, manifest, randomness, saving, state
from afina.train.plan import optimiser_of
from afina.train.saving import Contents
from afina.train.state import State
from afina.tree import Seams
from tests.tiny import tiny_llama
from tests.train.kit import Stop, ragged_rows, run, same, stop_after, weights


@pytest.fixture(scope="module")
def contents() -> Contents:
    edit = apply(tiny_llama(), [LoRA(rank=2)], seed=1)
    return Contents(edit, optimiser_of(edit, TrainSettings(), Seams()), "tiny", None, Record())


def saved(run_folder: Path, contents: Contents, *steps: int) -> list[Path]:
    return [saving.save(run_folder, contents, State(step=step), {}) for step in steps]


def test_every_file_is_forced_to_the_disk_before_its_name_is_given(
    tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after any operation leaves the old checkpoint or the new one: each rename is of synced contents."""
    events: list[tuple[str, Path]] = []
    real_fsync, real_replace, real_rename = os.fsync, os.replace, Path.rename

    def fsync(handle: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        real_fsync(handle)

    def replace(source: Any, target: Any) -> None:
        events.append(("name", Path(target)))
        real_replace(source, target)

    def rename(self: Path, target: Any) -> Path:
        events.append(("name", Path(target)))
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "rename", rename)
    (done,) = saved(tmp_path, contents, 2)
    named = events.index(("name", done))
    temporary = durable.temporary_of(done)
    synced = {path.relative_to(temporary) for what, path in events[:named] if what == "sync"}
    assert synced == {Path(), *(path.relative_to(done) for path in done.rglob("*"))}
    # The folder that holds the name follows, and only then the pointer is written, synced and named.
    pointer = done.parent / "latest"
    after = [(what, path) for what, path in events[named + 1 :]]
    assert after == [
        ("sync", done.parent),
        ("sync", durable.temporary_of(pointer)),
        ("name", pointer),
        ("sync", done.parent),
    ]


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("adapter/adapter_model.safetensors", "truncate", "bytes"),
        ("optimiser.safetensors", "flip", "optimiser.safetensors does not hold what was written"),
        ("state.json", "edit", "state.json"),
        ("random.safetensors", "remove", "random.safetensors is missing"),
        ("manifest.json", "truncate", "manifest.json cannot be read"),
        ("manifest.json", "remove", "manifest.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_file_and_the_way_on(
    tmp_path: Path, contents: Contents, name: str, harm: str, said: str
) -> None:
    _, newest = saved(tmp_path, contents, 2, 4)
    assert checkpoint.latest(tmp_path) == newest
    path = newest / name
    whole = path.read_bytes()
    if harm == "truncate":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "flip":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif harm == "edit":
        path.write_bytes(whole.replace(b'"step": 4', b'"step": 5'))
    else:
        path.unlink()
    with pytest.raises(RunError) as caught:
        checkpoint.latest(tmp_path)
    assert said in str(caught.value.got)
    assert f"afina train --resume-from step-000002 -o {tmp_path}" in str(caught.value.cure)
    assert checkpoint.latest(tmp_path, "step-000002") == checkpoint.folder_of(tmp_path, 2)
    assert checkpoint.latest(tmp_path, "2") == checkpoint.folder_of(tmp_path, 2)
    with pytest.raises(RunError, match="no such checkpoint") as caught:
        checkpoint.latest(tmp_path, "step-000007")
    assert "step-000002, step-000004" in str(caught.value.wanted)
    shutil.rmtree(checkpoint.folder_of(tmp_path, 2) / "adapter")
    with pytest.raises(RunError, match="no other checkpoint is whole"):
        checkpoint.latest(tmp_path)


def test_a_pointer_that_is_gone_or_torn_means_the_newest(
    tmp_path: Path, contents: Contents
) -> None:
    assert checkpoint.latest(tmp_path) is None
    *_, newest = saved(tmp_path, contents, 2, 10)
    for torn in ("", None):
        pointer = tmp_path / "checkpoints/latest"
        pointer.unlink() if torn is None else pointer.write_text(torn)
        assert checkpoint.latest(tmp_path) == newest


def test_the_last_and_the_best_are_kept_and_later_ones_of_another_past_are_not(
    tmp_path: Path, contents: Contents
) -> None:
    saved(tmp_path, contents, 2, 4, 6, 8, 10)
    checkpoint.prune(tmp_path, State(step=8, best_step=2), keep_last=2)
    assert [f.name for f in checkpoint.found(tmp_path)] == [
        f"step-{step:06d}" for step in (2, 6, 8)
    ]
    checkpoint.prune(tmp_path, State(step=8), keep_last=None)
    assert len(checkpoint.found(tmp_path)) == 3
    # A folder of the user's that only looks like one is left alone.
    (tmp_path / "checkpoints/step-mine").mkdir()
    checkpoint.prune(tmp_path, State(step=8), keep_last=1)
    assert [f.name for f in checkpoint.found(tmp_path)] == ["step-000008"]
    assert (tmp_path / "checkpoints/step-mine").is_dir()


def test_weights_that_are_not_finite_push_no_good_ones_out(
    tmp_path: Path, contents: Contents
) -> None:
    (good,) = saved(tmp_path, contents, 2)
    name, tensor = next(iter(contents.edit.trainable().items()))
    kept = tensor.detach().clone()
    try:
        with torch.no_grad():
            tensor.view(-1)[3] = float("nan")
        with pytest.raises(RunError, match="not finite, so they are not saved") as caught:
            saved(tmp_path, contents, 4)
        assert name in str(caught.value.got)
    finally:
        with torch.no_grad():
            tensor.copy_(kept)
    assert checkpoint.found(tmp_path) == [good]
    assert checkpoint.latest(tmp_path) == good


def test_the_generators_go_on_where_they_were() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    random.gauss(0, 1)  # leaves a second value for later
    np.random.standard_normal()
    kept = {name: tensor.clone() for name, tensor in randomness.states().items()}

    def draws() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            float(np.random.standard_normal()),
            float(np.random.rand()),
            float(torch.rand(())),
        ]

    first = draws()
    other = draws()
    randomness.restore(kept)
    assert draws() == first
    assert other != first


def test_what_a_function_of_the_users_draws_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 + 2 = 4 with a seam that draws from Python's and numpy's generators; the control forgets their states."""

    def shake(step: int, tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            tensor.grad.mul_(1 + random.random() + float(np.random.rand()))

    def begin(out: Path, seams: Seams, **more: Any) -> Any:
        random.seed(1)
        np.random.seed(1)
        return run(out, steps=4, save_every=2, options={"seams": seams, **more})

    whole = begin(tmp_path / "whole", Seams(before_step=(shake,)))
    killed = Seams(before_step=(shake,), after_step=stop_after(2).after_step)
    for name in ("kept", "forgotten"):
        with pytest.raises(Stop):
            begin(tmp_path / name, killed)
    rest = begin(tmp_path / "kept", Seams(before_step=(shake,)), resume=True)
    assert same(weights(whole), weights(rest))
    monkeypatch.setattr(randomness, "restore", lambda saved: None)
    lost = begin(tmp_path / "forgotten", Seams(before_step=(shake,)), resume=True)
    assert not same(weights(whole), weights(lost))


def test_the_state_survives_its_text_and_refuses_another_form(tmp_path: Path) -> None:
    machine = state.Machine("cpu", "float32", 2, False, "2.13", "5.24", "AVX2")
    full = State(3, 6, 12, 340, 1, 2.5, 2, 1, 64, machine, {"train.lr": 1e-3, "a": [1, "x"]})
    path = tmp_path / "state.json"
    path.write_text(state.to_text(full))
    assert state.from_file(path) == full
    path.write_text(state.to_text(full).replace('"format": 1', '"format": 2'))
    with pytest.raises(RunError, match="another version of afina"):
        state.from_file(path)
    path.write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        state.from_file(path)


def test_what_killed_processes_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-000002.77.tmp", ".adapter.77.old"):
        (tmp_path / "checkpoints" / name / "inside").mkdir(parents=True)
    (tmp_path / ".config.yaml.77.tmp").write_text("x")
    (tmp_path / ".hidden").write_text("mine")
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / "config.yaml").write_text("model: x\n")
    with folder.claimed(tmp_path, resume=True, overwrite=False):
        left = sorted(path.name for path in tmp_path.rglob("*"))
    assert left == [".hidden", ".lock", "checkpoints", "config.yaml", "notes.tmp"]


def test_a_run_that_was_killed_as_it_began_leaves_its_folder_free(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"sources": []}')
    (tmp_path / ".config.yaml.77.tmp").write_text("x")
    folder.refuse_used(tmp_path, resume=False, overwrite=False)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match="in use"):
        folder.refuse_used(tmp_path, resume=False, overwrite=False)


@pytest.mark.parametrize("text", ['[{"prompt": "a"}]', '{"rows": 3}', "a letter", ""])
def test_a_file_of_somebodys_own_with_the_name_of_one_of_a_run_is_not_overwritten(
    tmp_path: Path, text: str
) -> None:
    """Training data called data.json, alone in its folder or beside a run.yaml that is called config.yaml."""
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(RunError, match="in use"):
        folder.refuse_used(tmp_path, resume=False, overwrite=False)
    (tmp_path / "config.yaml").write_text("model: model\ndata: data.json\n")
    with pytest.raises(RunError, match="not a run"):
        folder.refuse_used(tmp_path, resume=False, overwrite=True)


def test_what_a_new_run_is_made_from_does_not_lie_in_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "rows.jsonl").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (out / "adapter").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(out / "model")
    for inside in (out, out / "model", str(out / "rows.jsonl"), out / "adapter", tmp_path / "link"):
        with pytest.raises(RunError, match="the model lies in the folder of the run") as caught:
            folder.refuse_inside(out, {"the data": None, "the model": inside})
        assert caught.value.got == inside
    apart = {
        "a": tmp_path,
        "b": tmp_path / "elsewhere",
        "c": out / "nowhere",
        "d": [out],
        "e": "x" * 999,
        "f": out / folder.CONFIG,  # it has been read, and is written again
    }
    (out / folder.CONFIG).write_text("")
    folder.refuse_inside(out, apart)


def test_a_folder_without_a_run_names_those_in_it_or_one_that_is_called_alike(
    tmp_path: Path,
) -> None:
    for name in ("runs/calls-001", "runs/calls-002", "old/mail"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("model: x\n")

    def cure(out: str) -> str:
        with pytest.raises(RunError, match="no run to resume") as caught:
            folder.refuse_no_run(tmp_path / out)
        return str(caught.value.cure).replace(f"{tmp_path}/", "")

    assert cure("runs") == "name a run in it: runs/calls-001 or runs/calls-002"
    assert cure("runs/call-001").startswith("did you mean runs/calls-001 or")
    assert cure("old/weather").startswith("start one first, without --resume")


def test_overwriting_removes_last_what_shows_that_it_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of `--overwrite`, it can be said again."""
    out = tmp_path / "run"
    (out / "checkpoints/step-000002").mkdir(parents=True)
    for name in ("config.yaml", "data.json", "metrics.jsonl"):
        (out / name).write_text('{"sources": []}')

    def die(path: Any, *rest: Any, **more: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Stop), folder.claimed(out, resume=False, overwrite=True):
            pass
    assert (out / "config.yaml").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    (out / "nan").symlink_to(elsewhere)  # as of somebody who keeps his checkpoints on another disk
    with folder.claimed(out, resume=False, overwrite=True):
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert (elsewhere / "mine").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match="may not be written"):
            run(tmp_path / "run", steps=1, data=ragged_rows(2))
    finally:
        tmp_path.chmod(0o700)


def test_the_manifest_names_every_file_with_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b").write_bytes(b"")
    manifest.write(tmp_path)
    assert manifest.damage(tmp_path) == []
    # FIPS 180-2, appendix B.1: the hash of "abc".
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert known in (tmp_path / "manifest.json").read_text()
    (tmp_path / "more").write_text("beside")
    assert manifest.damage(tmp_path) == []
    (tmp_path / "in/b").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"xyz")
    assert manifest.damage(tmp_path) == [
        "a does not hold what was written",
        "in/b has 1 bytes, 0 were written",
    ]
