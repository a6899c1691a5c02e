"""Activations that are kept elsewhere meanwhile come back as they were; weights stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from afina.config import TrainSettings
from afina.errors import ConfigError
from afina.models import offload
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.models.offload import Offload, offloaded
from afina.parallel.plan import Plan
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.ahead import made
from afina.train.fit import refuse_several
from afina.train.loop import backward
from tests.tiny import tiny_llama
from tests.train import kit

HERE = torch.device("cpu")
KINDS = {"lora": LoRA(rank=2, dropout=0.1), "full": Full(), "dora": DoRA(rank=2)}


def gradients(kind: str, recompute: Any, moved: Offload | None = None, edit: Any = None) -> Any:
    """Of one pass; where `moved` is given its hooks run around it."""
    edit = edit or apply(tiny_llama(dtype=torch.float32), [KINDS[kind]], seed=3)
    work = kit.work_of(edit)
    torch.manual_seed(0)
    with packing(edit.model, True), Blocks(edit.model, recompute).running():
        if moved is None:
            backward(work, made(work, kit.ragged_rows(4)), 0)
        else:
            with moved.running():
                backward(work, made(work, kit.ragged_rows(4)), 0)
    return {name: p.grad for name, p in edit.trainable().items()}


@pytest.mark.parametrize("recompute", [False, True, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_bit_for_bit(kind: str, recompute: Any) -> None:
    edit = apply(tiny_llama(dtype=torch.float32), [KINDS[kind]], seed=3)
    moved = Offload(edit.model, HERE, least_bytes=1)
    found, wanted = gradients(kind, recompute, moved, edit), gradients(kind, recompute)
    assert moved.moved_bytes > 0
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_comes_back_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = apply(tiny_llama(dtype=torch.float32), [KINDS["full"]], seed=3)
    wrong = 1.001
    monkeypatch.setattr(
        Offload, "_back", lambda self, kept: kept * wrong if kept.is_floating_point() else kept
    )
    found = gradients("full", False, Offload(edit.model, HERE, least_bytes=1), edit)
    wanted = gradients("full", False)
    assert not all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_and_small_tensors_stay() -> None:
    layer = torch.nn.Linear(8, 8)
    moved = Offload(layer, HERE, least_bytes=1)
    x = torch.ones(3, 8, requires_grad=True)
    with moved.running():
        y = layer(x).exp()
    # The input of the map and the result of exp, and not the weight.
    assert moved.moved_bytes == 2 * x.nbytes
    y.sum().backward()
    small = Offload(layer, HERE, least_bytes=x.nbytes + 1)
    with small.running():
        layer(x).exp()
    assert small.moved_bytes == 0
    other = Offload(layer, torch.device("meta"), least_bytes=1)
    with other.running():
        layer(x).exp()
    assert other.moved_bytes == 0


def test_nothing_is_moved_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    monkeypatch.setattr(Offload, "_away", lambda self, tensor: pytest.fail("moved"))
    layer = torch.nn.Linear(2, 2)
    with offloaded(layer, HERE, wanted=False):
        layer(torch.ones(1, 2)).exp()


def test_a_run_on_a_cpu_and_pairs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    settings = TrainSettings(steps=1, offload_activations=True)
    with pytest.raises(ConfigError, match="would do nothing: on a CPU"):
        kit.run(tmp_path / "run", [LoRA(rank=2)], steps=1, offload_activations=True)
    assert not (tmp_path / "run").exists()
    for more in ({"compile": True}, {"recompute": "selective"}):
        with pytest.raises(ConfigError, match="leave one of the two out"):
            TrainSettings(offload_activations=True, **more)
    with pytest.raises(ConfigError, match="works in one process alone"):
        refuse_several(Plan(shard=2), settings, ["lora"])


def test_a_run_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run, as on a GPU."""
    monkeypatch.setattr("afina.train.job.refuse_idle_offload", lambda device: None)
    seen: list[int] = []
    away = Offload._away

    def counted(self: Offload, tensor: torch.Tensor) -> torch.Tensor:
        self._least = 1
        kept = away(self, tensor)
        seen.append(self.moved_bytes)
        return kept

    monkeypatch.setattr(Offload, "_away", counted)
    plain = kit.weights(kit.run(tmp_path / "plain", [LoRA(rank=2)], steps=2))
    assert not seen
    moved = kit.run(tmp_path / "moved", [LoRA(rank=2)], steps=2, offload_activations=True)
    assert seen[-1] > 0
    assert kit.same(plain, kit.weights(moved))
