"""Folding in memory: once rounded, put back bit for bit, and never acting twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn

from afina.errors import RunError, TechniqueError
from afina.table import apply
from afina.techniques.lora import LoRA, LoRADelta
from afina.train.fit import refuse_unfit
from afina.tree import Delta, Edit
from afina.tree.fold import fold
from tests import battery

FOLDING = [case for case in battery.CASES if case.technique.key == "lora"]
CYCLES = 10
EAGER = {"mixtral": {"experts_implementation": "eager"}}


def moved(name: str, lora: LoRA, dtype: torch.dtype = torch.float64) -> tuple[Any, Edit]:
    """A tiny model with a LoRA of random values."""
    model = battery.build(name, dtype)
    edit = apply(model, [lora])
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model, edit


class Added(Delta):
    """A change that is given."""

    foldable = True

    def __init__(self, change: torch.Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor, y: torch.Tensor, base: torch.nn.Module) -> torch.Tensor:
        return y + x @ self.change.t()

    def reset(self, seed: int) -> None:
        """Nothing to set."""

    def weight_delta(self) -> torch.Tensor:
        return self.change.clone()


# --- one sum, one rounding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_rounded_once(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=draw).to(dtype)
    change = torch.randn(64, 32, generator=draw)
    exact = weight.double() + change.double()
    got, lost = fold(weight, [Added(change)], name="w")
    assert got.dtype == dtype
    # The nearest number of the format to the exact sum; in fp32 the sum itself is one rounding.
    wide = (weight.float() + change) if dtype != torch.float64 else exact
    assert torch.equal(got, wide.to(dtype))
    error = (got.double() - exact).norm() / change.double().norm()
    assert lost == pytest.approx(float(error), rel=1e-2, abs=1e-7)  # fp32 itself is the scale here
    twice = weight + change.to(dtype)
    if dtype == torch.bfloat16:
        assert (twice != got).float().mean() > 0.2  # the control: two roundings, as peers do
        assert (twice.double() - exact).norm() > (got.double() - exact).norm()


def test_another_dtype_loses_less() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=draw).bfloat16()
    change = torch.randn(64, 32, generator=draw) * 0.02
    kept = fold(weight, [Added(change)], name="w", dtype=torch.float32)
    assert kept[0].dtype == torch.float32
    assert kept[1] < 1e-4 < 0.01 < fold(weight, [Added(change)], name="w")[1]


def test_no_change_loses_nothing() -> None:
    weight = torch.randn(4, 4)
    got, lost = fold(weight, [Added(torch.zeros(4, 4))], name="w")
    assert torch.equal(got, weight)
    assert lost == 0


@pytest.mark.parametrize(
    ("weight", "change", "says"),
    [
        (torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 2), "w is quantised"),
        (torch.ones(2, 2), torch.ones(2, 3), "another shape"),
        (torch.ones(2, 2), torch.full((2, 2), torch.nan), "not be finite"),
        (torch.ones(2, 2).half(), torch.full((2, 2), 1e5), "not be finite"),
    ],
    ids=["quantised", "shape", "NaN", "overflow"],
)
def test_what_cannot_be_folded(weight: torch.Tensor, change: torch.Tensor, says: str) -> None:
    with pytest.raises(TechniqueError, match=says):
        fold(weight, [Added(change)], name="w")


# --- in a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FOLDING, ids=lambda case: case.name)
def test_merged_answers_as_before_and_has_the_bases_modules(case: battery.Case) -> None:
    model, edit = battery.edited(case, moved=True)
    if case.model == "bert" and "word_embeddings" in case.technique.target:
        pytest.skip("ties that no setting parts: see test_other_ties_are_refused")
    unmerged = battery.logits(model)
    battery.differs(unmerged, battery.base_logits(case.model))
    before = battery.picture(model)
    lost = edit.merge()
    assert edit.merged
    targets = {name.rpartition(".")[0] for name in edit.deltas}
    # Of fused experts each tensor is told by itself.
    assert {n if n in targets else n.rpartition(".")[0] for n in lost} == targets
    assert all(0 <= value < 1e-12 for value in lost.values())
    battery.close(battery.logits(model), unmerged, 1e-10)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    edit.unmerge()
    battery.same_picture(battery.picture(model), before)
    assert torch.equal(battery.logits(model), unmerged)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ten_cycles_in_bf16_drift_by_nothing(name: str) -> None:
    model, edit = moved(name, LoRA(rank=4), torch.bfloat16)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    identity = {n: id(p) for n, p in model.named_parameters()}
    answer = battery.logits(model)
    for _ in range(CYCLES):
        edit.merge()
        edit.unmerge()
    assert {n: id(p) for n, p in model.named_parameters()} == identity
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters())
    assert torch.equal(battery.logits(model), answer)


def test_computing_the_base_back_drifts() -> None:
    """The control: what subtracting the change again does in bf16, as PEFT unmerges."""
    model, edit = moved("llama", LoRA(rank=4), torch.bfloat16)
    target = "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(target).weight.detach()
    change = edit.deltas[f"{target}.lora"].weight_delta()
    kept = weight.clone()
    for _ in range(CYCLES):
        kept = (kept.float() + change).bfloat16()
        kept = (kept.float() - change).bfloat16()
    assert (kept != weight).float().mean() > 0.05


def test_undo_while_merged() -> None:
    model = battery.build("llama")
    before = battery.picture(model)
    edit = apply(model, [LoRA(rank=4, modules_to_save=("norm",))])
    battery.train(model, edit)
    edit.merge()
    edit.undo()
    assert not edit.merged
    battery.same_picture(battery.picture(model), before)


def test_disabled_while_merged_is_the_base() -> None:
    model, edit = moved("llama", LoRA(rank=4, modules_to_save=("norm",)))
    edit.merge()
    merged = battery.logits(model)
    with edit.disabled():
        assert torch.equal(battery.logits(model), battery.base_logits("llama"))
    assert torch.equal(battery.logits(model), merged)
    edit.unmerge()
    with edit.unfolded():  # of no effect
        battery.close(battery.logits(model), merged)


def test_states_that_do_not_go_together() -> None:
    _, edit = moved("llama", LoRA(rank=4))
    with pytest.raises(TechniqueError, match="not merged"):
        edit.unmerge()
    with edit.disabled(), pytest.raises(TechniqueError, match="disabled"):
        edit.merge()
    edit.merge()
    with pytest.raises(TechniqueError, match="merged already"):
        edit.merge()
    edit.undo()
    with pytest.raises(TechniqueError, match="undone"):
        edit.merge()


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", LoRA(rank=4, modules_to_save=("norm",))),
        ("llama_tied", LoRA(rank=4, target=("lm_head", "q_proj"))),
        ("mixtral", LoRA(rank=4, target=("q_proj",))),
    ],
)
def test_kept_is_a_plain_model_that_saves_itself(name: str, lora: LoRA, tmp_path: Path) -> None:
    model, edit = moved(name, lora)
    flags = {n: p.requires_grad for n, p in battery.build(name).named_parameters()}
    unmerged = battery.logits(model)
    with pytest.raises(TechniqueError, match="not merged"):
        edit.keep()
    edit.merge()
    edit.keep()
    assert edit.undone
    assert not edit.merged
    assert not any(isinstance(m, Delta) or m._forward_hooks for m in model.modules())
    battery.close(battery.logits(model), unmerged, 1e-10)
    edit.undo()  # of no effect any more
    battery.close(battery.logits(model), unmerged, 1e-10)
    assert {n for n, _ in model.named_parameters()} >= set(flags)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64, **EAGER.get(name, {}))
    battery.close(battery.logits(again.eval()), unmerged, 1e-10)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not any("lora" in key for key in file.keys())  # noqa: SIM118


def test_products_are_exact_whatever_was_set_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, edit = moved("llama", LoRA(rank=4, target=("q_proj",)))
    met: list[tuple[Any, Any]] = []
    change = LoRADelta.weight_delta

    def precision() -> tuple[Any, Any]:
        return (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        )

    def watched(self: LoRADelta) -> torch.Tensor:
        met.append(precision())
        return change(self)

    monkeypatch.setattr(LoRADelta, "weight_delta", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        edit.merge()
        assert precision() == ("tf32", "bf16")
    finally:
        torch.set_float32_matmul_precision(before)
    assert met == [("ieee", "ieee")] * 2


def test_training_while_merged_is_refused() -> None:
    model, edit = moved("llama", LoRA(rank=4))
    refuse_unfit(model, edit)
    edit.merge()
    with pytest.raises(RunError, match="merged"):
        refuse_unfit(model, edit)
    edit.unmerge()
    refuse_unfit(model, edit)


def test_a_merge_that_fails_leaves_everything() -> None:
    model, edit = moved("llama", LoRA(rank=4))
    before = battery.picture(model)
    with torch.no_grad():
        list(edit.deltas.values())[-1].b.fill_(torch.nan)
    before = battery.picture(model)
    with pytest.raises(TechniqueError, match="not be finite"):
        edit.merge()
    assert not edit.merged
    with torch.no_grad():
        list(edit.deltas.values())[-1].b.zero_()
        before["tensors"] = battery.picture(model)["tensors"]
    battery.same_picture(battery.picture(model), before)


def test_a_copy_of_a_merged_model_stays_merged() -> None:
    model, edit = moved("llama", LoRA(rank=4))
    edit.merge()
    merged, twin = battery.logits(model), copy.deepcopy(model)
    edit.unmerge()
    assert torch.equal(battery.logits(twin), merged)


# --- tied weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", ("lm_head", "embed_tokens")])
def test_a_tied_pair_is_parted_and_tied_again(target: Any, tmp_path: Path) -> None:
    targets = (target,) if isinstance(target, str) else target
    model, edit = moved("llama_tied", LoRA(rank=3, target=(*targets, "q_proj")))
    unmerged, keys = battery.logits(model), dict(model.all_tied_weights_keys)
    edit.merge()
    battery.close(battery.logits(model), unmerged, 1e-10)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    model.tie_weights()  # as Transformers does on many occasions: it must not undo what was folded
    battery.close(battery.logits(model), unmerged, 1e-10)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    battery.close(battery.logits(again), unmerged, 1e-10)
    edit.unmerge()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True
    assert model.all_tied_weights_keys == keys
    assert torch.equal(battery.logits(model), unmerged)


def test_peft_merges_a_tied_head_into_the_embedding() -> None:
    """The control: the same adapter, merged by PEFT, answers otherwise than before."""
    with battery.quiet():
        config = LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False)
        model: Any = get_peft_model(battery.build("llama_tied"), config).eval()
        unmerged = battery.logits(model)
        merged: Any = model.merge_and_unload()
    error = (battery.logits(merged) - unmerged).norm() / unmerged.norm()
    assert error > 0.1
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_other_ties_are_refused() -> None:
    """BERT shares a bias beside the embedding, so the two cannot simply be parted."""
    model, edit = moved("bert", LoRA(rank=3, target=("word_embeddings", "query")))
    before = battery.picture(model)
    with pytest.raises(TechniqueError, match="no setting that parts them"):
        edit.merge()
    battery.same_picture(battery.picture(model), before)


# --- beside PEFT ----------------------------------------------------------------------------------------------------


def theirs(name: str, dtype: torch.dtype, **settings: Any) -> Any:
    with battery.quiet():
        config = LoraConfig(**({"r": 4, "target_modules": ["q_proj", "up_proj"]} | settings))
        model: Any = get_peft_model(battery.build(name, dtype), config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_to_peft_where_peft_rounds_once(dtype: torch.dtype, tmp_path: Path) -> None:
    from afina.adapters import files

    peer = theirs("llama", dtype)
    peer.save_pretrained(str(tmp_path))
    model = battery.build("llama", dtype)
    files.load(model, tmp_path).merge()
    safe = copy.deepcopy(peer)
    with battery.quiet():
        plain: nn.Module = peer.merge_and_unload()
        twice: nn.Module = safe.merge_and_unload(safe_merge=True)
    ours = {n: p for n, p in model.named_parameters() if ".lora." not in n}
    assert set(ours) == {n for n, _ in plain.named_parameters()}
    ulp = torch.finfo(dtype).eps
    for name, parameter in plain.named_parameters():
        assert torch.allclose(ours[name], parameter, rtol=ulp, atol=1e-6)
        if dtype == torch.bfloat16:
            assert (ours[name] != parameter).float().mean() < 0.02
    changed = [n for n, p in twice.named_parameters() if "q_proj" in n or "up_proj" in n]
    wrong = [(ours[n] != twice.get_parameter(n)).float().mean().item() for n in changed]
    if dtype == torch.bfloat16:
        assert min(wrong) > 0.1  # safe_merge rounds the change and then the sum


def test_peft_drifts_when_it_unmerges() -> None:
    peer = theirs("llama", torch.bfloat16)
    layer = peer.base_model.model.model.layers[0].mlp.up_proj
    before = layer.weight.detach().clone()
    for _ in range(CYCLES):
        with battery.quiet():
            peer.merge_adapter()
            peer.unmerge_adapter()
    assert (layer.weight != before).float().mean() > 0.01
