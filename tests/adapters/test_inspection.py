"""What `inspect` says of adapters, of those that are damaged too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor

import afina
from afina.adapters import files
from afina.adapters.combine import combine
from afina.adapters.inspection import Inspection, inspect
from afina.adapters.inspection_plot import lines_of, plot
from afina.adapters.inspection_rows import Row
from afina.adapters.inspection_words import lines
from afina.errors import AdapterError, ConfigError
from tests import battery
from tests.adapters.kit import edit_config, edit_tensors
from tests.adapters.test_combine import build, made_by_peft
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

linalg: Any = torch.linalg  # it has no types
LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "embed_tokens"],
    "rank_pattern": {"layers.1.self_attn.q_proj": 2},
}


def row(found: Inspection, name: str) -> Row:
    (one,) = [r for r in found.rows if r.name == name]
    return one


def test_spectra_are_those_of_the_changes(tmp_path: Path) -> None:
    deltas = made_by_peft("llama", tmp_path, LORA, 0)
    found = inspect(tmp_path)
    assert (found.method, found.facts["type"], found.facts["base"]) == ("lora", "LORA", "tiny/gone")
    assert found.strange == ()
    assert len(found.rows) == 3
    for name, delta in deltas.items():
        one = row(found, name.removeprefix("base_model.model."))
        values = linalg.svdvals(delta.double())
        shares = values[values > 1e-9] / values.sum()
        assert one.norm == pytest.approx(float(delta.norm()))
        assert one.spectral == pytest.approx(float(values[0]))
        assert one.effective == pytest.approx(
            float((-(shares * shares.log()).sum()).exp()), rel=1e-6
        )
    assert row(found, "model.layers.0.self_attn.q_proj").rank == 4
    assert row(found, "model.layers.1.self_attn.q_proj").rank == 2
    assert row(found, "model.layers.1.self_attn.q_proj").scale == 3.0
    assert found.facts["ranks"] == {"4": 2, "2": 1}
    assert found.facts["targets"] == {"q_proj": 2, "embed_tokens": 1}
    assert found.facts["parameters"] == sum(r.parameters for r in found.rows)
    said = "\n".join(lines(found))
    assert "targets: q_proj (2), embed_tokens (1)" in said
    assert "model.layers.1.self_attn.q_proj" in said
    assert "STRANGE" not in said
    assert len(lines(found, 1)) == len(lines(found)) - 1


def test_a_run_has_a_fingerprint(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    found = inspect(save_run(tmp_path / "run", base))
    assert found.facts["fingerprint"].startswith("bf16:")
    assert found.record["places"][0]["rank"] == 4
    assert (
        found.facts["bytes"] == (tmp_path / "run/adapter/adapter_model.safetensors").stat().st_size
    )


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def spoilt(tensors: dict[str, Tensor]) -> None:
    tensors[KEY.format("A")][0, 0] = float("nan")
    tensors[KEY.format("A")][1, 1] = float("inf")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoilt, r"q_proj.lora_A.weight: 1 NaN and 1 infinite of 64"),
        (lambda t: t[KEY.format("B")].zero_(), r"it changes nothing \(lora_B.weight all 0\)"),
        (lambda t: t.pop(KEY.format("B")), "half of a pair: lora_A.weight"),
        (
            lambda t: t.update({KEY.format("A"): t[KEY.format("A")][:3].clone()}),
            "do not fit each other",
        ),
        (
            lambda t: t.update({KEY.format("A"): t[KEY.format("A")].to(torch.int8)}),
            "torch.int8, no floating-point",
        ),
    ],
)
def test_strange_tensors(change: Any, says: str, tmp_path: Path) -> None:
    import re

    made_by_peft("llama", tmp_path, LORA, 0)
    assert inspect(tmp_path).every_strange == []
    edit_tensors(tmp_path, change)
    found = inspect(tmp_path)
    assert any(re.search(says, one) for one in found.every_strange), found.every_strange
    assert "STRANGE" in "\n".join(lines(found))
    assert found.record["strange"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 5}, "a rank in the file and in the configuration differ"),
        ({"use_qalora": True}, "afina would not load it: use_qalora"),
        ({"hocus": 1}, "an unknown setting"),
        ({"lora_alpha": "gone"}, "lora_alpha is missing"),
        ({"lora_alpha": "gone"}, "an alpha is no number"),
        ({"alpha_pattern": {"q_proj": "much"}}, "an alpha is no number"),
        ({"rank_pattern": {"(": 3}}, "patterns of ranks or alphas are none"),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_porj": 3}}, "'q_porj' is no place"),
        ({"target_modules": ["q_proj", "embed_tokens", "v_porj"]}, "'v_porj' is no place"),
        ({"rank_pattern": [3]}, "patterns of ranks or alphas are none"),
    ],
)
def test_strange_configurations(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    made_by_peft("llama", tmp_path, LORA, 0)
    edit_config(tmp_path, **change)
    assert any(says in one for one in inspect(tmp_path).every_strange)


OTHERS: dict[str, Any] = {
    "ADALORA": AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "PREFIX_TUNING": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "PROMPT_TUNING": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "DORA": LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_method_is_shown(kind: str, tmp_path: Path) -> None:
    """Those that PEFT has and afina may not: sizes and norms at least."""
    with battery.quiet():
        model: Any = get_peft_model(build("llama", torch.float32), OTHERS[kind])
        model.save_pretrained(str(tmp_path))
    edit_config(tmp_path, base_model_name_or_path="tiny/gone")
    found = inspect(tmp_path)
    assert found.facts["parameters"] > 0
    assert found.rows
    assert "\n".join(lines(found))
    if kind == "ADALORA":
        deltas = {
            n: m.get_delta_weight("default").detach()
            for n, m in model.named_modules()
            if hasattr(m, "get_delta_weight")
        }
        for name, delta in deltas.items():
            one = row(found, name.removeprefix("base_model.model."))
            assert one.norm == pytest.approx(float(delta.norm()), rel=1e-4, abs=1e-12)
    if kind == "DORA":
        assert row(found, "model.layers.0.self_attn.q_proj").tensors == (
            "lora_A.weight", "lora_B.weight", "lora_magnitude_vector",
        )  # fmt: skip


def test_a_picture(tmp_path: Path) -> None:
    made_by_peft("llama", tmp_path / "a", LORA, 0)
    found = inspect(tmp_path / "a")
    plot(found, tmp_path / "in/one.png")
    assert (tmp_path / "in/one.png").read_bytes().startswith(b"\x89PNG")
    plot(found, tmp_path / "one.svg")
    assert (
        "effective rank" in (tmp_path / "one.svg").read_text()
        or b"svg" in (tmp_path / "one.svg").read_bytes()
    )
    with pytest.raises(ConfigError, match="no picture of that form"):
        plot(found, tmp_path / "one.docx")
    with pytest.raises(AdapterError, match="no places to draw"):
        plot(replace(found, rows=()), tmp_path / "two.png")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "in", "one.svg"}


def test_what_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no run, checkpoint or adapter"):
        inspect(tmp_path / "nowhere")
    made_by_peft("llama", tmp_path, LORA, 0)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AdapterError, match="not there, or damaged"):
        inspect(tmp_path)
    weights.unlink()
    with pytest.raises(AdapterError, match="not there, or damaged"):
        inspect(tmp_path)


def test_an_adapter_of_several_techniques(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    model, _ = afina.load(base, dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=2), afina.PromptTuning(tokens=3)])
    files.save(edit, tmp_path / "a", base=str(base))
    found = inspect(tmp_path / "a")
    assert [part.method for part in found.parts] == ["lora", "prompt"]
    assert found.method == "lora + prompt"
    assert found.facts["parameters"] == sum(p.numel() for p in edit.trainable().values())
    assert len(found.every_row) == 15
    assert all("changes nothing" in one for one in found.every_strange)  # it never trained
    said = "\n".join(lines(found))
    assert f"{tmp_path}/a/lora: lora" in said
    assert f"{tmp_path}/a/prompt: prompt" in said
    plot(found, tmp_path / "a.png")
    drawn = lines_of(found)
    assert {len(rows) for name, rows in drawn.items() if name.startswith("lora: ")} == {2}
    assert list(drawn)[-1] == "prompt: prompt_embeddings"
    with pytest.raises(
        AdapterError, match=r"several techniques in one[^$]*name the one that is a sum"
    ):
        combine({tmp_path / "a": 1.0}, tmp_path / "c")
    combine({tmp_path / "a/lora": 1.0}, tmp_path / "c")
    with pytest.raises(AdapterError, match="is none"):
        combine({tmp_path / "a/prompt": 1.0}, tmp_path / "d")


def test_biases_are_at_the_modules_that_have_them(tmp_path: Path) -> None:
    model = battery.build("llama")
    edit = afina.apply(model, [afina.BitFit(modules_to_save=("lm_head",))])
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(1.0)
    files.save(edit, tmp_path / "a", base="tiny")
    found = inspect(tmp_path / "a")
    assert not found.strange
    assert row(found, "model.layers.0.self_attn.q_proj").tensors == ("bias",)
    assert row(found, "lm_head").tensors == ("weight",)


def test_experts_have_a_spectrum_for_each_of_their_tensors(tmp_path: Path) -> None:
    targets = ("q_proj", "experts")
    edit = afina.apply(battery.build("mixtral"), [afina.LoRA(rank=2, target=targets)])
    battery.train(edit.model, edit)
    before = {n: p.detach().clone() for n, p in edit.model.named_parameters() if "experts" in n}
    files.save(edit, tmp_path / "a", base="tiny")
    found = inspect(tmp_path / "a")
    edit.merge()
    changed = dict(edit.model.named_parameters())
    for own in ("gate_up_proj", "down_proj"):
        one = row(found, name := f"model.layers.1.mlp.experts.{own}")
        values = linalg.svdvals((changed[name] - before[name]).double())
        assert one.shape == tuple(before[name].shape)
        assert (one.rank, one.scale) == (2, 16.0)
        assert one.norm == pytest.approx(float(values.square().sum().sqrt()))
        assert one.spectral == pytest.approx(float(values.max()))
        assert one.effective is not None
        assert 1 < one.effective <= 2
    assert found.facts["targets"] == {"down_proj": 2, "gate_up_proj": 2, "q_proj": 2}
    assert not found.strange
    edit_config(tmp_path / "a", r=3)
    assert any("fused experts do not fit" in one for one in inspect(tmp_path / "a").strange)


def test_factors_count_by_what_they_change(tmp_path: Path) -> None:
    edit = afina.apply(battery.build("llama"), [afina.IA3(modules_to_save=("norm",))])
    files.save(edit, tmp_path / "a", base="tiny")
    assert sum("factors all 1" in one for one in inspect(tmp_path / "a").strange) == 6
    with torch.no_grad():
        for delta in edit.deltas.values():
            for parameter in delta.parameters():
                parameter.add_(0.5)
    files.save(edit, tmp_path / "a", base="tiny")
    found = inspect(tmp_path / "a")
    assert not found.strange
    assert row(found, "model.layers.0.mlp.down_proj").norm == pytest.approx(0.5 * 24**0.5)
    assert row(found, "model.norm").tensors == ("weight",)
