"""IA3: its places beside the paper's and PEFT's, its mathematics written out, merging with biases, and with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.constants import (
    TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD,
)
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as TARGETS
from transformers import AutoConfig, AutoModel

from afina import seams
from afina.errors import TechniqueError
from afina.table import apply
from afina.techniques.ia3 import IA3, IA3In, last_linears
from afina.techniques.lora import LoRA
from tests import battery
from tests.train import kit


def places(model: Any, **settings: Any) -> dict[str, bool]:
    """Each changed map, and whether its input is rescaled."""
    edit = apply(model, [IA3(**settings)])
    found = {n.removesuffix(".ia3"): isinstance(d, IA3In) for n, d in edit.deltas.items()}
    edit.undo()
    return found


def peft_places(model: Any) -> dict[str, bool]:
    """Those of PEFT's defaults for this architecture."""
    kind = model.config.model_type
    ends, inward = (tuple(f".{name}" for name in table[kind]) for table in (TARGETS, FEEDFORWARD))
    names = [site.name for site in seams.map_sites(model) if site.block is not None]
    return {name: name.endswith(inward) for name in names if name.endswith(ends)}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_the_places_are_those_of_peft(name: str) -> None:
    model = battery.build(name)
    assert places(model) == peft_places(model)


def test_where_peft_goes_beyond_the_paper_the_paper_counts() -> None:
    """PEFT's `output.dense` means the attention's output in BERT too."""
    model = battery.build("bert")
    more = [f"bert.encoder.layer.{i}.attention.output.dense" for i in (0, 1)]
    assert places(model) == {n: inward for n, inward in peft_places(model).items() if n not in more}


SMALL: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
    "intermediate_size": 24, "word_embed_proj_dim": 16, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2,
    "num_heads": 2, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "n_head": 2, "n_layer": 2, "n_embd": 16,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, "head_dim": 8, "rotary_dim": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("opt", "fc2"), ("gpt_neox", "mlp.dense_4h_to_h"), ("bloom", "mlp.dense_4h_to_h"), ("phi", "mlp.fc2"),
        ("roberta", "output.dense"), ("qwen2", "mlp.down_proj"),
        ("gemma2", "mlp.down_proj"), ("gptj", "mlp.fc_out"), ("t5", "DenseReluDense.wo"), ("bart", "fc2"),
        ("modernbert", "mlp.Wo"), ("distilbert", "ffn.lin2"), ("qwen3", "mlp.down_proj"),
    ],
)  # fmt: skip
def test_the_last_linear_of_the_feed_forward_is_found_by_structure(kind: str, last: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **SMALL))
    found = last_linears(model)
    assert len(found) == len(seams.blocks(model))
    assert all(name.endswith(f".{last}") for name in found), found
    names = places(model)
    assert {n for n, inward in names.items() if inward} == set(found)
    assert len(names) > len(found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_each_map_is_the_mathematics_written_out(name: str) -> None:
    model = battery.build(name)
    edit = apply(model, [IA3()])
    battery.train(model, edit)
    for site in seams.map_sites(model):
        delta = edit.deltas.get(f"{site.name}.ia3")
        if delta is None:
            continue
        torch.manual_seed(1)
        x = torch.randn(5, site.in_features, dtype=torch.float64, requires_grad=True)
        weight = site.module.get_parameter("weight").detach()
        weight = weight.t() if site.kind == "conv1d" else weight
        bias = getattr(site.module, "bias", None)
        bias = (
            torch.zeros(site.out_features, dtype=torch.float64) if bias is None else bias.detach()
        )
        factors = delta.get_parameter("l")
        twin = factors.detach().flatten().clone().requires_grad_(True)
        inward = isinstance(delta, IA3In)
        slow = (x * twin) @ weight.t() + bias if inward else (x @ weight.t() + bias) * twin
        fast = site.module(x)
        battery.close(fast, slow)
        battery.differs(fast, x @ weight.t() + bias)
        seed = torch.randn_like(slow)
        got = torch.autograd.grad(fast, (factors, x), seed)
        wanted = torch.autograd.grad(slow, (twin, x), seed)
        battery.close(got[0].flatten(), wanted[0])
        battery.close(got[1], wanted[1])


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_merging_rescales_the_bias_too_and_unmerging_is_bitwise_even_for_a_factor_of_zero(
    name: str,
) -> None:
    model = battery.build(name, torch.bfloat16)
    edit = apply(model, [IA3()])
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "bias", None) is not None:
                module.bias.normal_()
        for factors in edit.trainable().values():
            factors.normal_()
            factors.view(-1)[0] = 0.0
    before = battery.picture(model)
    for _ in range(10):
        edit.merge()
        edit.unmerge()
    battery.same_picture(battery.picture(model), before)
    exact = battery.build(name)
    exact.load_state_dict({k: v for k, v in model.state_dict().items() if ".ia3." not in k})
    other = apply(exact, [IA3()])
    with torch.no_grad():
        for key, factors in other.trainable().items():
            factors.copy_(edit.trainable()[key])
    changed = battery.logits(exact)
    battery.fold(other)
    battery.close(battery.logits(exact), changed, 1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beside_lora_the_factors_rescale_its_change_too_and_both_merge(name: str) -> None:
    model = battery.build(name)
    edit = apply(model, [IA3(), LoRA(rank=2)])
    for _ in range(2):
        battery.train(model, edit)
    changed = battery.logits(model)
    battery.fold(edit)
    battery.close(battery.logits(model), changed, 1e-5)


def test_refusals() -> None:
    with pytest.raises(TechniqueError, match="nothing is left"):
        apply(battery.build("llama"), [IA3(target=(), feedforward=())])
    with pytest.raises(TechniqueError, match="embed_tokens"):
        apply(battery.build("llama"), [IA3(target=("embed_tokens",))])
    with pytest.raises(TechniqueError, match=r"ia3\.feedforward"):
        apply(battery.build("llama"), [IA3(feedforward=("down_porj",))])


def test_fused_experts_are_told() -> None:
    assert "fused experts" in apply(battery.build("mixtral"), [IA3()]).summary()
    assert "fused experts" not in apply(battery.build("llama"), [IA3()]).summary()


def test_resume_is_bitwise(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 1}
    whole = kit.run(tmp_path / "whole", IA3(), **settings)
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "run", IA3(), options={"seams": kit.stop_after(2)}, **settings)
    rest = kit.run(tmp_path / "run", IA3(), options={"resume": True}, **settings)
    assert kit.same(kit.weights(whole), kit.weights(rest))
