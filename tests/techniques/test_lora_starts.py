"""LoRA's other starts: PiSSA and OLoRA, with the base left as it is; against PEFT's, which edit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from afina import seams
from afina.adapters import files
from afina.adapters.contents import is_exact
from afina.errors import AdapterError, ConfigError, TechniqueError
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.lora import LoRA, LoRADelta
from afina.techniques.lora_starts import orthogonal, principal
from afina.techniques.quantize import Quantize
from tests import battery
from tests.adapters.kit import randomise
from tests.train import kit

STARTS = ("pissa", "olora")


def test_the_factors() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5, dtype=torch.float64)
    b, a = principal(weight, 2)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    battery.close(b @ a, u[:, :2] * s[:2] @ v[:2], 1e-12)
    battery.close(b.norm(dim=0), a.norm(dim=1), 1e-12)
    b, a = orthogonal(weight, 5)
    battery.close(b @ a, weight, 1e-12)
    b, a = orthogonal(weight, 2)
    battery.close(b.t() @ b, torch.eye(2, dtype=torch.float64), 1e-12)
    battery.close((b @ a)[:, :2], weight[:, :2], 1e-12)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_start_is_peft_s_and_off_is_the_base(name: str, start: Any) -> None:
    """Control: PEFT 0.21.2 with its adapter off is another model."""
    model = battery.build(name, torch.float32)
    before, answer = battery.picture(model), battery.logits(model)
    edit = apply(model, [LoRA(rank=4, alpha=8, target=("attention",), start=start)])
    assert torch.equal(battery.logits(model), answer)
    tail = "q_proj" if name == "llama" else "c_attn"
    targets = ["q_proj", "v_proj"] if name == "llama" else ["c_attn"]
    with battery.quiet():
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, init_lora_weights=start,
            fan_in_fan_out=name == "gpt2",
        )  # fmt: skip
        peer: Any = get_peft_model(battery.build(name, torch.float32), config)
    for key, delta in edit.deltas.items():
        if f".{tail}." in f".{key}" and not (name == "gpt2" and start == "olora"):
            assert isinstance(delta, LoRADelta)
            theirs = peer.get_submodule(f"base_model.model.{key.rpartition('.')[0]}")
            product = theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight
            battery.close(delta.b @ delta.a, product.detach(), 1e-4)
    randomise(model)
    battery.differs(battery.logits(model), answer)
    with edit.disabled():
        assert torch.equal(battery.logits(model), answer)
    with peer.disable_adapter():
        battery.differs(battery.logits(peer), answer)
    edit.undo()
    battery.same_picture(battery.picture(model), before)


@pytest.mark.parametrize("start", STARTS)
def test_values_and_gradients_are_those_of_an_edited_base(start: Any) -> None:
    model = battery.build("llama")
    edit = apply(model, [LoRA(rank=3, start=start)])
    battery.train(model, edit)
    battery.backward(model)
    other = battery.build("llama")
    twin = apply(other, [LoRA(rank=3)])
    with torch.no_grad():
        for name, delta in edit.deltas.items():
            assert isinstance(delta, LoRADelta)
            assert delta.a0 is not None
            assert delta.b0 is not None
            weight = other.get_submodule(name.rpartition(".")[0]).weight
            weight.sub_(delta.scaling * (delta.b0 @ delta.a0))
            for part in ("a", "b"):
                twin.deltas[name].get_parameter(part).copy_(delta.get_parameter(part))
    battery.close(battery.logits(other), battery.logits(model))
    battery.backward(other)
    for name, parameter in edit.trainable().items():
        assert parameter.grad is not None
        wanted = twin.trainable()[name].grad
        assert wanted is not None
        battery.close(parameter.grad, wanted, 1e-9)


@pytest.mark.parametrize("kind", [LoRA, DoRA])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_it_is_saved_as_a_plain_lora_of_twice_the_rank(
    start: Any, rslora: bool, kind: Any, tmp_path: Path
) -> None:
    model = battery.build("llama")
    technique = kind(rank=3, rslora=rslora, start=start, rank_pattern={"o_proj": 2})
    edit = apply(model, [technique])
    assert not is_exact(edit)
    battery.train(model, edit)
    files.save(edit, tmp_path / "a", base="tiny")
    other = battery.build("llama")
    loaded = files.load(other, tmp_path / "a")
    assert torch.equal(battery.logits(other), battery.logits(model))
    assert is_exact(loaded)
    (plain,) = loaded.techniques
    assert isinstance(plain, LoRA)
    assert (plain.rank, plain.start) == (6, "default")
    assert set(plain.rank_pattern.values()) == {4}
    with battery.quiet():
        peer: Any = PeftModel.from_pretrained(battery.build("llama"), str(tmp_path / "a"))
    battery.close(battery.logits(peer.eval()), battery.logits(model))
    battery.differs(battery.logits(model), battery.base_logits("llama"))


def test_what_trains_is_not_taken_from_a_file(tmp_path: Path) -> None:
    edit = apply(battery.build("llama"), [LoRA(rank=3, start="pissa")])
    files.save(edit, tmp_path / "a", base="tiny")
    with pytest.raises(AdapterError, match="where it started"):
        files.restore(edit, files.read_tensors(tmp_path / "a"))


@pytest.mark.parametrize("start", STARTS)
def test_on_a_quantised_base_it_starts_from_the_rounded_weights(start: Any) -> None:
    model = battery.build("llama")
    apply(model, [Quantize()], undoable=False)
    answer = battery.logits(model)
    edit = apply(model, [LoRA(rank=4, start=start)])
    assert torch.equal(battery.logits(model), answer)
    module = model.model.layers[0].mlp.up_proj
    delta = edit.deltas["model.layers.0.mlp.up_proj.lora"]
    assert isinstance(delta, LoRADelta)
    rounded = seams.weight_of(module).double()
    left = rounded - delta.scaling * (delta.b @ delta.a).detach() if start == "pissa" else None
    if left is not None:
        values = torch.linalg.svdvals(rounded)
        assert abs(float(left.norm()) - float(values[4:].norm())) < 1e-5


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="start cannot have this value"):
        LoRA(start="eva")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TechniqueError, match="is for linears"):
        apply(battery.build("llama"), [LoRA(rank=2, start="pissa", target=("embed_tokens",))])


@pytest.mark.parametrize("start", STARTS)
def test_resume_is_bitwise(start: Any, tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 1}
    technique = LoRA(rank=2, start=start)
    whole = kit.run(tmp_path / "whole", technique, **settings)
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "run", technique, options={"seams": kit.stop_after(2)}, **settings)
    rest = kit.run(tmp_path / "run", technique, options={"resume": True}, **settings)
    assert kit.same(kit.weights(whole), kit.weights(rest))
