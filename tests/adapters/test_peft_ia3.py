"""IA3 in PEFT's layout: written here and read there, the reverse, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model

from afina.adapters import files
from afina.adapters.merge import merge_unchecked
from afina.adapters.merge_job import MergeSettings
from afina.models import hub
from afina.table import apply
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import build, edit_config, edit_tensors, randomise, refused, rename
from tests.tiny import byte_tokenizer, save_model, tiny_gpt2

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults of Llama": ("llama", {}),
    "defaults of GPT-2": ("gpt2", {}),
    "defaults of BERT": ("bert", {}),
    "defaults of Mixtral": ("mixtral", {}),
    "outputs alone": ("llama", {"target_modules": ["k_proj"], "feedforward_modules": []}),
    "inputs alone": ("llama", {"target_modules": ["up_proj"], "feedforward_modules": ["up_proj"]}),
    "regular expressions": (
        "llama",
        {"target_modules": r".*\.1\..*_proj", "feedforward_modules": r".*\.(o|up)_proj"},
    ),
    "whole modules": (
        "llama",
        {"target_modules": ["k_proj"], "feedforward_modules": [], "modules_to_save": ["norm"]},
    ),
    "a classifier": (
        "classifier",
        {"target_modules": ["k_proj"], "feedforward_modules": [], "task_type": "SEQ_CLS"},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_of_peft_and_back(name: str, tmp_path: Path) -> None:
    base, settings = SETTINGS[name]
    with battery.quiet():
        peer: Any = get_peft_model(build(base), IA3Config(**settings))
        randomise(peer)
        peer.eval().save_pretrained(str(tmp_path / "theirs"))
    model = build(base)
    before = battery.logits(model)
    edit = files.load(model, tmp_path / "theirs")
    battery.differs(battery.logits(model), before)
    if base != "classifier":
        battery.same_logits_and_gradients(peer, model, edit)
    battery.close(battery.logits(model), battery.logits(peer))
    files.save(edit, tmp_path / "ours", base="tiny")
    with battery.quiet():
        back: Any = PeftModel.from_pretrained(build(base), str(tmp_path / "ours"))
    battery.close(battery.logits(back.eval()), battery.logits(model))
    again = build(base)
    files.load(again, tmp_path / "ours")
    assert torch.equal(battery.logits(again), battery.logits(model))


def test_it_is_read_strictly(tmp_path: Path) -> None:
    edit = apply(build("llama"), [IA3(feedforward=())])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    first = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    edit_tensors(folder, lambda t: t.update({first: torch.ones(3, 1)}))
    assert "shape (3, 1)" in refused(folder, build("llama"))
    part = files.load(build("llama"), folder, allow_partial=True)
    assert part.notes[0].endswith("applied 3 of 4 tensors")
    edit_tensors(folder, lambda t: t.pop(first))
    assert "k_proj: adapter_config.json names it" in refused(folder, build("llama"))
    files.save(edit, folder, base="tiny")
    rename(folder, lambda key: "module." + key + ".default")
    assert files.load(build("llama"), folder).notes[0].endswith("4 of 4 tensors")
    edit_config(folder, feedforward_modules=["v_proj"])
    assert "rescaled at their inputs" in refused(folder, build("llama"))
    edit_config(folder, feedforward_modules="gone")
    assert "feedforward_modules is missing" in refused(folder, build("llama"))
    edit_config(folder, peft_type="LOHA", feedforward_modules=[])
    assert "IA3" in refused(folder, build("llama"))


@pytest.mark.parametrize("others", [(), (LoRA(rank=2),)], ids=["alone", "with LoRA"])
def test_it_is_merged_on_disk_with_its_biases(others: tuple[Any, ...], tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_gpt2(), byte_tokenizer())
    model, _ = hub.load(base, dtype="fp32", device="cpu")
    edit = apply(model, [IA3(), *others])
    randomise(model)
    with torch.no_grad():
        changed = model(torch.arange(9)[None]).logits
    files.save(edit, tmp_path / "adapter", base=str(base))
    settings = MergeSettings(max_new_tokens=0, compute_dtype="fp32")
    made = merge_unchecked(tmp_path / "adapter", tmp_path / "merged", settings=settings)
    assert made.verified, made.verdict
    merged, _ = hub.load(tmp_path / "merged", dtype="fp32", device="cpu")
    with torch.no_grad():
        battery.close(merged(torch.arange(9)[None]).logits, changed, 1e-5)
        edit.undo()
        battery.differs(model(torch.arange(9)[None]).logits, changed)


def test_a_stack_of_lora_and_ia3_is_read_by_peft_part_by_part(tmp_path: Path) -> None:
    edit = apply(build("llama"), [LoRA(rank=2), IA3()])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    with battery.quiet():
        for part in ("lora", "ia3"):
            PeftModel.from_pretrained(build("llama"), str(folder / part))
        with pytest.raises(Exception, match="AFINA_STACK"):
            PeftModel.from_pretrained(build("llama"), str(folder))
