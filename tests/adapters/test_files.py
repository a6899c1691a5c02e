"""An adapter folder is read strictly and written whole: what does not fit raises and leaves the model as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afina.adapters import files, writing
from afina.errors import AdapterError
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from tests import battery
from tests.adapters.kit import (
    CONFIG,
    FILES,
    WEIGHTS,
    Tensors,
    edit_config,
    edit_tensors,
    refused,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trained adapter with a whole module beside it, in fp32."""
    model = battery.build("llama", torch.float32)
    edit = apply(model, [LoRA(rank=4, target=("q_proj", "v_proj"), modules_to_save=("lm_head",))])
    battery.train(model, edit)
    return files.save(edit, tmp_path / "adapter", base="tiny")


def test_it_loads_as_it_is(folder: Path) -> None:
    """The control of all that follows."""
    model = battery.build("llama", torch.float32)
    edit = files.load(model, folder)
    for key, tensor in load_file(folder / WEIGHTS).items():
        assert torch.equal(files.peft_tensors(edit)[key], tensor)
    assert {p.name for p in folder.iterdir()} == FILES


def test_what_the_configuration_says(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    told = {
        "r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA",
        "modules_to_save": ["lm_head"], "base_model_name_or_path": "tiny", "use_rslora": False,
        "task_type": "CAUSAL_LM", "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    }  # fmt: skip
    assert {k: config[k] for k in told} == told


@pytest.mark.parametrize(
    "keys",
    [
        (f"{Q}.lora_A.weight",),
        (f"{Q}.lora_B.weight",),
        (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
        ("base_model.model.lm_head.weight",),
    ],
)
def test_a_missing_tensor(folder: Path, keys: tuple[str, ...]) -> None:
    edit_tensors(folder, lambda t: [t.pop(k) for k in keys])
    said = refused(folder)
    assert "lack" in said
    assert keys[0].removeprefix("base_model.model.").split(".lora")[0].split(".weight")[0] in said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", "lora_C"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "layers.9"),
        ("base_model.model.nonsense.weight", "nonsense"),
    ],
)
def test_a_tensor_too_many(folder: Path, key: str, said: str) -> None:
    edit_tensors(folder, lambda t: t.update({key: torch.ones(4, 16)}))
    assert said in refused(folder)


def test_a_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 15)}))
    said = refused(folder)
    assert "(4, 15)" in said
    assert "(4, 16)" in said


def test_a_rank_that_is_not_the_configuration_s(folder: Path) -> None:
    smaller = {f"{Q}.lora_A.weight": torch.ones(3, 16), f"{Q}.lora_B.weight": torch.ones(16, 3)}
    edit_tensors(folder, lambda t: t.update(smaller))
    assert "file 3, configuration 4" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": "gone"}, "r is missing"),
        ({"lora_alpha": "gone"}, "lora_alpha is missing"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"bias": "some"}, "bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_rslaro": True}, "near: use_rslora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": "4"}, "not int"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_dropout": 2.0}, "dropout"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj(": 4}}, "unterminated"),
        ({"rank_pattern": {"q_proj": 8}}, "configuration 8"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "k_proj"),
        ({"target_modules": r".*\.[qkv]_proj"}, "k_proj"),
        ({"modules_to_save": ["lm_head", "norm"]}, "norm"),
    ],
)
def test_a_configuration_that_does_not_fit(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit_config(folder, **changes)
    assert said in refused(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": r".*\.[qv]_proj"},
        {"modules_to_save": ["lm_head", "score"]},
        {"something_new": None, "another": False},
    ],
)
def test_a_configuration_that_fits(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    assert len(files.load(battery.build("llama", torch.float32), folder).deltas) == 4


def test_layers_to_transform(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.pop(k) for k in list(t) if ".layers.0." in k])
    assert "layers.0" in refused(folder)
    edit_config(folder, layers_to_transform=[1])
    assert len(files.load(battery.build("llama", torch.float32), folder).deltas) == 2


def test_a_configuration_that_is_none(folder: Path) -> None:
    for text, said in [("{", "not JSON"), ("[1]", "not a table")]:
        (folder / CONFIG).write_text(text, encoding="utf-8")
        assert said in refused(folder)
    (folder / CONFIG).unlink()
    assert "no adapter here" in refused(folder)


def test_a_pickle_is_never_read(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "pickle" in refused(folder)
    (folder / "adapter_model.bin").unlink()
    assert "no safetensors" in refused(folder)


@pytest.mark.parametrize("keep", [4, 60, -10])
def test_a_damaged_file(folder: Path, keep: int) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep])
    assert "damaged" in refused(folder)


def test_another_base(folder: Path) -> None:
    assert "the model has no such place" in refused(folder, battery.build("gpt2"))
    torch.manual_seed(0)
    wider = battery.llama(hidden_size=32).eval()
    assert "(4, 16)" in refused(folder, wider)


def test_a_copy_of_the_base_s_embedding_must_be_this_base_s(tmp_path: Path) -> None:
    model = battery.build("llama", torch.float32)
    edit = apply(model, [LoRA(rank=4, target=("embed_tokens",))])
    folder = files.save(edit, tmp_path / "adapter", base="tiny")
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    own = model.get_parameter("model.embed_tokens.weight").detach()
    edit_tensors(folder, lambda t: t.update({copy: own.clone()}))
    files.load(battery.build("llama", torch.float32), folder).undo()
    edit_tensors(folder, lambda t: t.update({copy: own + 0.1}))
    assert "other base weights" in refused(folder)


def test_a_tie_that_the_file_tears(tmp_path: Path) -> None:
    model = battery.build("llama_tied", torch.float32)
    edit = apply(model, [LoRA(rank=4, modules_to_save=("lm_head",))])
    folder = files.save(edit, tmp_path / "adapter", base="tiny")
    head = "base_model.model.lm_head.weight"
    edit_tensors(folder, lambda t: t.update({head: t[head] + 1}))
    said = refused(folder, battery.build("llama_tied", torch.float32))
    assert "lm_head" in said
    assert "embed_tokens" in said
    edit_tensors(folder, lambda t: t.pop("base_model.model.model.embed_tokens.weight"))
    refused(folder, battery.build("llama_tied", torch.float32))


def test_a_second_adapter_on_the_same_places_is_refused(folder: Path) -> None:
    model = battery.build("llama", torch.float32)
    first = files.load(model, folder)
    assert "which is there has too" in refused(folder, model)
    first.undo()


# --- saving -------------------------------------------------------------------------------------------------------


def test_only_a_lora_can_be_saved(tmp_path: Path) -> None:
    edit = apply(battery.build("llama"), [Full()])
    with pytest.raises(AdapterError, match="save_pretrained"):
        files.save(edit, tmp_path / "adapter", base="tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years", encoding="utf-8")
    edit = apply(battery.build("llama"), [LoRA(rank=2)])
    with pytest.raises(AdapterError, match="something else"):
        files.save(edit, tmp_path, base="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


class Broken:
    """A tokenizer whose disk is full."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{", encoding="utf-8")
        raise OSError("No space left on device")


@pytest.mark.parametrize("where", ["tensors", "tokenizer"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_save_leaves_no_half_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, exists: bool
) -> None:
    target = folder if exists else tmp_path / "new"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    edit = apply(battery.build("llama"), [LoRA(rank=2)])

    def fails(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    if where == "tensors":
        monkeypatch.setattr(writing, "save_file", fails)
    with pytest.raises(OSError, match="No space"):
        files.save(edit, target, base="tiny", tokenizer=Broken() if where == "tokenizer" else None)
    assert {p.name for p in tmp_path.iterdir()} == {"adapter"}
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_save_replaces_the_adapter_that_was_there(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("of the old one", encoding="utf-8")
    edit = apply(battery.build("llama"), [LoRA(rank=2)])
    files.save(edit, folder, base="tiny")
    assert {p.name for p in folder.iterdir()} == FILES
    assert [p.name for p in folder.parent.iterdir()] == ["adapter"]
    assert len(files.load(battery.build("llama"), folder).deltas) == 14


@pytest.mark.parametrize("alpha", [1 / 3, 0.1, 7.7, 32.0])
@pytest.mark.parametrize("rslora", [True, False])
def test_the_scale_comes_back_exactly(tmp_path: Path, alpha: float, rslora: bool) -> None:
    edit = apply(
        battery.build("llama"),
        [LoRA(rank=3, alpha=alpha, rslora=rslora, alpha_pattern={"v_proj": 2.7})],
    )
    files.save(edit, tmp_path / "adapter", base="tiny")
    loaded = files.load(battery.build("llama"), tmp_path / "adapter")
    scales: list[list[Any]] = [[d.scaling for d in e.deltas.values()] for e in (edit, loaded)]
    assert scales[0] == scales[1]
