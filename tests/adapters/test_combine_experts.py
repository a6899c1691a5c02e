"""LoRA on fused experts in arithmetic: a product for each expert, and PEFT reads what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from afina.adapters import files
from afina.adapters.combine import CombineSettings, combine
from afina.adapters.inspection import inspect
from afina.adapters.resize import ResizeSettings, resize
from afina.errors import AdapterError
from tests import battery
from tests.adapters.kit import build, edit_config, edit_tensors
from tests.adapters.test_combine import error, read_by_peft, weighted

linalg: Any = torch.linalg  # it has no types

GATE, DOWN = "experts.gate_up_proj", "experts.down_proj"
BOTH: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q_proj"],
    "target_parameters": [GATE, DOWN],
    "rank_pattern": {DOWN: 2},
}
ONE: dict[str, Any] = {
    "r": 2,
    "lora_alpha": 3,
    "use_rslora": True,
    "target_modules": ["v_proj"],
    "target_parameters": [DOWN],
}
WEIGHTS = (0.7, -1.3)


def changes(model: Any) -> dict[str, Tensor]:
    """What PEFT adds to each weight, by the weight's module or, where it is one of experts, by its own name."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and "default" in module.scaling:
            own = getattr(module, "parameter_name", None)
            plain = name.replace(".base_layer", "")
            found[f"{plain}.{own}" if own else plain] = module.get_delta_weight("default").detach()
    return found


def saved(folder: Path, settings: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Saves a random adapter of PEFT's; returns its changes."""
    with battery.quiet():
        model: Any = get_peft_model(build("mixtral"), LoraConfig(**settings))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        model.save_pretrained(str(folder))
    edit_config(folder, base_model_name_or_path="tiny/gone")
    return changes(model)


def two(tmp_path: Path) -> tuple[dict[Path, float], dict[str, Tensor]]:
    """Adapters of both tensors and of one, and the weighted sum of their changes."""
    folders = [tmp_path / "a", tmp_path / "b"]
    found = [saved(f, s, n) for n, (f, s) in enumerate(zip(folders, (BOTH, ONE), strict=True))]
    return dict(zip(folders, WEIGHTS, strict=True)), weighted(found, WEIGHTS)


@pytest.mark.parametrize(
    "settings", [CombineSettings(), CombineSettings(method="svd", energy=1.0)], ids=["cat", "svd"]
)
def test_peft_reads_the_exact_sum(settings: CombineSettings, tmp_path: Path) -> None:
    sources, wanted = two(tmp_path)
    made = combine(sources, tmp_path / "c", settings=settings)
    theirs = read_by_peft("mixtral", tmp_path / "c")
    assert error(changes(theirs), wanted) < 1e-12
    assert made.error < 1e-12
    # Four experts of two tensors, q_proj and v_proj, in both blocks.
    assert len(made.places) == 2 * (2 * 4 + 2)
    model = build("mixtral")
    files.load(model, tmp_path / "c")
    theirs.eval()
    torch.testing.assert_close(battery.logits(model), battery.logits(theirs), rtol=0, atol=1e-9)


def test_other_experts_would_be_seen(tmp_path: Path) -> None:
    """A control: the products of two experts changed for each other are far from the sum."""
    sources, wanted = two(tmp_path)
    combine(sources, tmp_path / "c")

    def swap(tensors: dict[str, Tensor]) -> None:
        key = next(key for key in tensors if key.endswith("experts.base_layer.lora_A.weight"))
        experts = tensors[key].reshape(4, -1, tensors[key].shape[1])
        tensors[key] = experts[[1, 0, 2, 3]].reshape(tensors[key].shape).contiguous()

    edit_tensors(tmp_path / "c", swap)
    assert error(changes(read_by_peft("mixtral", tmp_path / "c")), wanted) > 0.05


def test_each_expert_is_cut_to_its_own_best(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "a", BOTH, 0)
    made = resize(tmp_path / "a", tmp_path / "small", settings=ResizeSettings(energy=0.7))
    rows = {place.name: place for place in made.places}
    assert len({row.rank for name, row in rows.items() if GATE in name}) > 1
    found = changes(read_by_peft("mixtral", tmp_path / "small"))
    assert set(found) == set(wanted)
    for name, change in wanted.items():
        if not name.endswith((GATE, DOWN)):
            continue
        for expert, of_one in enumerate(change):
            row = rows[f"{name.removeprefix('base_model.model.')}[{expert}]"]
            values = linalg.svdvals(of_one)
            least = float(values[row.rank :].square().sum() / values.square().sum()) ** 0.5
            off = float((found[name][expert] - of_one).norm() / of_one.norm())
            assert off == pytest.approx(least, abs=1e-7)
            assert row.error == pytest.approx(off, abs=1e-7)
    seen = {row.name: row for row in inspect(tmp_path / "small").rows}
    assert seen[f"model.layers.0.mlp.{GATE}"].shape == (4, 24, 16)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "a", ONE, 0)
    saved(tmp_path / "b", ONE, 1)

    def halve(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "experts" in key]:
            size = tensors[key].shape[0 if "lora_A" in key else 1] // 2
            half = tensors[key][:size] if "lora_A" in key else tensors[key][:, :size]
            tensors[key] = half.contiguous()

    edit_tensors(tmp_path / "b", halve)
    both = {tmp_path / "a": 1.0, tmp_path / "b": 1.0}
    with pytest.raises(AdapterError, match=r"down_proj: 4 experts in .*, 2 in"):
        combine(both, tmp_path / "c")
    edit_config(tmp_path / "b", target_parameters=[GATE, DOWN])
    with pytest.raises(AdapterError, match="target_parameters does not say which tensors"):
        combine(both, tmp_path / "c")
    assert not (tmp_path / "c").exists()
