"""PEFT over bitsandbytes as the other side: the same base in 4 bits, and adapters that go both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import afina
from afina.adapters import files
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from tests import battery
from tests.tiny import byte_tokenizer, save_model, tiny_llama

pytest.importorskip("bitsandbytes")

NF4 = Quantize(double_quant=False)
IDS = torch.tensor([[1, 70, 33, 222, 9, 4, 101, 5]])


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products stay in fp32 on a CPU with AVX512-BF16 too, where they would be bf16 whatever is asked."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """No row is shorter than a block, for their AVX-512 kernel computes other values there."""
    return save_model(
        tmp_path / "base", tiny_llama(hidden_size=64, intermediate_size=128), byte_tokenizer()
    )


def theirs(base: Path) -> Any:
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    return AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    ).eval()


def ours(base: Path) -> Any:
    return afina.load(base, dtype="fp32", device="cpu", quantize=NF4)[0]


def loss_and_gradients(model: Any, ends: tuple[str, str]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss, and the gradients of A and B by their module, as (r, in) and (out, r)."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for end, letter in zip(ends, "ab", strict=True):
            if name.endswith(end):
                inner = name.removesuffix(end).rpartition("layers.")[2]
                found[inner + letter] = parameter.grad
    return loss, found


def test_the_base_is_the_same(base: Path) -> None:
    with torch.no_grad(), battery.quiet():
        one, other = ours(base)(input_ids=IDS).logits, theirs(base)(input_ids=IDS).logits
    assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    whole = afina.load(base, dtype="fp32", device="cpu")[0]
    battery.differs(whole(input_ids=IDS).logits, other)


def test_an_adapter_of_peft_on_bitsandbytes_is_loaded_and_back(base: Path, tmp_path: Path) -> None:
    with battery.quiet():
        peer: Any = get_peft_model(
            theirs(base), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
        )
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in peer.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        peer.eval().save_pretrained(str(tmp_path / "theirs"))
        wanted = loss_and_gradients(peer, (".lora_A.default.weight", ".lora_B.default.weight"))
    model = ours(base)
    edit = afina.load_adapter(model, tmp_path / "theirs")
    got = loss_and_gradients(model, (".lora.a", ".lora.b"))
    assert torch.allclose(got[0], wanted[0], rtol=1e-5)
    assert got[1].keys() == wanted[1].keys()
    assert len(got[1]) == 8
    for name, gradient in got[1].items():
        assert (gradient - wanted[1][name]).abs().max() <= 1e-4 * wanted[1][name].abs().max()
    files.save(edit, tmp_path / "ours", base=str(base))
    with battery.quiet():
        again: Any = PeftModel.from_pretrained(theirs(base), str(tmp_path / "ours"))
        assert torch.allclose(again(input_ids=IDS, labels=IDS).loss, wanted[0], rtol=1e-5)


def test_peft_itself_works_on_our_packed_weights(base: Path, tmp_path: Path) -> None:
    model = ours(base)
    edit = afina.apply(model, [LoRA(rank=4)])
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    files.save(edit, tmp_path / "ours", base=str(base))
    answer = model(input_ids=IDS).logits
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(ours(base), str(tmp_path / "ours")).eval()
        assert torch.allclose(peer(input_ids=IDS).logits, answer, atol=1e-5, rtol=1e-5)
