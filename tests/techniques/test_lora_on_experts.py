"""LoRA beside fused experts: against W + s B A written out, in every implementation, with dropout, merged, in PEFT."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from afina.adapters import files
from afina.adapters.merge import merge
from afina.adapters.merge_pieces import Pieces
from afina.errors import AdapterError, ModelError, TechniqueError
from afina.table import apply
from afina.techniques.dora import DoRA
from afina.techniques.lora import LoRA
from afina.techniques.lora_on_experts import ExpertPath, ExpertsDelta, expert_sites, grouped
from afina.tree import Edit
from tests import battery
from tests.tiny import byte_tokenizer

BOTH = LoRA(rank=3, target=("experts",))
MODULES = [f"model.layers.{i}.mlp.experts" for i in (0, 1)]


def paths(edit: Edit) -> dict[str, ExpertPath]:
    found = {n: d for n, d in edit.deltas.items() if isinstance(d, ExpertsDelta)}
    return {
        f"{name.removesuffix('.lora')}.{own}": path
        for name, delta in found.items()
        for own, path in delta.paths.items()
    }


def randomised(edit: Edit) -> None:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in edit.trainable().values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)


def test_sites() -> None:
    sites = expert_sites(battery.build("mixtral"))
    assert [s.name for s in sites] == [
        f"{m}.{p}" for m in MODULES for p in ("gate_up_proj", "down_proj")
    ]
    assert [(s.experts, s.in_features, s.out_features) for s in sites[:2]] == [
        (4, 16, 24),
        (4, 12, 16),
    ]
    assert [s.block for s in sites] == [0, 0, 1, 1]
    assert expert_sites(battery.build("llama")) == []


def materialised(edit: Edit) -> tuple[nn.Module, dict[str, tuple[Tensor, Tensor]]]:
    """The base with W + s B A made from leaves, expert by expert."""
    model = battery.build("mixtral")
    leaves: dict[str, tuple[Tensor, Tensor]] = {}
    for name, path in paths(edit).items():
        a, b = (p.detach().clone().requires_grad_() for p in (path.a, path.b))
        a_EIR, b_ORE = a.view(4, path.rank, -1), b.view(-1, path.rank, 4)
        change = torch.stack([b_ORE[:, :, e] @ a_EIR[e] for e in range(4)]) * path.scaling
        module, _, own = name.rpartition(".")
        experts = model.get_submodule(module)
        weight = experts.get_parameter(own).detach()
        delattr(experts, own)
        setattr(experts, own, weight + change)
        leaves[name] = (a, b)
    return model, leaves


def test_it_is_the_sum_written_out_values_and_gradients() -> None:
    model = battery.build("mixtral")
    edit = apply(model, [BOTH])
    randomised(edit)
    slow, leaves = materialised(edit)
    battery.close(battery.logits(model), battery.logits(slow))
    battery.differs(battery.logits(model), battery.base_logits("mixtral"))
    battery.backward(model)
    battery.backward(slow)
    for name, path in paths(edit).items():
        for mine, leaf in zip((path.a, path.b), leaves[name], strict=True):
            assert mine.grad is not None
            battery.close(mine.grad, leaf.grad, 1e-9)


def test_another_layout_of_b_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = battery.build("mixtral")
    edit = apply(model, [BOTH])
    randomised(edit)
    slow, _ = materialised(edit)
    monkeypatch.setattr(ExpertPath, "ups", lambda self: self.b.view(-1, 4, 3).permute(1, 0, 2))
    with pytest.raises(AssertionError):
        battery.close(battery.logits(model), battery.logits(slow))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("rank", [3, 8])
def test_every_implementation_says_the_same(implementation: str, rank: int) -> None:
    exact = battery.build("mixtral")
    technique = LoRA(rank=rank, target=("experts",))
    edit = apply(exact, [technique])
    randomised(edit)
    model = battery.build("mixtral", torch.float32)
    model.set_experts_implementation(implementation)
    before = battery.logits(model)
    other = apply(model, [technique])
    if implementation != "batched_mm":  # it is computed as grouped_mm, with other roundings
        assert torch.equal(battery.logits(model), before)
    with torch.no_grad():
        for name, tensor in other.trainable().items():
            tensor.copy_(edit.trainable()[name])
    battery.close(battery.logits(model).double(), battery.logits(exact), 1e-4)
    battery.backward(model)
    battery.backward(exact)
    for name, tensor in other.trainable().items():
        assert tensor.grad is not None
        battery.close(tensor.grad.double(), edit.trainable()[name].grad, 1e-3)
    with other.disabled():
        assert torch.equal(battery.logits(model), before)
    other.undo()
    assert torch.equal(battery.logits(model), before)
    assert model.config._experts_implementation == implementation


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_that_are_empty_or_end_early(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(6, 8, dtype=dtype), torch.randn(3, 8, 4, dtype=dtype)
    y = grouped(rows, weight, torch.tensor([2, 2, 6], dtype=torch.int32))
    battery.close(y[:2], rows[:2] @ weight[0], 1e-6)
    battery.close(y[2:], rows[2:] @ weight[2], 1e-6)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_dropout_drops_in_training_alone_and_on_average_nothing(implementation: str) -> None:
    model = battery.build("mixtral", torch.float32)
    model.set_experts_implementation(implementation)
    edit = apply(model, [LoRA(rank=8, target=("experts",), dropout=0.3, layers="1")])
    randomised(edit)
    still = battery.logits(model)
    assert torch.equal(battery.logits(model), still)
    module = model.get_submodule(MODULES[1])
    x = torch.randn(5, 16)
    chosen, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        # Of the last projection alone, for it is linear in what is dropped.
        for tensor in module.lora.gate_up_proj.parameters():
            tensor.zero_()
        calm = module(x, chosen, weights)
        model.train()
        torch.manual_seed(0)
        draws = torch.stack([module(x, chosen, weights) for _ in range(500)])
    assert draws.std(dim=0).max() > 1e-3
    assert (draws.mean(dim=0) - calm).abs().max() < 5 * draws.std(dim=0).max() / 500**0.5
    torch.manual_seed(4)
    one = module(x, chosen, weights)
    torch.manual_seed(4)
    assert torch.equal(module(x, chosen, weights), one)


def test_no_matrix_of_the_weights_size_is_made() -> None:
    """What is kept for backward is rows and low ranks: nothing of the size of W beside W itself."""
    model = battery.build("mixtral")
    edit = apply(model, [BOTH])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    large: list[tuple[int, ...]] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.numel() >= 4 * 12 * 16 and tensor.untyped_storage().data_ptr() not in own:
            large.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        model(input_ids=battery.IDS[:1, :2])
    assert large == []
    assert len(edit.trainable()) == 8


def test_merged_it_is_the_sum_and_unmerged_the_base() -> None:
    model = battery.build("mixtral")
    edit = apply(model, [BOTH])
    randomised(edit)
    changed = battery.logits(model)
    name, path = next(iter(paths(edit).items()))
    weight = model.get_parameter(name).clone()
    edit.merge()
    e = 2
    wanted = weight[e] + path.scaling * path.b.view(24, 3, 4)[:, :, e] @ path.a.view(4, 3, 16)[e]
    battery.close(model.get_parameter(name)[e], wanted)
    battery.close(battery.logits(model), changed)
    edit.unmerge()
    assert torch.equal(model.get_parameter(name), weight)
    assert torch.equal(battery.logits(model), changed)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A mixture in a file that has its experts apart, as Transformers saves it, and in one that has them fused."""
    folder = tmp_path_factory.mktemp("mixture")
    config = copy.deepcopy(battery.build("mixtral").config)
    config.vocab_size = 260  # that of the tokenizer, whose prompts the merge looks at
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(folder / "pieces")
    byte_tokenizer().save_pretrained(folder / "pieces")
    shutil.copytree(folder / "pieces", folder / "fused")
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    save_file(whole, folder / "fused" / "model.safetensors", {"format": "pt"})
    return folder, model


@pytest.mark.parametrize("kind", ["fused", "pieces"])
def test_on_the_disk_experts_are_merged_fused_or_in_pieces(
    kind: str, bases: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = bases
    edit = apply(model, [LoRA(rank=2, target=("q_proj", "experts"))])
    try:
        randomised(edit)
        wanted = battery.logits(model)
        files.save(edit, tmp_path / "adapter", base=str(folder / kind))
    finally:
        edit.undo()
    merged = merge(tmp_path / "adapter", out=tmp_path / "merged")
    assert merged.verified
    again = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    battery.close(battery.logits(again), wanted, 1e-5)
    before, after = (
        load_file(f / "model.safetensors") for f in (folder / kind, tmp_path / "merged")
    )
    assert list(before) == list(after)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {n for n in before if "experts" in n or "q_proj" in n}
    assert set(merged.record["rounding"]) == changed


def test_experts_that_were_trained_whole_are_taken_apart(
    bases: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = bases
    edit = apply(model, [LoRA(rank=2, target=("q_proj",), modules_to_save=("experts",))])
    try:
        randomised(edit)
        wanted = battery.logits(model)
        files.save(edit, tmp_path / "adapter", base=str(folder / "pieces"))
    finally:
        edit.undo()
    merge(tmp_path / "adapter", out=tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    battery.close(battery.logits(again), wanted, 1e-5)


def test_pieces_that_are_not_all_there_are_refused(
    bases: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = bases
    edit = apply(model, [LoRA(rank=2, target=("experts",))])
    files.save(edit, tmp_path / "adapter", base=str(folder / "pieces"))
    edit.undo()
    right = Pieces._apart

    def fewer(self: Pieces, tensors: Any) -> dict[str, torch.Tensor]:
        return dict(list(right(self, tensors).items())[1:])

    monkeypatch.setattr(Pieces, "_apart", fewer)
    with pytest.raises(ModelError, match="in another form") as caught:
        merge(tmp_path / "adapter", out=tmp_path / "other")
    assert "down_proj" in str(caught.value)
    assert "edit.merge()" in str(caught.value.cure)


def test_a_pattern_chooses_projections_blocks_and_ranks() -> None:
    technique = LoRA(
        rank=2,
        target=("q_proj", "down_proj"),
        layers="0",
        rank_pattern={"down_proj": 4},
        loraplus_ratio=8.0,
    )
    edit = apply(battery.build("mixtral"), [technique])
    assert list(paths(edit)) == [f"{MODULES[0]}.down_proj"]
    assert paths(edit)[f"{MODULES[0]}.down_proj"].rank == 4
    scales = edit.lr_scales()
    assert scales[f"{MODULES[0]}.lora.down_proj.b"] == 8.0
    assert scales[f"{MODULES[0]}.lora.down_proj.a"] == 1.0
    without = LoRA(rank=2, target=("all-linear", "experts"), exclude=("gate_up_proj", "q_proj"))
    edit = apply(battery.build("mixtral"), [without])
    assert list(paths(edit)) == [f"{m}.down_proj" for m in MODULES]
    assert not any("q_proj" in name for name in edit.deltas)


def test_what_is_not_there_or_not_reached_is_refused() -> None:
    with pytest.raises(TechniqueError, match="found no fused experts"):
        apply(battery.build("llama"), [BOTH])
    with pytest.raises(TechniqueError, match="found no fused experts that dora reaches"):
        apply(battery.build("mixtral"), [DoRA(rank=2, target=("all-linear", "experts"))])
    told = apply(battery.build("mixtral"), [LoRA(rank=2)]).warnings
    assert any("'experts' is in lora.target" in warning for warning in told)
    assert not apply(
        battery.build("mixtral"), [LoRA(rank=2, target=("all-linear", "experts"))]
    ).warnings


def test_two_models_of_one_configuration_do_not_touch_one_another() -> None:
    model = battery.build("mixtral")
    twin = copy.deepcopy(model)
    edit = apply(model, [BOTH])
    randomised(edit)
    assert torch.equal(battery.logits(twin), battery.base_logits("mixtral"))
    third = copy.deepcopy(model)
    assert torch.equal(battery.logits(third), battery.logits(model))
    edit.undo()
    assert torch.equal(battery.logits(model), battery.base_logits("mixtral"))
    battery.differs(battery.logits(third), battery.logits(model))


@pytest.mark.parametrize(
    "names",
    [
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        ["experts.gate_up_proj"],
        ["down_proj"],
        ["model.layers.1.mlp.experts.down_proj"],
    ],
)
def test_what_peft_wrote_is_read(tmp_path: Path, names: list[str]) -> None:
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=["q_proj"],
        target_parameters=names,
        rank_pattern={"experts.down_proj": 5},
        task_type="CAUSAL_LM",
    )
    with battery.quiet():
        peer: Any = get_peft_model(battery.build("mixtral"), config)
    with torch.no_grad():
        for name, tensor in peer.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
        with battery.quiet():
            peer.save_pretrained(str(tmp_path / "there"))
    model = battery.build("mixtral")
    edit = files.load(model, tmp_path / "there")
    battery.same_logits_and_gradients(peer.eval(), model, edit)
    assert {path.rank for n, path in paths(edit).items() if "down" in n} <= {5}
    assert len(paths(edit)) == sum(
        any(f".{site.name}".endswith(f".{n}") for n in names) for site in expert_sites(model)
    )


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    files.save(apply(battery.build("mixtral"), [BOTH]), tmp_path / "a", base="tiny")
    place = tmp_path / "a" / "adapter_config.json"
    config = json.loads(place.read_text(encoding="utf-8"))
    assert config["target_parameters"] == sorted(
        f"{m}.{p}" for m in MODULES for p in ("gate_up_proj", "down_proj")
    )
    for wrong in (
        {"target_parameters": None},
        {"r": 5},
        {"use_dora": True},
    ):
        place.write_text(json.dumps(config | wrong), encoding="utf-8")
        with pytest.raises(AdapterError):
            files.load(battery.build("mixtral"), tmp_path / "a")
    place.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(AdapterError):
        files.load(battery.build("llama"), tmp_path / "a")


def test_it_answers() -> None:
    model = battery.build("mixtral", torch.float32)
    edit = apply(model, [BOTH])
    randomised(edit)
    told = model.generate(battery.IDS[:1], max_new_tokens=4, do_sample=False)
    again = battery.IDS[:1]
    with torch.no_grad():
        for _ in range(4):
            again = torch.cat([again, model(input_ids=again).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(told, again)
