"""A technique that is new to the layout: a `Kind` is all it takes, and reading, strictness and parts come with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from torch import Tensor, nn

from afina import seams, table
from afina.adapters import files
from afina.adapters.fitting import KINDS
from afina.adapters.kinds import Allowed, Config, Kind, Part, Parts, Places, named
from afina.tree import Delta, Edit, Technique, match
from tests import battery
from tests.adapters.kit import edit_config, edit_tensors, randomise, refused, rename


class Gate(Technique):
    """Each output of a linear times a factor: IA3 on keys and values."""

    key: ClassVar[str] = "gate"

    target: tuple[str, ...]

    def apply(self, model: nn.Module, *, undoable: bool = True) -> Edit:
        names = [site.name for site in seams.map_sites(model)]
        with Edit(model, [self]).whole() as edit:
            for name in match(names, self.target, setting="gate.target"):
                edit.attach(name, self, GateDelta(model.get_submodule(name)))
        return edit


class GateDelta(Delta):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight = module.get_parameter("weight")
        self.factor = nn.Parameter(torch.ones(weight.shape[0], 1, dtype=weight.dtype))

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        return y * self.factor.flatten()

    def reset(self, seed: int) -> None:
        nn.init.ones_(self.factor)


def _named(model: nn.Module, config: Config, seen: Mapping[str, str]) -> set[str]:
    return {s.name for s in seams.map_sites(model) if named(config["target_modules"], seen[s.name])}


def _misfit(site: seams.MapSite, parts: Parts) -> dict[str, str]:
    (part, tensor), *_ = parts.items()
    wanted = (site.out_features, 1)
    return {} if tuple(tensor.shape) == wanted else {part: f"shape {tuple(tensor.shape)}, {wanted}"}


def _config(part: Part) -> dict[str, Any]:
    return {"target_modules": sorted(part.deltas), "feedforward_modules": []}


def _tensors(delta: Delta) -> dict[str, Tensor]:
    assert isinstance(delta, GateDelta)
    return {"ia3_l": delta.factor}


def _technique_of(model: nn.Module, config: Config, places: Places) -> Gate:
    return Gate(target=tuple(places.parts))


KIND = Kind(
    technique=Gate,
    peft_type="IA3",
    allowed=Allowed(
        needed=("target_modules", "feedforward_modules"),
        types={"target_modules": (list,)},
        items={"target_modules": str},
        neutral={"feedforward_modules": ([],)},
        free=frozenset({
            "task_type", "base_model_name_or_path", "inference_mode", "modules_to_save", "exclude_modules",
            "revision", "peft_version", "auto_mapping", "fan_in_fan_out", "init_ia3_weights",
        }),
        cures={},
    ),
    ending=re.compile(r"\.ia3_l(\.(?P<adapter>[^.]+))?$"),
    part=lambda match: "ia3_l",
    tensors=_tensors,
    config=_config,
    sites=lambda model: {site.name: site for site in seams.map_sites(model)},
    named=_named,
    misfit=_misfit,
    technique_of=_technique_of,
)  # fmt: skip


@pytest.fixture(autouse=True)
def new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "IA3", KIND)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(table, "ORDER", (*table.ORDER, "gate"))


TARGETS = ("k_proj", "v_proj")


def test_it_is_written_and_read_by_peft_and_the_reverse(tmp_path: Path) -> None:
    with battery.quiet():
        config = IA3Config(target_modules=list(TARGETS), feedforward_modules=[])
        peer: Any = get_peft_model(battery.build("llama"), config)
        randomise(peer)
        peer.eval().save_pretrained(str(tmp_path / "theirs"))
    model = battery.build("llama")
    edit = files.load(model, tmp_path / "theirs")
    battery.differs(battery.logits(model), battery.base_logits("llama"))
    battery.close(battery.logits(model), battery.logits(peer))
    files.save(edit, tmp_path / "ours", base="tiny")
    again = battery.build("llama")
    notes = files.load(again, tmp_path / "ours").notes
    assert notes[0].endswith("applied 4 of 4 tensors")
    assert torch.equal(battery.logits(again), battery.logits(model))
    with battery.quiet():
        back: Any = PeftModel.from_pretrained(battery.build("llama"), str(tmp_path / "ours"))
    battery.close(battery.logits(back.eval()), battery.logits(model))


def test_strictness_comes_with_it(tmp_path: Path) -> None:
    edit = table.apply(battery.build("llama"), [Gate(target=TARGETS)])
    folder = files.save(edit, tmp_path / "a", base="tiny")
    first = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    edit_tensors(folder, lambda t: t.update({first: torch.ones(3, 1)}))
    assert "shape (3, 1)" in refused(folder, battery.build("llama"))
    part = files.load(battery.build("llama"), folder, allow_partial=True)
    assert part.notes[0].endswith("applied 3 of 4 tensors")
    edit_tensors(folder, lambda t: t.pop(first))
    assert "k_proj: adapter_config.json names it" in refused(folder, battery.build("llama"))
    files.save(edit, folder, base="tiny")
    rename(folder, lambda key: "module." + key + ".default")
    assert files.load(battery.build("llama"), folder).notes[0].endswith("4 of 4 tensors")
    edit_config(folder, feedforward_modules=["v_proj"])
    assert "feedforward_modules" in refused(folder, battery.build("llama"))
    edit_config(folder, peft_type="LOHA", feedforward_modules=[])
    assert "wanted: LORA or IA3" in refused(folder, battery.build("llama"))
