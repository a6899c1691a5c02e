"""Blocks on several devices of one process: what lies where, what moves, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.config import ParallelSettings
from afina.errors import ConfigError
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.parallel.placement import moved, place
from afina.parallel.plan import plan_of
from afina.parallel.runtime import OneProcess
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.prefix import PrefixTuning
from afina.train.ahead import made
from afina.train.loop import backward
from tests.parallel.parity import Case, edited, windows, work_of
from tests.tiny import tiny_gpt2, tiny_llama
from tests.train import kit
from tests.train.kit import ragged_rows

FOUR = (("num_hidden_layers", 4),)
CPU = ["cpu", "cpu"]


class Recorder:
    """Moves nothing, and notes what it was asked to."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.devices: list[str] = []

    def __call__(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.shapes.append(tuple(tensor.shape))
        self.devices.append(str(device))
        return tensor


def gradients(case: Case, devices: list[str] | None, split: Any = None) -> dict[str, Tensor]:
    """Of a window, with the loss among them."""
    edit = edited(case)
    if devices is not None:
        # A copy, so that what was not moved would not get its gradient.
        place(edit.model, devices, split, lambda tensor, device: moved(tensor, device).clone())
    work = work_of(case, OneProcess(), edit)
    with packing(edit.model, case.packed), Blocks(edit.model, case.recompute).running():
        loss = backward(work, made(work, windows(case)[0]), 0).loss
    found = {n: p.grad for n, p in edit.trainable().items() if p.grad is not None}
    return {**found, "loss": torch.tensor(loss)}


@pytest.mark.parametrize("split", [None, (1, 3), (0, 4)])
@pytest.mark.parametrize(
    "case",
    [
        Case("lora", 2, model=FOUR),
        Case("full", 2, model=(*FOUR, ("tie_word_embeddings", True)), recompute=True),
        Case("full", 3, family="gpt2", model=(("n_layer", 4),), packed=False),
    ],
    ids=["lora", "tied", "gpt2"],
)
def test_the_same_gradients(case: Case, split: Any) -> None:
    expected, found = gradients(case, None), gradients(case, CPU, split)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_what_moves_between_devices() -> None:
    """On the meta device, where nothing has values: states once a border and home, all else once a device."""
    with torch.device("meta"):
        model = tiny_llama(num_hidden_layers=4, attn_implementation="eager")
    recorder = Recorder()
    placed = place(model, ["meta", "meta", "meta"], (1, 2, 1), recorder)
    ids_BT = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    states = (2, 5, 32)
    # Beside the states: cosines, sines, positions and the mask.
    assert recorder.shapes.count(states) == 3
    beside = [shape for shape in recorder.shapes if shape != states]
    assert sorted(beside) == sorted([(1, 5, 8), (1, 5, 8), (1, 5), (2, 1, 5, 5)] * 2)
    recorder.shapes.clear()
    model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    assert recorder.shapes.count(states) == 3
    placed.lift()
    recorder.shapes.clear()
    model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    assert recorder.shapes == []


def test_a_prefix_is_moved_with_the_block_that_takes_it() -> None:
    edit = apply(tiny_llama(num_hidden_layers=4), [PrefixTuning(tokens=3)], seed=0)
    recorder = Recorder()
    place(edit.model, CPU, (2, 2), recorder)
    edit.model(input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=False)
    assert recorder.shapes.count((2, 3, 8)) == 2 * 4  # keys and values of every layer


def test_adapters_lie_with_their_blocks_and_tied_tensors_stay_one() -> None:
    model = tiny_gpt2(n_layer=4)
    edit = apply(model, [LoRA(rank=2)], seed=0)
    placed = place(model, ["cpu", "meta"], (3, 1))
    assert {p.device.type for n, p in model.named_parameters() if ".h.3." in n} == {"meta"}
    others = {p.device.type for n, p in model.named_parameters() if ".h.3." not in n}
    assert others == {"cpu"}
    assert any("lora" in name for name, _ in model.named_parameters() if ".h.3." in name)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(placed.places.values()) == [0, 0, 0, 1]
    assert edit.deltas


def test_the_first_device_has_fewer_blocks_for_what_it_has_beside() -> None:
    model = tiny_llama(num_hidden_layers=6, vocab_size=600)
    placed = place(model, ["cpu", "cpu"])
    first = sum(number == 0 for number in placed.places.values())
    assert first < 3


def test_answers_are_the_same() -> None:
    model = tiny_llama(num_hidden_layers=4)
    ids_BT = torch.arange(6)[None]
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids_BT, **how)
    place(model, CPU, (2, 2))
    assert torch.equal(model.generate(ids_BT, **how), expected)


def test_a_run_over_devices_is_that_over_one(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name, devices in {"one": (), "two": CPU}.items():
        model, mesh = tiny_llama(num_hidden_layers=4), OneProcess(devices)
        how: dict[str, Any] = {"val": ragged_rows(3, seed=1), "steps": 3, "model": model}
        run = kit.run(tmp_path / name, options={"mesh": mesh}, **how)
        hooks = sum(len(block._forward_pre_hooks) for block in model.model.layers)
        assert bool(hooks) == bool(devices)
        mesh.end()
        assert not any(block._forward_pre_hooks for block in model.model.layers)
        found[name] = run.scores["loss"], kit.weights(run)
    assert found["two"][0] == pytest.approx(found["one"][0], abs=1e-9)
    assert kit.same(found["two"][1], found["one"][1])


def test_devices_are_of_one_process() -> None:
    with pytest.raises(ConfigError, match="within one process"):
        ParallelSettings(devices=("cpu", "cpu"), pipeline=2)
    with pytest.raises(ConfigError, match="within one process"):
        plan_of(ParallelSettings(devices=("cpu", "cpu")), 2)
    assert plan_of(ParallelSettings(devices=("cpu", "cpu")), 1).processes == 1


@pytest.mark.parametrize(("devices", "split"), [(5, None), (2, (3, 3)), (2, (4,))])
def test_devices_that_do_not_fit(devices: int, split: Any) -> None:
    with pytest.raises(ConfigError, match="devices"):
        place(tiny_llama(num_hidden_layers=4), ["cpu"] * devices, split)
