"""Runs that go on in another layout: what was saved in whatever pieces is what one process would have saved."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from afina.adapters import files
from afina.config import ParallelSettings
from afina.data.curriculum import Curriculum
from afina.errors import AfinaError, RunError
from afina.optim.gradient_noise import GradientNoise
from afina.parallel import store
from afina.parallel.processes import Processes
from afina.parallel.store import Stored
from afina.techniques.adalora import AdaLoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train import durable, in_pieces, manifest
from afina.train.metrics import MetricsFile, read_metrics
from afina.train.report import Silent
from tests.parallel.pool import Failed, Pool
from tests.tiny import tiny_llama
from tests.train.kit import ragged_rows
from tests.train.kit import run as one_run

pytestmark = pytest.mark.dist

# An eps as large as gradients are: else AdamW makes much of the last bits of one that is nearly zero.
HOW: dict[str, Any] = {"optimizer": "adamw", "lr": 0.05, "eps": 0.1, "steps": 4, "eval_every": 2}
TECHNIQUES: dict[str, Any] = {
    "lora": LoRA(rank=3),
    "full": Full(),
    "timed": [
        LoRA(rank=3),
        Curriculum(difficulty="loss", start=0.3),
        GradientNoise(eta=0.05, gamma=0.0, mode="absolute"),
    ],
    "adalora": AdaLoRA(init_rank=4, target_rank=2),
}

Layout = tuple[int, dict[str, Any]]
"""How many processes, and how they share the run."""


class Stops(Silent):
    """Ends the run, as by a signal to one of its processes, after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, step: Any, total_steps: int) -> None:
        if step.step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(out: Path, key: str, shared: dict[str, Any], more: dict[str, Any]) -> None:
    """The run in this process, alone or as one of several; `stop` ends it after so many steps."""
    more = dict(more)
    options: dict[str, Any] = {"resume": more.pop("resume", False)}
    stop = more.pop("stop", None)
    if stop is not None:
        options["reporter"] = Stops(stop)
    mesh = Processes(ParallelSettings(**shared)) if "RANK" in os.environ else None
    if mesh is not None:
        options["mesh"] = mesh
    given = {**HOW, **more}
    try:
        one_run(out, TECHNIQUES[key], options=options, val=ragged_rows(5, seed=9), **given)
    except SystemExit:
        assert stop is not None
    finally:
        if mesh is not None:
            mesh.end()


def on(pool: Pool, layout: Layout, out: Path, key: str, **more: Any) -> None:
    """The run in a layout."""
    processes, shared = layout
    if processes == 1:
        trained(out, key, shared, more)
    else:
        pool.run(processes, trained, out, key, shared, more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole run in one process, by technique."""
    made: dict[str, Path] = {}

    def of(key: str) -> Path:
        if key not in made:
            made[key] = tmp_path_factory.mktemp("alone") / key
            trained(made[key], key, {}, {})
        return made[key]

    return of


def refuse_other(there: Path, alone: Path, key: str) -> None:
    """Asserts that a run's figures, weights and optimiser are those of one process."""
    for name in ("loss", "val_loss", "gradient_norm"):
        found, wanted = ([line.get(name) for line in read_metrics(p)] for p in (there, alone))
        assert found == [None if v is None else pytest.approx(v, abs=1e-9) for v in wanted], name
    for name in ("step", "rows", "tokens", "trained_tokens"):
        found, wanted = ([line.get(name) for line in read_metrics(p)] for p in (there, alone))
        assert found == wanted
    same(weights(there, key), weights(alone, key))
    last = "checkpoints/step-000004"
    assert manifest.damage(there / last) == []
    stored, expected = (in_pieces.stored_state(path / last) for path in (there, alone))
    assert stored.problems() == []
    same(whole(stored), whole(expected))


def weights(out: Path, key: str) -> dict[str, torch.Tensor]:
    kind = "model/model" if key == "full" else "adapter/adapter_model"
    return load_file(out / f"{kind}.safetensors")


def whole(stored: Stored) -> dict[str, torch.Tensor]:
    return {name: stored.read(name) for name in stored.shapes}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9)


ONE: Layout = (1, {})
LAYOUTS: list[tuple[str, Layout, list[Layout]]] = [
    ("lora", (2, {"zero": 1}), [ONE, (3, {"zero": 2}), (2, {})]),
    ("lora", (3, {"zero": 2}), [ONE, (2, {"zero": 1})]),
    ("lora", ONE, [(3, {"zero": 1})]),
    ("lora", (4, {"zero": 2, "replicate": 2}), [(3, {"zero": 1})]),
    ("full", (2, {"zero": 2}), [ONE, (3, {"zero": 1})]),
    ("full", ONE, [(2, {"zero": 1})]),
    ("lora", (3, {"zero": 3}), [ONE, (2, {"zero": 3}), (2, {"zero": 1})]),
    ("lora", ONE, [(2, {"zero": 3})]),
    ("lora", (2, {"zero": 2}), [(3, {"zero": 3})]),
    ("full", (2, {"zero": 3}), [ONE, (3, {"zero": 3})]),
    ("full", ONE, [(2, {"zero": 3})]),
    ("lora", (2, {"pipeline": 2}), [ONE, (2, {"zero": 3})]),
    ("lora", (4, {"pipeline": 2, "zero": 2}), [(2, {"pipeline": 2}), (3, {"zero": 2})]),
    ("lora", ONE, [(2, {"pipeline": 2})]),
    ("full", (2, {"pipeline": 2}), [ONE, (4, {"pipeline": 2, "zero": 1})]),
    ("lora", (2, {"tensor": 2}), [ONE, (2, {"zero": 3})]),
    ("lora", ONE, [(2, {"tensor": 2})]),
    ("lora", (4, {"tensor": 2, "zero": 3}), [(2, {"tensor": 2}), (2, {"pipeline": 2})]),
    ("full", (2, {"tensor": 2}), [ONE, (4, {"tensor": 2, "zero": 2})]),
    ("timed", (2, {"zero": 2}), [ONE, (3, {"zero": 3})]),
    ("timed", ONE, [(2, {"tensor": 2})]),
    ("adalora", (2, {"zero": 1}), [ONE, (2, {"tensor": 2})]),
    ("adalora", (2, {"tensor": 2}), [(2, {"zero": 2})]),
]


@pytest.mark.parametrize(
    ("key", "first", "then"),
    LAYOUTS,
    ids=[f"{key}-{n}-{shared}" for key, (n, shared), _ in LAYOUTS],
)
def test_a_run_goes_on_in_another_layout(
    pool: Pool, tmp_path: Path, alone: Any, key: str, first: Layout, then: list[Layout]
) -> None:
    out = tmp_path / "first"
    on(pool, first, out, key, stop=2)
    for number, layout in enumerate(then):
        there = tmp_path / str(number)
        shutil.copytree(out, there)
        on(pool, layout, there, key, resume=True)
        refuse_other(there, alone(key), key)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("layout", [(2, {"zero": 3}), (2, {"tensor": 2}), (2, {"pipeline": 2})])
def test_peft_and_transformers_read_what_is_left(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    ids = torch.tensor([[5, 9, 3, 7]])
    on(pool, layout, tmp_path / "lora", "lora")
    theirs: Any = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "lora/adapter"))
    ours = tiny_llama()
    files.load(ours, tmp_path / "lora/adapter")
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0, atol=1e-9)
    assert not torch.allclose(ours(ids).logits, tiny_llama()(ids).logits, atol=1e-3)
    on(pool, layout, tmp_path / "full", "full")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full/model", dtype=torch.float64)
    trained_, expected = dict(model.named_parameters()), dict(tiny_llama().named_parameters())
    assert trained_.keys() == expected.keys()
    assert all(not torch.equal(p, expected[name]) for name, p in trained_.items())


def _faulty(out: Path, shared: dict[str, Any], fault: str, rank: int, more: dict[str, Any]) -> str:
    """The run with a fault in the process of that rank at the second checkpoint; what was raised."""
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == rank:
            _plant(patch, fault)
        try:
            trained(out, "lora", shared, {"save_every": 1, **more})
        except AfinaError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    where, name = {
        "piece": (store, "write"),
        "rename": (durable, "publish"),
        "figures": (MetricsFile, "add"),
        "killed": (store, "write"),
        "elsewhere": (store, "write"),
    }[fault]
    real, calls = getattr(where, name), iter(range(100))

    def act(*given: Any) -> Any:
        if next(calls) != 1:
            return real(*given)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "elsewhere":
            return None
        raise OSError(errno.ENOSPC, "No space left on device", str(given[0]))

    patch.setattr(where, name, act)


@pytest.mark.parametrize(
    ("fault", "rank", "beside"),
    [
        ("rename", 0, False),
        ("piece", 0, False),
        ("piece", 1, False),
        ("figures", 0, False),
        ("piece", 1, True),
        ("rename", 0, True),
    ],
)
def test_a_disk_that_is_full_for_one_process_ends_all_with_its_error(
    pool: Pool, tmp_path: Path, alone: Any, fault: str, rank: int, beside: bool
) -> None:
    out = tmp_path / "run"
    told = pool.run(2, _faulty, out, {"zero": 1}, fault, rank, {"save_async": beside})
    if fault == "figures":
        assert all("No space left on device" in words for words in told)
    else:
        assert all("could not be written: there is no room" in words for words in told)
        assert all("step-000001 is whole" in words for words in told)
    left = {p.name for p in (out / "checkpoints").iterdir()}
    assert left == {"step-000001", "latest"}
    on(pool, ONE, out, "lora", resume=True, save_every=1)
    refuse_other(out, alone("lora"), "lora")


@pytest.mark.parametrize("beside", [False, True])
def test_a_process_that_is_killed_while_it_saves_ends_all_and_the_run_goes_on(
    pool: Pool, tmp_path: Path, alone: Any, beside: bool
) -> None:
    out = tmp_path / "run"
    more = {"save_async": beside}
    with pytest.raises(Failed, match="process 1 says nothing"):
        pool.run(2, _faulty, out, {"zero": 1, "timeout_s": 4}, "killed", 1, more)
    on(pool, (3, {"zero": 2}), out, "lora", resume=True, save_every=1)
    refuse_other(out, alone("lora"), "lora")
    assert [p for p in (out / "checkpoints").iterdir() if durable.is_leftover(p)] == []


@pytest.mark.parametrize("layout", [(2, {"zero": 3}), (2, {"pipeline": 2})])
def test_checkpoints_beside_training_are_those_of_one_process(
    pool: Pool, tmp_path: Path, alone: Any, layout: Layout
) -> None:
    out = tmp_path / "run"
    on(pool, layout, out, "lora", stop=3, save_every=1, save_async=True)
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == [
        "latest",
        "step-000002",
        "step-000003",
    ]
    on(pool, ONE, out, "lora", resume=True)
    refuse_other(out, alone("lora"), "lora")


def test_a_piece_that_lies_on_another_disk_is_missed(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(2, _faulty, tmp_path / "run", {"zero": 1}, "elsewhere", 1, {})
    assert all("what the processes wrote does not make up" in words for words in told)
    assert all("on a disk that all of them see" in words for words in told)


def test_another_layout_is_told_and_recorded_and_needs_no_leave(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    on(pool, (2, {"zero": 1}), out, "lora", stop=2)
    on(pool, ONE, out, "lora", resume=True)
    first = (out / "config.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# step 2: resumed with the processes: 2 x data, zero 1 then, 1 x data now"


@pytest.mark.parametrize("harm", ["gone", "flipped"])
def test_a_piece_that_is_not_as_it_was_written_is_refused(
    pool: Pool, tmp_path: Path, harm: str
) -> None:
    out = tmp_path / "run"
    on(pool, (2, {"zero": 1}), out, "lora", stop=2)
    piece = out / "checkpoints/step-000002/optimiser/part-00001.safetensors"
    if harm == "gone":
        piece.unlink()
    else:
        whole = bytearray(piece.read_bytes())
        whole[-1] ^= 1
        piece.write_bytes(whole)
    for layout in (ONE, (2, {"zero": 1})):
        with pytest.raises((RunError, Failed), match=r"part-00001.safetensors"):
            on(pool, layout, out, "lora", resume=True)
