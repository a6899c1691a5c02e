"""Where an adapter's tensors lie, of what type, and how much work it is to put them there and to take them off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import infer_device
from safetensors.torch import load_file
from torch import nn

from afina.adapters import files
from afina.adapters.combine import CombineSettings, combine
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import WEIGHTS, edit_config


def work(action: Callable[[], Any]) -> int:
    """How many functions of Python an action calls: the same at every run, whatever else the machine does."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def saved(folder: Path, **settings: Any) -> Path:
    """A folder with an adapter for the tiny Llama."""
    edit = apply(battery.build("llama"), [LoRA(**settings)])
    battery.train(edit.model, edit)
    files.save(edit, folder, base="tiny")
    return folder


# --- work ---------------------------------------------------------------------------------------------------------


def test_one_after_another_none_costs_more_than_alone(tmp_path: Path) -> None:
    """Adapters of different targets and ranks change places on one model; the tenth is put on as the first is."""
    targets = (("q_proj", "v_proj"), ("all-linear",), ("down_proj",))
    folders = [saved(tmp_path / str(i), rank=2 + i, target=t) for i, t in enumerate(targets)]
    model = battery.build("llama")
    before = battery.picture(model)

    def turn() -> list[int]:
        found: list[int] = []
        for folder in folders:
            edits: list[Any] = []
            found.append(work(lambda: edits.append(files.load(model, folder))))  # noqa: B023
            found.append(work(edits[0].undo))
        return found

    turn()  # what is imported or read once
    first = turn()
    for _ in range(3):
        # Counts differ by what Python calls when it collects garbage in between.
        assert turn() == pytest.approx(first, rel=1e-3)
    battery.same_picture(battery.picture(model), before)


def test_peft_does_more_for_each_that_is_there(tmp_path: Path) -> None:
    """The control: each adapter that is loaded makes the next one dearer."""
    folder = saved(tmp_path / "a", rank=2)
    with battery.quiet():
        model: Any = PeftModel.from_pretrained(battery.build("llama"), str(folder))
        spent = [
            work(lambda: model.load_adapter(str(folder), adapter_name=f"a{i}"))  # noqa: B023
            for i in range(4)
        ]
    assert spent[1] < spent[2] < spent[3]
    assert spent[3] > 1.2 * spent[1]


def test_work_is_in_proportion_to_the_places() -> None:
    def spent(depth: int) -> int:
        model = battery.llama(num_hidden_layers=depth)
        return work(lambda: apply(model, [LoRA(rank=2)]))

    spent(1)
    two, four, eight = spent(2), spent(4), spent(8)
    assert eight - four <= 2.02 * (four - two)


# --- place and type -----------------------------------------------------------------------------------------------


NOT_IN_BLOCKS = ("full", "trainable_tokens", "prompt", "prefix", "p_tuning")
"""Which attach nothing there, or belong to the whole model."""


def first_cases() -> list[battery.Case]:
    """The first row of each method that acts in blocks, on the tiny Llama."""
    found = {c.technique.key: c for c in reversed(battery.CASES) if c.model == "llama"}
    return [case for key, case in found.items() if key not in NOT_IN_BLOCKS]


@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.technique.key)
def test_what_is_attached_lies_where_its_module_lies(case: battery.Case) -> None:
    """A model over two devices (the second stands for it by having no values)."""
    model = battery.build("llama")
    model.model.layers[1].to("meta")
    where = {n: {p.device.type for p in m.parameters()} for n, m in model.named_modules()}
    edit = apply(model, [case.technique])
    for name, delta in edit.deltas.items():
        around = where[name.rpartition(".")[0]]
        assert len(around) == 1
        assert {p.device.type for p in delta.parameters()} == around, name
    assert {p.device.type for p in edit.trainable().values()} == {"cpu", "meta"}


def test_loading_goes_to_the_models_device_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is a GPU that the model is not on."""
    folder = saved(tmp_path / "a", rank=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = files.load(battery.build("llama"), folder).model
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert infer_device() == "cuda"  # the control: where PEFT would read the file to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_tensor_of_the_base_is_copied_or_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved(tmp_path / "a", rank=2)
    model = battery.build("llama", dtype)
    before = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    edit = files.load(model, folder)
    after = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    assert {n: after[n] for n in before} == before
    assert set(after) - set(before) == set(edit.trainable())


# --- size ---------------------------------------------------------------------------------------------------------

ENDS = ("embed_tokens", "lm_head")


def test_an_adapter_on_the_embeddings_does_not_bring_the_embeddings(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", rank=2, target=ENDS)
    with battery.quiet():
        config = LoraConfig(r=2, target_modules=list(ENDS))
        get_peft_model(battery.build("llama"), config).save_pretrained(str(tmp_path / "p"))
    ours, theirs = load_file(folder / WEIGHTS), load_file(tmp_path / "p" / WEIGHTS)
    assert sum(t.numel() for t in ours.values()) == 2 * 2 * (battery.VOCABULARY + 16)
    # The control: there, both matrices go along.
    assert sum(t.numel() for t in theirs.values()) == 2 * (2 + 16) * battery.VOCABULARY + 2 * 2 * 16


# --- convolutions -------------------------------------------------------------------------------------------------


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 3)
        self.out = nn.Linear(4, 4)


def test_factors_of_a_convolution_are_refused_by_name(tmp_path: Path) -> None:
    with battery.quiet():
        config = LoraConfig(r=2, target_modules=["mix", "out"])
        made: Any = get_peft_model(Convolved(), config)  # pyright: ignore[reportArgumentType]
        made.save_pretrained(str(tmp_path / "a"))
    edit_config(tmp_path / "a", base_model_name_or_path="tiny/gone")
    model = Convolved()
    before = battery.picture(model)
    with pytest.raises(AdapterError, match=r"mix\.lora_A\.weight: the model has no such place"):
        files.load(model, tmp_path / "a")
    battery.same_picture(battery.picture(model), before)
    svd = CombineSettings(method="svd", rank=2)
    for settings in (CombineSettings(), svd):
        with pytest.raises(AdapterError, match=r"mix, A \(2, 4, 3\), B \(4, 2, 1\)"):
            combine({tmp_path / "a": 1.0}, tmp_path / "c", settings=settings)
    assert not (tmp_path / "c").exists()
    # The control: PEFT takes it up and fails in the middle of a product.
    made.load_adapter(str(tmp_path / "a"), adapter_name="b")
    with pytest.raises(RuntimeError, match="size"):
        made.add_weighted_adapter(["default", "b"], [1.0, 1.0], "c", combination_type="svd")
