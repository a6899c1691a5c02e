"""Blocks are found by structure: two stacks, experts in lists inside a block, names without a beginning, one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from afina import seams
from afina.adapters import files
from afina.errors import TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA
from tests import battery


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Routed(nn.Module):
    """A block that keeps its experts in a list, as those of Mixtral were before they were fused."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(3)])


class Flat(nn.Module):
    """Blocks whose names begin with the stack's: there is nothing before it."""

    def __init__(self, block: type[nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(depth)])


def t5() -> Any:
    """Two blocks that encode and three that decode."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
    depths: dict[str, Any] = {"num_layers": 2, "num_decoder_layers": 3}
    config = T5Config(vocab_size=40, decoder_start_token_id=0, **sizes, **depths)
    return T5ForConditionalGeneration(config).double().eval()


def answer(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=battery.IDS, decoder_input_ids=battery.TARGETS).logits


def places(model: nn.Module, layers: str) -> list[str]:
    """Where LoRA acts, as the first two parts of names with a number."""
    edit = apply(model, [LoRA(rank=1, layers=layers)])
    found = [name.removesuffix(".lora") for name in edit.deltas]
    edit.undo()
    return found


def places_of_peft(model: nn.Module) -> list[str]:
    with battery.quiet():
        config = LoraConfig(r=1, target_modules=["up"], layers_to_transform=[1])
        made: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    start, end = "base_model.model.", ".lora_A"
    return [
        n.removeprefix(start).removesuffix(end) for n, _ in made.named_modules() if n.endswith(end)
    ]


def test_a_number_is_of_the_block_and_not_of_an_expert_in_it() -> None:
    assert list(seams.stacks(Flat(Routed))) == ["layers"]
    wanted = [f"layers.1.experts.{i}.up" for i in range(3)]
    assert places(Flat(Routed), "1") == wanted
    # The control: a pattern over names takes the last number.
    assert places_of_peft(Flat(Routed)) == [f"layers.{i}.experts.1.up" for i in range(2)]


def test_names_that_begin_with_the_stack() -> None:
    assert places(Flat(Expert), "1") == ["layers.1.up"]
    with pytest.raises(NoMatchingPeftModuleError):
        places_of_peft(Flat(Expert))


def test_a_model_of_one_block() -> None:
    assert places(Flat(Expert, depth=1), "0") == ["layers.0.up"]
    assert places(battery.llama(num_hidden_layers=1), "-1")[0] == "model.layers.0.self_attn.q_proj"
    with pytest.raises(TechniqueError, match="no such block"):
        places(battery.llama(num_hidden_layers=1), "1")


def test_stacks_of_two_depths() -> None:
    def blocks(layers: str) -> list[str]:
        return list(dict.fromkeys(".".join(n.split(".")[:3]) for n in places(t5(), layers)))

    assert blocks("1") == ["encoder.block.1", "decoder.block.1"]
    assert blocks("0-1") == [f"{part}coder.block.{i}" for part in ("en", "de") for i in (0, 1)]
    assert blocks("2") == ["decoder.block.2"]
    with pytest.raises(TechniqueError, match="no such block"):
        blocks("3")


def test_a_lora_on_both_stacks_learns_everywhere_and_peft_reads_it(tmp_path: Path) -> None:
    model = t5()
    base = answer(model)
    edit = apply(model, [LoRA(rank=2)])
    assert torch.equal(answer(model), base)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model(input_ids=battery.IDS, decoder_input_ids=battery.TARGETS).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in edit.trainable().values())
    changed = answer(model)
    battery.differs(changed, base)
    files.save(edit, tmp_path / "adapter", base="tiny")
    with battery.quiet():
        battery.close(answer(PeftModel.from_pretrained(t5(), str(tmp_path / "adapter"))), changed)
    assert torch.equal(answer(files.load(t5(), tmp_path / "adapter").model), changed)
    edit.undo()
    assert torch.equal(answer(model), base)
