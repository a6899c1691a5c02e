"""Loading with weights packed on the way: the same as packing afterwards, one weight in memory at a time, no traces."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import afina
from afina.adapters.fingerprint import base_fingerprint
from afina.errors import ConfigError, ModelError, TechniqueError
from afina.models.blocks import Blocks
from afina.ops.packed import PackedWeight
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from tests.models.test_blocks import WAYS, changed, gradients
from tests.ops.test_attention import gpt2 as blocks_gpt2
from tests.ops.test_attention import llama as blocks_llama
from tests.tiny import byte_tokenizer, save_model, tiny_gpt2, tiny_llama

MAKERS = {
    "llama": tiny_llama,
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
}


@pytest.fixture(params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "m", MAKERS[request.param](), byte_tokenizer())


def load(folder: Path, quantize: Any = None, dtype: str = "fp32") -> Any:
    return afina.load(folder, dtype=dtype, device="cpu", quantize=quantize)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("quantize", [Quantize(), Quantize(kind="int8")], ids=str)
def test_it_is_the_model_packed_afterwards(folder: Path, quantize: Quantize, dtype: str) -> None:
    made, plain = load(folder, quantize, dtype), load(folder, dtype=dtype)
    names = set(quantize.weights(plain))
    assert names
    for name, parameter in made.named_parameters():
        original = plain.get_parameter(name)
        assert (parameter.shape, parameter.dtype) == (original.shape, original.dtype)
        if name in names:
            assert isinstance(parameter, PackedWeight)
            after = quantize.packed(original, name)
            assert isinstance(after, PackedWeight)
            assert torch.equal(parameter.codes, after.codes)
            assert torch.equal(parameter.unpacked(), after.unpacked())
        else:
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, original)
    assert base_fingerprint(made) == base_fingerprint(plain)


def test_it_answers_as_its_values_do(folder: Path) -> None:
    made, plain = load(folder, Quantize()), load(folder)
    ids = torch.arange(1, 9)[None]
    before = plain(input_ids=ids).logits
    for name in Quantize().weights(plain):
        plain.get_parameter(name).data = made.get_parameter(name).unpacked()
    answer = made(input_ids=ids).logits
    assert torch.allclose(answer, plain(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert (answer - before).abs().max() > 1e-2


class Watching:
    """Packs, and counts how many of the weights that it was given are still in memory at the next one."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []
        self.most = 0

    def weights(self, model: nn.Module) -> tuple[str, ...]:
        return Quantize().weights(model)

    def packed(self, weight: Tensor, name: str) -> nn.Parameter:
        self.most = max(self.most, sum(ref() is not None for ref in self.given))
        self.given.append(weakref.ref(weight))
        return Quantize().packed(weight, name)


def test_no_weight_outlives_its_packing(folder: Path) -> None:
    watching = Watching()
    load(folder, watching)
    assert len(watching.given) > 4
    # The one before may wait for its name in Transformers' loop.
    assert watching.most <= 1


def test_no_trace_is_left_in_model_and_config(folder: Path) -> None:
    made, plain = load(folder, Quantize()), load(folder)
    assert {n for n in vars(made) if "quant" in n} == {n for n in vars(plain) if "quant" in n}
    assert made.config.to_dict() == plain.config.to_dict()
    assert vars(made.config).keys() == vars(plain.config).keys()
    assert made.to("cpu") is made
    with pytest.raises(TechniqueError, match="cannot be saved as it is"):
        made.save_pretrained(folder.with_name("again"))


def test_a_damaged_weight_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_llama(), byte_tokenizer())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        TechniqueError, match=r"layers\.1\.mlp\.up_proj\.weight cannot be quantised"
    ):
        load(folder, Quantize())


def test_a_pattern_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_llama(), byte_tokenizer())
    with pytest.raises(TechniqueError, match="nothing in this model matches"):
        load(folder, Quantize(target=("q_prpj",)))


def test_what_is_no_technique_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_llama(), byte_tokenizer())
    with pytest.raises(ConfigError, match=r"afina\.Quantize"):
        load(folder, "nf4")


def test_a_model_that_is_stored_quantised_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tiny_llama(), byte_tokenizer())
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="was not quantised"):
        load(folder, Quantize())


# --- blocks that are run otherwise -----------------------------------------------------------------------------------


def on_packed(make: Any) -> tuple[Any, Any]:
    """A model whose weights are packed, with a LoRA that is not silent."""
    model, edit = changed(make)
    edit.undo()
    edit = apply(model, [Quantize(), LoRA(rank=2)])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.normal_(0, 0.1)
    return model, edit


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [blocks_llama, blocks_gpt2], ids=lambda m: m.__name__)
def test_recomputed_blocks_give_the_same_gradients(make: Any, way: Any) -> None:
    model, edit = on_packed(make)
    wanted = gradients(model, edit)
    with Blocks(model, way).running():
        found = gradients(model, edit)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
    # Control: of the whole base they are others.
    plain, its = changed(make)
    with torch.no_grad():
        for name, parameter in its.trainable().items():
            parameter.copy_(edit.trainable()[name])
    whole = gradients(plain, its)
    assert any(not torch.allclose(whole[name], wanted[name], rtol=1e-3) for name in wanted)
