"""Quantize: which weights, in what order, undone bit for bit, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import afina
from afina.errors import ConfigError, TechniqueError
from afina.ops.packed import PackedWeight, stored_bytes
from afina.ops.quantise import Scheme
from afina.table import apply, check
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize, found_in
from tests import battery
from tests.battery import MODELS, build, logits, picture, same_picture

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def packed(model: nn.Module) -> dict[str, PackedWeight]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, PackedWeight)}


def tails(model: nn.Module) -> set[str]:
    return {name.split(".")[-2] for name in packed(model)}


# --- which ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "quantize", "wanted", "count"),
    [
        ("llama", Quantize(), PROJECTIONS, 14),
        ("llama_tied", Quantize(), PROJECTIONS, 14),
        ("gpt2", Quantize(), {"c_attn", "c_proj", "c_fc"}, 8),
        ("bert", Quantize(), {"query", "key", "value", "dense"}, 12),
        ("mixtral", Quantize(), {"q_proj", "k_proj", "v_proj", "o_proj"}, 8),
        ("llama", Quantize(exclude=("mlp.*", "k_proj")), {"q_proj", "v_proj", "o_proj"}, 6),
        ("llama", Quantize(target=("up_proj", "layers.1.*.q_proj")), {"up_proj", "q_proj"}, 3),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_the_linears_of_the_blocks(
    model: str, quantize: Quantize, wanted: set[str], count: int
) -> None:
    made = build(model)
    apply(made, [quantize])
    assert tails(made) == wanted
    assert len(packed(made)) == count
    assert set(packed(made)) == set(quantize.weights(build(model)))


def test_experts_stay_and_it_is_said() -> None:
    model = build("mixtral")
    edit = apply(model, [Quantize()])
    assert "fused experts" in edit.warnings[0]
    assert not any(p.dim() == 3 for p in packed(model).values())
    assert apply(build("llama"), [Quantize()]).warnings == []


def test_the_head_is_refused() -> None:
    with pytest.raises(TechniqueError, match="the head is not quantised"):
        apply(build("llama"), [Quantize(target=("lm_head",))])


def test_an_embedding_is_no_target() -> None:
    with pytest.raises(TechniqueError, match="nothing in this model matches"):
        apply(build("llama"), [Quantize(target=("embed_tokens",))])


def test_nothing_left_is_refused() -> None:
    with pytest.raises(TechniqueError, match="nothing is left to quantise"):
        apply(build("llama"), [Quantize(exclude=("*_proj",))])


def test_one_tensor_under_two_names_stays_whole() -> None:
    model = build("llama")
    blocks = model.model.layers
    blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    apply(model, [Quantize()])
    assert type(blocks[0].mlp.up_proj.weight) is nn.Parameter
    assert blocks[1].mlp.up_proj.weight is blocks[0].mlp.up_proj.weight
    assert len(packed(model)) == 12


# --- how -----------------------------------------------------------------------------------------------------------


def test_settings_say_the_scheme() -> None:
    assert Quantize().scheme == Scheme("nf4", 64, True)
    assert Quantize(double_quant=False, block=32).scheme == Scheme("nf4", 32, False)
    assert Quantize(kind="int8").scheme == Scheme("int8", 64, False)
    assert Quantize(kind="int8", double_quant=False).scheme == Scheme("int8", 64, False)


@pytest.mark.parametrize(
    "wrong", [{"kind": "int8", "double_quant": True}, {"block": 63}, {"kind": "fp4"}, {"block": 0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Quantize(**wrong)


def test_it_is_written_in_python_as_it_was_called() -> None:
    for value in (Quantize(), Quantize(kind="int8", exclude=("q_proj",))):
        assert eval(value.call, {"afina": afina}) == value


def test_the_type_of_the_products() -> None:
    model = build("llama", torch.float32)
    apply(model, [Quantize(compute_dtype="bf16")])
    site = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 16)
    weight = packed(model)["model.layers.0.mlp.up_proj.weight"].unpacked(torch.bfloat16)
    assert torch.equal(site(x), (x.bfloat16() @ weight.t()).float())


@pytest.mark.parametrize("quantize", [Quantize(), Quantize(kind="int8")], ids=lambda q: q.kind)
def test_the_model_is_near_and_another(quantize: Quantize) -> None:
    model = build("llama")
    apply(model, [quantize])
    apart = (logits(model) - battery.base_logits("llama")).norm()
    share = apart / battery.base_logits("llama").norm()
    assert {"nf4": 1e-2, "int8": 1e-4}[quantize.kind] < share
    assert share < {"nf4": 0.5, "int8": 0.03}[quantize.kind]


# --- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_undo_brings_the_weights_back_bit_for_bit(model: str) -> None:
    made = build(model)
    for parameter in list(made.parameters())[::3]:
        parameter.requires_grad_(False)
    before, answer = picture(made), logits(made)
    edit = apply(made, [LoRA(rank=2), Quantize()])
    battery.train(made, edit)
    battery.differs(logits(made), answer)
    edit.undo()
    same_picture(picture(made), before)
    assert torch.equal(logits(made), answer)


@pytest.mark.parametrize(
    "other", [LoRA(target=("q_prpj",)), LoRA(rank=1000), LoRA(modules_to_save=("up_proj",))]
)
@pytest.mark.parametrize("undoable", [True, False])
def test_what_fails_later_leaves_the_model_as_it_was(other: LoRA, undoable: bool) -> None:
    model = build("llama")
    before = picture(model)
    with pytest.raises(TechniqueError):
        apply(model, [Quantize(), other], undoable=undoable)
    same_picture(picture(model), before)


def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    names = [type(p) for p in model.parameters()]
    with pytest.raises(TechniqueError, match=r"layers\.1\.mlp\.down_proj\.weight cannot be"):
        apply(model, [Quantize()])
    assert [type(p) for p in model.parameters()] == names


@pytest.mark.parametrize("undoable", [True, False])
def test_originals_are_kept_for_undo_alone(undoable: bool) -> None:
    model = build("llama")
    original = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    edit = apply(model, [Quantize(), LoRA(rank=2)], undoable=undoable)
    gc.collect()
    assert (original() is not None) == undoable
    if not undoable:
        with pytest.raises(TechniqueError, match="without keeping the originals"):
            edit.undo()


def test_disabled_is_the_quantised_base() -> None:
    model = build("llama")
    alone = apply(model, [Quantize()])
    rounded = logits(model)
    alone.undo()
    edit = apply(model, [Quantize(), LoRA(rank=2)])
    battery.train(model, edit)
    with edit.disabled():
        assert torch.equal(logits(model), rounded)
    battery.differs(logits(model), rounded)


# --- beside others ---------------------------------------------------------------------------------------------------


def test_it_acts_first() -> None:
    assert [t.key for t in check([LoRA(), Quantize()])] == ["quantize", "lora"]


def test_it_cannot_be_with_full() -> None:
    with pytest.raises(TechniqueError, match="cannot be combined"):
        apply(build("llama"), [Full(), Quantize()])
    model = build("llama")
    apply(model, [Quantize()])
    with pytest.raises(TechniqueError, match="cannot be combined"):
        apply(model, [Full(layers="-1")])


def test_a_second_time_it_finds_its_own_work() -> None:
    model = build("llama")
    apply(model, [Quantize()])
    first = picture(model)
    edit = apply(model, [Quantize(), LoRA(rank=2)])
    assert found_in(model) == Quantize()
    edit.undo()
    same_picture(picture(model), first)
    with pytest.raises(TechniqueError, match="quantised already") as caught:
        apply(model, [Quantize(kind="int8"), LoRA(rank=2)])
    assert '"nf4"' in str(caught.value.got)
    same_picture(picture(model), first)


def test_a_model_that_was_loaded_quantised_says_so_in_every_edit() -> None:
    model = build("llama")
    apply(model, [Quantize(block=32)])
    edit = apply(model, [LoRA(rank=2)])
    assert edit.techniques == (Quantize(block=32), LoRA(rank=2))
    assert apply(build("llama"), [LoRA(rank=2)]).techniques == (LoRA(rank=2),)


def test_a_module_that_trains_whole_must_be_left_out() -> None:
    lora = LoRA(rank=2, modules_to_save=("up_proj",))
    with pytest.raises(TechniqueError, match="cannot train") as caught:
        apply(build("llama"), [Quantize(), lora])
    assert "quantize.exclude" in str(caught.value)
    model = build("llama")
    edit = apply(model, [Quantize(exclude=("up_proj",)), lora])
    battery.train(model, edit)
    assert len(edit.in_place) == 2


# --- counts --------------------------------------------------------------------------------------------------------


def table(summary: str) -> list[str]:
    return [line for line in summary.splitlines() if not line.startswith(("note", "warning"))]


@pytest.mark.parametrize("model", MODELS)
def test_counts_are_those_of_the_weights(model: str) -> None:
    quantised = apply(build(model), [Quantize(), LoRA(rank=2)]).summary()
    assert table(quantised) == table(apply(build(model), [LoRA(rank=2)]).summary())
    assert "weights in nf4" in quantised


def test_it_says_what_is_saved() -> None:
    model = build("llama", torch.float32)
    edit = apply(model, [Quantize()])
    bytes_ = sum(map(stored_bytes, packed(model).values()))
    assert bytes_ == sum(Scheme().bytes_of(p.numel()) for p in packed(model).values())
    assert edit.notes == ["14 weights in nf4: 2.0 KiB instead of 15.0 KiB"]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_on_the_meta_device(model: str) -> None:
    with torch.device("meta"):
        empty = MODELS[model]().to(torch.float64)
    edit = apply(empty, [Quantize(), LoRA(rank=2)])
    real = build(model)
    wanted = apply(real, [Quantize(), LoRA(rank=2)])
    assert edit.summary() == wanted.summary()
    for name, weight in packed(empty).items():
        assert weight.is_meta
        assert stored_bytes(weight) == stored_bytes(packed(real)[name])
