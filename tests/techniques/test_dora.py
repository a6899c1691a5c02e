"""DoRA: against the sum written out, values and gradients; its norms, kept and computed; merging; refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afina import seams
from afina.adapters import files
from afina.adapters.combine import combine
from afina.adapters.merge import merge_unchecked
from afina.adapters.merge_job import MergeSettings
from afina.errors import AdapterError, TechniqueError
from afina.models import hub
from afina.table import apply
from afina.techniques import dora
from afina.techniques.dora import DoRA, DoRADelta, row_norms
from afina.techniques.lora import LoRA
from afina.techniques.trainable_tokens import TrainableTokens
from tests import battery
from tests.adapters.kit import gemma3, peer, randomise, refused
from tests.tiny import byte_tokenizer, save_model, tiny_llama
from tests.train import kit


def written_out(site: seams.MapSite, delta: DoRADelta, parts: list[Tensor], x: Tensor) -> Tensor:
    """The output with W + s B A written out, its norm a constant."""
    a, b, m = parts
    weight = site.module.get_parameter("weight").detach()
    weight = weight if site.kind == "linear" else weight.t()
    whole = weight + delta.scaling * (b @ a)
    norms = whole.detach().norm(dim=1)
    bias = getattr(site.module, "bias", None)
    y = (x @ whole.t()) * (m / norms)
    return y if bias is None else y + bias.detach()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"target": ("all-linear", "embed_tokens")}),
        ("gpt2", {}),
        ("bert", {"rslora": True}),
    ],
)
def test_each_map_is_the_sum_written_out(name: str, settings: dict[str, Any]) -> None:
    model = battery.build(name)
    edit = apply(model, [DoRA(rank=3, **settings)])
    battery.train(model, edit, steps=3)
    for site in seams.map_sites(model):
        delta = edit.deltas.get(f"{site.name}.dora")
        if not isinstance(delta, DoRADelta):
            continue
        torch.manual_seed(1)
        ids = torch.randint(0, site.in_features, (5,))
        x = torch.randn(5, site.in_features, dtype=torch.float64)
        x = F.one_hot(ids, site.in_features).double() if site.kind == "embedding" else x
        x.requires_grad_(True)
        own: list[Tensor] = [delta.a, delta.b, delta.m]
        twins = [p.detach().clone().requires_grad_(True) for p in own]
        fast = site.module(ids if site.kind == "embedding" else x)
        slow = written_out(site, delta, twins, x)
        battery.close(fast, slow)
        seed = torch.randn_like(slow)
        inputs = own if site.kind == "embedding" else [*own, x]
        wanted = torch.autograd.grad(slow, [*twins, x], seed)
        for got, true in zip(torch.autograd.grad(fast, inputs, seed), wanted, strict=False):
            battery.close(got, true)


@pytest.mark.parametrize("turned", [False, True])
def test_norms_are_those_of_the_sum_however_many_rows_are_looked_at_together(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    w, a, b = (torch.randn(*s, dtype=torch.float64) for s in ((11, 7), (3, 7), (11, 3)))
    wanted = (w + 0.7 * (b @ a)).norm(dim=1)
    stored = w.t().contiguous() if turned else w
    battery.close(row_norms(stored, a, b, 0.7, turned=turned), wanted, 1e-14)
    monkeypatch.setattr(dora, "ROWS", 4)
    battery.close(row_norms(stored, a, b, 0.7, turned=turned), wanted, 1e-14)
    battery.differs(row_norms(stored, a, b, 0.8, turned=turned), wanted)
    half = row_norms(stored.bfloat16(), a.float(), b.float(), 0.7, turned=turned)
    assert half.dtype == torch.float32


def test_a_row_of_zeros_gives_no_nan() -> None:
    model = battery.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[2] = 0
    before = battery.logits(model)
    edit = apply(model, [DoRA(rank=2)])
    assert torch.equal(battery.logits(model), before)
    battery.train(model, edit)
    assert battery.logits(model).isfinite().all()


def test_no_sum_is_written_out_in_training() -> None:
    """No tensor of the weight's size comes into being in forward, beside the piece of it that is looked at."""
    model = battery.build("llama", torch.float32)
    edit = apply(model, [DoRA(rank=2)])
    delta = next(iter(edit.deltas.values()))
    assert isinstance(delta, DoRADelta)
    assert {n for n, _ in delta.named_buffers()} == set()
    assert edit.state() == {}


def test_norms_are_kept_while_nothing_changes_and_no_longer() -> None:
    model = battery.build("llama")
    edit = apply(model, [DoRA(rank=2)])
    randomise(model)
    module = model.model.layers[0].self_attn.q_proj
    delta = edit.deltas["model.layers.0.self_attn.q_proj.dora"]
    assert isinstance(delta, DoRADelta)
    with torch.no_grad():
        first = delta.norms(module)
        assert delta.norms(module) is first
        delta.b.mul_(2)
        assert not torch.equal(delta.norms(module), first)
        second = delta.norms(module)
        module.weight.mul_(3)
        assert not torch.equal(delta.norms(module), second)
        third = delta.norms(module)
        module.weight = torch.nn.Parameter(module.weight * 2)
        assert not torch.equal(delta.norms(module), third)
        twin = copy.deepcopy(model).model.layers[0].self_attn.q_proj
        twin.weight.mul_(2)
        assert not torch.equal(twin.dora.norms(twin), delta.norms(module))
    assert delta.norms(module) is not delta.norms(
        module
    )  # in training it is computed in every pass


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma3"])
def test_merging_is_exact(name: str) -> None:
    model = gemma3() if name == "gemma3" else battery.build(name)
    more = ("embed_tokens",) if name == "gemma3" else ()
    edit = apply(model, [DoRA(rank=3, target=("all-linear", *more))])
    randomise(model)
    changed = battery.logits(model)
    edit.merge()
    battery.close(battery.logits(model), changed, 1e-10)
    edit.unmerge()
    assert torch.equal(battery.logits(model), changed)


def test_merged_on_disk(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    model, _ = hub.load(base, dtype="fp32", device="cpu")
    edit = apply(model, [DoRA(rank=2)])
    randomise(model)
    files.save(edit, tmp_path / "adapter", base=str(base))
    # Both computed in fp64: so weights are compared that were rounded once, and not how a CPU adds in fp32.
    with torch.no_grad():
        changed = model.double()(torch.arange(9)[None]).logits
    settings = MergeSettings(max_new_tokens=0, compute_dtype="fp32")
    made = merge_unchecked(tmp_path / "adapter", tmp_path / "merged", settings=settings)
    assert made.verified, made.verdict
    merged, _ = hub.load(tmp_path / "merged", dtype="fp32", device="cpu")
    with torch.no_grad():
        battery.close(merged.double()(torch.arange(9)[None]).logits, changed, 1e-5)


PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 3}, "use_rslora": True},
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "encoder": ("bert", {"target_modules": ["query", "dense"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
}


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_of_peft(name: str, tmp_path: Path) -> None:
    base, settings = PEERS[name]
    theirs = peer(base, tmp_path, use_dora=True, **settings)
    model = battery.build(base)
    edit = files.load(model, tmp_path)
    assert isinstance(edit.techniques[0], DoRA)
    battery.close(battery.logits(model), theirs, 1e-9)
    battery.differs(theirs, battery.base_logits(base))


def test_magnitudes_are_asked_for(tmp_path: Path) -> None:
    from tests.adapters.kit import edit_config, edit_tensors

    edit = apply(battery.build("llama"), [DoRA(rank=2, target=("q_proj",))])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    edit_tensors(folder, lambda t: t.pop(key))
    assert "the file lacks it" in refused(folder, battery.build("llama"))
    files.save(edit, folder, base="tiny")
    edit_config(folder, use_dora=False)
    assert "no such place" in refused(folder, battery.build("llama"))


def test_arithmetic_of_sums_refuses_it(tmp_path: Path) -> None:
    """PEFT 0.21.2 combines directions and drops the rest: 75 % off for one adapter of weight 1."""
    edit = apply(battery.build("llama"), [DoRA(rank=2)])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    with pytest.raises(AdapterError, match="DoRA is none"):
        combine([(str(folder), 1.0), (str(folder), 1.0)], tmp_path / "out")


def test_where_another_acts_already_it_is_refused() -> None:
    tokens = TrainableTokens(tokens=(1, 2))
    with pytest.raises(TechniqueError, match="leave the module out"):
        apply(battery.build("llama"), [tokens, DoRA(rank=2, target=("embed_tokens",))])
    with pytest.raises(TechniqueError, match="LoRA with magnitudes"):
        apply(battery.build("llama"), [LoRA(rank=2), DoRA(rank=2)])


def test_resume_is_bitwise(tmp_path: Path) -> None:
    settings = {"steps": 4, "save_every": 1}
    whole = kit.run(tmp_path / "whole", DoRA(rank=2), **settings)
    with pytest.raises(kit.Stop):
        kit.run(tmp_path / "run", DoRA(rank=2), options={"seams": kit.stop_after(2)}, **settings)
    rest = kit.run(tmp_path / "run", DoRA(rank=2), options={"resume": True}, **settings)
    assert kit.same(kit.weights(whole), kit.weights(rest))
