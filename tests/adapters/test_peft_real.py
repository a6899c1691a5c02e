"""PEFT as oracle on a real model: SmolLM2 of 135 million parameters, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import afina
from afina.adapters import files
from tests import battery
from tests.adapters.kit import randomise

pytestmark = pytest.mark.slow

BASE = "smollm2-135m"


@pytest.fixture(scope="module")
def model() -> Any:
    """The demo model; each test leaves it as it was."""
    return afina.load(BASE, dtype="fp32", device="cpu")[0].eval()


def adapted(model: Any) -> Any:
    edit = afina.apply(
        model,
        [afina.LoRA(rank=4, alpha=8, target=("q_proj", "v_proj", "down_proj"), rslora=True)],
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return edit


def test_written_here_and_read_by_peft(model: Any, tmp_path: Path) -> None:
    before = battery.logits(model)
    edit = adapted(model)
    mine = battery.logits(model)
    battery.differs(mine, before)
    files.save(edit, tmp_path / "a", base=BASE)
    battery.backward(model)
    slopes = {k: p.grad for k, p in files.peft_tensors(edit).items()}
    edit.undo()
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(model, str(tmp_path / "a"), is_trainable=True)
    try:
        battery.close(battery.logits(peer.eval()), mine, 1e-5)
        battery.backward(peer)
        theirs = {n.replace(".default", ""): p.grad for n, p in peer.named_parameters()}
        assert {n for n, slope in theirs.items() if slope is not None} == set(slopes)
        for name, slope in slopes.items():
            assert slope is not None
            assert slope.any(), name
            assert (theirs[name] - slope).norm() <= 1e-3 * slope.norm(), name
    finally:
        peer.unload()
    assert torch.equal(battery.logits(model), before)


def test_written_by_peft_and_read_here(model: Any, tmp_path: Path) -> None:
    before = battery.logits(model)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        rank_pattern={"layers.3.mlp.up_proj": 2},
        task_type="CAUSAL_LM",
    )
    with battery.quiet():
        peer: Any = get_peft_model(model, config)
        randomise(peer)
        with torch.no_grad():
            for name, parameter in peer.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.1)
        peer.eval().save_pretrained(str(tmp_path))
        theirs = battery.logits(peer)
        peer.unload()
    edit = files.load(model, tmp_path)
    assert edit.notes[0] == f"adapter {tmp_path}: applied 420 of 420 tensors"
    battery.differs(theirs, before)
    battery.close(battery.logits(model), theirs, 1e-5)
    edit.undo()
    assert torch.equal(battery.logits(model), before)
