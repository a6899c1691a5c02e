"""Merging on disk: what the folder holds, that it says what base and adapter say, and what is refused."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertForMaskedLM, BertModel

import afina
from afina.adapters import (
    files,
    merge_changes,
    merge_check,
    merge_files,
    merge_job,
    merge_plan,
)
from afina.adapters.fingerprint import base_fingerprint
from afina.adapters.merge import Merged, MergeSettings, merge_unchecked
from afina.adapters.merge_shards import Stored, read_shards
from afina.errors import AdapterError, AfinaError, ConfigError, DataError, ModelError
from afina.models import hub
from afina.table import apply
from afina.techniques.lora import LoRA, LoRADelta
from afina.tree.fold import fold
from tests import battery
from tests.tiny import byte_tokenizer, save_model, tiny_gpt2, tiny_llama

IDS = torch.tensor([[1, 70, 33, 222, 9, 4, 101, 5]])
QUICK = MergeSettings(max_new_tokens=0, device="cpu")
UNCHECKED = MergeSettings(verify=False)


def folder_of(path: Path, model: Any, dtype: torch.dtype, **saving: Any) -> Path:
    """A base's folder in that dtype."""
    model.to(dtype).save_pretrained(path, **saving)
    byte_tokenizer().save_pretrained(path)
    return path


def adapter_of(
    path: Path, base: Path, lora: LoRA, *, size: float = 0.05, chat: bool = True
) -> Path:
    """A LoRA of random values on the model in `base`."""
    model, _ = afina.load(base, dtype="fp32", device="cpu")
    edit = apply(model, [lora])
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * size)
    tokenizer = byte_tokenizer(chat=chat)
    return files.save(edit, path, base=str(base), tokenizer=tokenizer)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def merge(
    source: Path, out: Path, *, settings: MergeSettings = UNCHECKED, **options: Any
) -> Merged:
    """A merge; where the settings ask for the check, on two short texts."""
    return afina.merge(
        source, out, settings=settings, **({"prompts": ["one", "and two"]} | options)
    )


def loaded(path: Path) -> Any:
    return afina.load(path, dtype="fp32", device="cpu")[0]


def unmerged(base: Path, adapter: Path) -> torch.Tensor:
    model = loaded(base)
    files.load(model, adapter)
    return logits(model.eval())


def headers(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {s.name: (s.dtype, s.shape) for file in read_shards(path).values() for s in file}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "base", tiny_llama(initializer_range=0.2), torch.bfloat16)


# --- what is written ------------------------------------------------------------------------------------------------


def test_weights_are_base_plus_change_rounded_once(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    merged = merge(adapter, tmp_path / "out", settings=QUICK)
    assert merged.verified
    before, after = (
        load_file(base / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert headers(base) == headers(tmp_path / "out")
    model = loaded(base)
    deltas = files.load(model, adapter).deltas
    for name, weight in before.items():
        delta = deltas.get(name.removesuffix(".weight") + ".lora")
        if delta is None:
            assert torch.equal(after[name], weight)
            continue
        assert torch.equal(after[name], (weight.float() + delta.weight_delta()).bfloat16())
        assert not torch.equal(after[name], weight)
    assert set(merged.record["rounding"]) == {n.removesuffix(".lora") + ".weight" for n in deltas}
    assert all(0 < share < 0.1 for share in merged.record["rounding"].values())
    assert list(merged.record["rounding"].values()) == sorted(
        merged.record["rounding"].values(), reverse=True
    )


def test_every_thing_that_goes_with_it(base: Path, tmp_path: Path) -> None:
    """The adapter's own tokenizer and template, the base's generation settings and licence; no code, no records."""
    (base / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    (base / "LICENSE").write_text("do as you like")
    (base / "afina.json").write_text("{}")
    (base / "modeling.py").write_text("raise SystemExit")
    own = byte_tokenizer()
    own.chat_template = own.chat_template.replace("assistant", "helper")
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    own.save_pretrained(adapter)
    out = tmp_path / "out"
    merge(adapter, out, settings=QUICK)
    names = {path.name for path in out.iterdir()}
    assert {
        "generation_config.json",
        "LICENSE",
        "merge.json",
        "tokenizer.json",
        "config.json",
    } <= names
    assert not names & {
        "modeling.py",
        "afina.json",
        "adapter_config.json",
        "README.md",
        "UNVERIFIED.md",
    }
    assert (out / "generation_config.json").read_text() == (
        base / "generation_config.json"
    ).read_text()
    model, tokenizer = afina.load(out, dtype="fp32", device="cpu")
    assert model.generation_config.temperature == 0.3
    assert "helper" in tokenizer.chat_template
    record = json.loads((out / "merge.json").read_text())
    assert record["verified"] is True
    assert record["base"]["name"] == str(base)
    recorded = json.loads((adapter / "afina.json").read_text())["base"]["fingerprint"]
    assert record["base"]["fingerprint"] == recorded


def test_a_template_less_tokenizer_brings_none_of_the_bases(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4), chat=False)
    merge(adapter, tmp_path / "out")
    assert afina.load(tmp_path / "out", device="cpu")[1].chat_template is None
    assert afina.load(base, device="cpu")[1].chat_template is not None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_another_dtype(base: Path, tmp_path: Path, dtype: str) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    settings = QUICK.model_copy(update={"dtype": dtype})
    merged = merge(adapter, tmp_path / "out", settings=settings)
    spelt = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[dtype]
    assert {kind for kind, _ in headers(tmp_path / "out").values()} == {spelt}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[dtype]
    drift = merged.verdict.drift.relative
    assert drift < {"fp32": 1e-5, "fp16": 3e-3, "bf16": 3e-2}[dtype]
    assert (drift > 1e-4) == (dtype != "fp32")


def test_shards_stay_shards(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", tiny_llama(), torch.float32, max_shard_size="20KB")
    assert len(read_shards(base)) > 4
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    merge(adapter, tmp_path / "out")
    for file, stored in read_shards(base).items():
        assert [s.name for s in read_shards(tmp_path / "out")[file]] == [s.name for s in stored]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    wanted = json.loads((base / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == wanted["weight_map"]
    assert index["metadata"]["total_size"] == wanted["metadata"]["total_size"]
    assert torch.allclose(logits(loaded(tmp_path / "out")), unmerged(base, adapter), atol=1e-3)


CASES: dict[str, tuple[Any, LoRA]] = {
    "conv1d": (tiny_gpt2, LoRA(rank=4)),
    "embedding": (tiny_llama, LoRA(rank=3, target=("embed_tokens", "q_proj"))),
    "head": (tiny_llama, LoRA(rank=3, target=("lm_head", "q_proj"))),
    "rslora": (tiny_llama, LoRA(rank=4, alpha=4, rslora=True)),
    "patterns": (
        tiny_llama,
        LoRA(rank=4, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 7.5}),
    ),
    "whole modules": (tiny_llama, LoRA(rank=4, modules_to_save=("lm_head", "norm"))),
    "a whole tied pair": (
        lambda: tiny_llama(tie_word_embeddings=True),
        LoRA(rank=4, modules_to_save=("embed_tokens",)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_says_what_base_and_adapter_say(name: str, tmp_path: Path) -> None:
    build, lora = CASES[name]
    base = folder_of(tmp_path / "base", build(), torch.float32)
    adapter = adapter_of(tmp_path / "adapter", base, lora)
    merged = merge(adapter, tmp_path / "out")
    wanted = unmerged(base, adapter)
    got = logits(loaded(tmp_path / "out"))
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert (wanted - logits(loaded(base))).norm() > 1e-2 * wanted.norm()
    assert merged.record["untied"] == []
    assert bool(merged.record["whole"]) == bool(lora.modules_to_save)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (
        config["tie_word_embeddings"]
        == json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    )


@pytest.mark.parametrize("target", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens")])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tied_pair_is_parted(kind: str, target: tuple[str, ...], tmp_path: Path) -> None:
    made = tiny_llama(tie_word_embeddings=True) if kind == "llama" else tiny_gpt2()
    names = {"embed_tokens": "wte"} if kind == "gpt2" else {}
    base = folder_of(tmp_path / "base", made, torch.float32)
    lora = LoRA(rank=3, target=tuple(names.get(t, t) for t in target))
    adapter = adapter_of(tmp_path / "adapter", base, lora)
    merged = merge(adapter, tmp_path / "out")
    assert len(merged.record["untied"]) == 2
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    wanted = unmerged(base, adapter)
    for again in (
        loaded(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval(),
    ):
        got = logits(again)
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        ends = again.get_input_embeddings().weight, again.get_output_embeddings().weight
        assert not torch.equal(*ends)


def test_ties_that_nothing_parts_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    battery.build("bert", torch.float32).save_pretrained(base)
    model = hub.skeleton(base)
    # An encoder is loaded without its head, so the pair is met only where the head is wanted too.
    assert merge_plan.tied_groups(model) == []
    config = battery.build("bert").config
    with torch.device("meta"):
        whole = BertForMaskedLM(config)
    edit = apply(battery.build("bert"), [LoRA(rank=3, target=("word_embeddings",))])
    found = merge_changes.changes(whole, edit.techniques, files.peft_tensors(edit))
    with pytest.raises(AdapterError, match="cannot be merged"):
        merge_plan.make_plan(whole, read_shards(base), found)


def test_experts_in_pieces_are_copied_and_the_rest_is_merged(tmp_path: Path) -> None:
    """Files keep each expert apart, the model has them fused: nothing of them is touched, and all is compared."""
    model = battery.build("mixtral", torch.float32)
    model.resize_token_embeddings(260)
    base = folder_of(tmp_path / "base", model, torch.float32)
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=2, target=("q_proj", "v_proj")))
    merged = merge(adapter, tmp_path / "out")
    assert merged.record["base"]["fingerprint"] == base_fingerprint(model)
    before, after = (
        load_file(base / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if "q_proj" in n or "v_proj" in n}
    with torch.no_grad():
        for parameter in model.model.layers[1].mlp.experts.parameters():
            parameter.neg_()
    other = folder_of(tmp_path / "other", model, torch.float32)
    refused(AdapterError, "made for another base", adapter, tmp_path / "no", base=other)


def test_an_encoder(tmp_path: Path) -> None:
    """No logits: states are compared, and nothing is answered."""
    torch.manual_seed(0)
    config = battery.build("bert").config
    config.vocab_size = 260
    base = folder_of(tmp_path / "base", BertModel(config), torch.float32)
    adapter = adapter_of(
        tmp_path / "adapter", base, LoRA(rank=4, target=("query", "word_embeddings"))
    )
    merged = merge(adapter, tmp_path / "out", settings=QUICK)
    assert merged.verified
    assert merged.verdict.drift.kl_mean is None
    assert 0 < merged.verdict.drift.relative < 1e-5 < merged.verdict.effect.relative


def test_the_merged_model_has_the_bases_modules_and_no_more(base: Path, tmp_path: Path) -> None:
    """No overhead is left: not one module, hook or parameter that the base has not."""
    merge(adapter_of(tmp_path / "adapter", base, LoRA(rank=4)), tmp_path / "out")
    one, other = loaded(base), loaded(tmp_path / "out")
    trees = [[(n, type(m)) for n, m in model.named_modules()] for model in (one, other)]
    assert trees[0] == trees[1]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
    shapes = [[(n, p.shape) for n, p in model.named_parameters()] for model in (one, other)]
    assert shapes[0] == shapes[1]


# --- memory ---------------------------------------------------------------------------------------------------------


def test_one_tensor_at_a_time(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: no weight of the base is still alive when the next one is read."""
    import weakref

    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    alive: list[Any] = []
    most = 0
    read = Stored.read

    def counted(self: Stored) -> torch.Tensor:
        nonlocal most
        tensor = read(self)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(Stored, "read", counted)
    out = tmp_path / "out"
    out.mkdir()
    merge_files.write_merged(base, adapter, out, dtype=None, tokenizer=base)
    assert (
        len(alive) == 14
    )  # the folded ones; of the others only some values are looked at, where they lie
    assert most == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's peak of a process"
)
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The peak of a process that merges into 4 blocks, and then into 16: 50 MB more."""
    for blocks in (4, 16):
        base = tmp_path / f"base{blocks}"
        wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": blocks}
        folder_of(base, tiny_llama(**wide), torch.float32)
        adapter_of(tmp_path / f"adapter{blocks}", base, LoRA(rank=1, target=("down_proj",)))
    code = """
        import sys
        from pathlib import Path
        from afina.adapters import merge_files
        for blocks in (4, 16):
            base, adapter, out = (Path(sys.argv[1]) / f"{what}{blocks}" for what in ("base", "adapter", "out"))
            out.mkdir()
            merge_files.write_merged(base, adapter, out, dtype=None, tokenizer=base)
            lines = Path("/proc/self/status").read_text().splitlines()
            print(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    small, large = (int(kilobytes) * 1024 for kilobytes in done.stdout.split())
    sizes = [(tmp_path / f"out{blocks}/model.safetensors").stat().st_size for blocks in (4, 16)]
    assert sizes[1] - sizes[0] > 45e6
    assert large - small < 0.2 * (sizes[1] - sizes[0])


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """A real, tied model from a GGUF file: rounding to bf16 stays far below what is allowed."""
    model, tokenizer = afina.load("smollm2-135m", dtype="fp32", device="cpu")
    edit = apply(model, [LoRA(rank=8)])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in edit.trainable().items():
            if name.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
    adapter = files.save(edit, tmp_path / "adapter", base="smollm2-135m", tokenizer=tokenizer)
    del model, edit
    settings = MergeSettings(dtype="bf16", max_new_tokens=3, device="cpu")
    merged = merge(adapter, tmp_path / "out", settings=settings)
    assert merged.verified
    assert len(merged.record["rounding"]) == 210
    assert 1e-3 < merged.verdict.drift.relative < merged.verdict.limit / 3
    assert merged.verdict.effect.relative > 5 * merged.verdict.drift.relative
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in headers(tmp_path / "out")


# --- the check ------------------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Breaks the folding that a merge uses."""
    monkeypatch.setattr(merge_plan, "fold", how)


def check_fails(base: Path, tmp_path: Path, says: str) -> Merged:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    out = tmp_path / "out"
    with pytest.raises(AdapterError, match=says) as caught:
        merge(adapter, out, settings=QUICK)
    assert "NOT VERIFIED" in str(caught.value)
    assert caught.value.exit_code == 6
    assert json.loads((out / "merge.json").read_text())["verified"] is False
    assert "Not verified" in (out / "UNVERIFIED.md").read_text()
    shutil.rmtree(out)
    return merge_unchecked(adapter, out, settings=QUICK, prompts=["one", "and two"])


def test_a_lost_adapter_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda weight, change, **_: (weight, 0.0))
    merged = check_fails(base, tmp_path, "equals the base: the adapter is lost")
    assert merged.verdict.rest.largest == 0


def test_a_wrong_scale_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda weight, deltas, **rest: fold(weight, [*deltas, *deltas], **rest))
    merged = check_fails(base, tmp_path, "of their size from base")
    assert merged.verdict.drift.relative > 10 * merged.verdict.limit / 3


def test_a_transposed_change_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LoRADelta.weight_delta

    def wrong(self: LoRADelta) -> torch.Tensor:
        change = right(self)
        square = change.shape[0] == change.shape[1]
        return change.t().contiguous() if square else change

    monkeypatch.setattr(LoRADelta, "weight_delta", wrong)
    check_fails(base, tmp_path, "of their size from base")


def test_another_tokenizer_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = merge_files.copy_beside

    def wrong(base: Path, out: Path, tokenizer: Path) -> None:
        copied(base, out, tokenizer)
        (out / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    monkeypatch.setattr(merge_files, "copy_beside", wrong)
    check_fails(base, tmp_path, "its chat template is another one")


def test_the_limit_can_be_set(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    strict = QUICK.model_copy(update={"tolerance": 1e-6})
    with pytest.raises(AdapterError, match=r"at most 1\.00e-06"):
        merge(adapter, tmp_path / "out", settings=strict)


def test_without_a_check_it_says_so(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    settings = QUICK.model_copy(update={"verify": False})
    merged = merge(adapter, tmp_path / "out", settings=settings)
    assert merged.verdict is None
    assert not merged.verified
    assert merged.record["verified"] is None
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path / "out")
    assert "was not verified" in caplog.text
    caplog.clear()
    merge(adapter, tmp_path / "good", settings=QUICK)
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path / "good")
    assert caplog.text == ""


def test_an_adapter_without_effect_is_told_from_a_lost_one(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    adapter = tmp_path / "adapter"
    files.save(apply(model, [LoRA(rank=4)]), adapter, base=str(base), tokenizer=byte_tokenizer())
    merged = merge(adapter, tmp_path / "out", settings=QUICK)
    assert merged.verified
    assert merged.verdict.notes == ("the adapter changes nothing on these texts",)
    assert headers(base) == headers(tmp_path / "out")


def test_a_change_that_rounding_swallows_is_not_verified(base: Path, tmp_path: Path) -> None:
    """Far below bf16's steps: nearly nothing of it arrives, which a difference alone would not tell."""
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4), size=2e-4)
    with pytest.raises(AdapterError, match="of what the adapter changes"):
        merge(adapter, tmp_path / "out", settings=QUICK)
    wide = QUICK.model_copy(update={"dtype": "fp32"})
    assert merge(adapter, tmp_path / "wide", settings=wide).verified


def test_the_users_prompts_are_used(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    answering = MergeSettings(max_new_tokens=3, device="cpu", dtype="fp32")
    prompts = ["one", [{"role": "user", "content": "two"}]]
    merged = merge(adapter, tmp_path / "out", prompts=prompts, settings=answering)
    assert merged.verdict.texts == "2 given prompts"
    assert (merged.verdict.drift.answers_equal, merged.verdict.drift.answers) == (2, 2)


# --- refused, and nothing lost --------------------------------------------------------------------------------------


def refused(kind: type[AfinaError], says: str, source: Path, out: Path, **options: Any) -> None:
    before = {p: p.stat().st_mtime_ns for p in out.parent.rglob("*")}
    with pytest.raises(kind, match=says):
        merge(source, out, **options)
    after = {p: p.stat().st_mtime_ns for p in out.parent.rglob("*")}
    assert {p: t for p, t in after.items() if p.is_file()} == {
        p: t for p, t in before.items() if p.is_file()
    }
    assert set(after) == set(before)


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    other = folder_of(tmp_path / "other", tiny_llama(seed=1), torch.bfloat16)
    for verify in (True, False):
        settings = QUICK.model_copy(update={"verify": verify})
        refused(
            AdapterError, "made for another base", adapter, tmp_path / "out",
            base=other, settings=settings,
        )  # fmt: skip


def test_a_quantised_base_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    refused(ModelError, "quantised base", adapter, tmp_path / "out")


def test_what_is_there_is_never_overwritten_unasked(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    out = tmp_path / "out"
    merge(adapter, out)
    refused(ConfigError, "the output exists", adapter, out)
    again = UNCHECKED.model_copy(update={"overwrite": True})
    refused(ConfigError, "not a merged model", adapter, base, settings=again)
    stamp = (out / "model.safetensors").stat().st_ino
    merge(adapter, out, settings=again)
    assert (out / "model.safetensors").stat().st_ino != stamp


def test_a_failure_on_the_way_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    calls = 0

    def fails(weight: torch.Tensor, deltas: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise AdapterError("half-way")
        return fold(weight, deltas, **rest)

    spoil(monkeypatch, fails)
    refused(AdapterError, "half-way", adapter, tmp_path / "out")
    calls = 0
    with pytest.raises(AdapterError, match="half-way"):
        merge(adapter, tmp_path / "new" / "deep" / "out")
    assert not (tmp_path / "new").exists()


def test_no_space(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(merge_files.shutil, "disk_usage", lambda _: real._replace(free=1000))
    refused(ModelError, "no space", adapter, tmp_path / "out")


def test_nothing_to_merge(base: Path, tmp_path: Path) -> None:
    refused(AdapterError, "a model, without an adapter", base, tmp_path / "out")
    refused(AdapterError, "no run, checkpoint or adapter", tmp_path / "typo", tmp_path / "out")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {base}\ndata: train.jsonl\n")
    shutil.copytree(base, run / "model")
    refused(AdapterError, "its model is whole", run, tmp_path / "out")


def test_a_damaged_base_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(ModelError, "damaged", adapter, tmp_path / "out")


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", tiny_llama(), torch.float32, max_shard_size="50KB")
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    next(base.glob("model-00002*")).unlink()
    refused(ModelError, "a file of weights is missing", adapter, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["int8", "q8_0"])
def test_formats_that_a_folder_has_not(base: Path, tmp_path: Path, dtype: str) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    settings = QUICK.model_copy(update={"dtype": dtype})
    refused(ConfigError, "dtype|q8_0", adapter, tmp_path / "out", settings=settings)


def test_fp16_that_overflows_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] = 1e6
    base = folder_of(tmp_path / "base", model, torch.float32)
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    settings = QUICK.model_copy(update={"dtype": "fp16"})
    refused(AdapterError, "F16 does not hold", adapter, tmp_path / "out", settings=settings)


def test_a_base_that_is_gone(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    shutil.move(base, tmp_path / "moved")
    refused(ModelError, "--base MODEL", adapter, tmp_path / "out")
    wanted = headers(tmp_path / "moved")
    merge(adapter, tmp_path / "out", base=tmp_path / "moved")
    assert headers(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"prompts": "one text"}, DataError, "prompts are a list"),
        ({"prompts": [""]}, DataError, "has no tokens"),
        ({"settings": MergeSettings(compute_dtype="int3")}, ConfigError, "unknown dtype"),
        ({"settings": MergeSettings(device="cuda:99")}, ModelError, "device"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    options: dict[str, Any], kind: type[AfinaError], says: str, base: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_job, "write_merged", None)  # it would be called
        refused(kind, says, adapter, tmp_path / "out", **options)


def test_a_full_disk_is_one_clear_error(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    monkeypatch.setattr(merge_files, "write_shard", full)
    refused(AdapterError, "No space left on device", adapter, tmp_path / "out")


def test_who_came_meanwhile_is_not_overwritten(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, out = adapter_of(tmp_path / "adapter", base, LoRA(rank=4)), tmp_path / "out"
    written = merge_job.write_merged

    def slow(*args: Any, **options: Any) -> Any:
        out.mkdir()
        (out / "theirs").write_text("another process")
        return written(*args, **options)

    monkeypatch.setattr(merge_job, "write_merged", slow)
    with pytest.raises(ConfigError, match="the output exists"):
        merge(adapter, out)
    assert [path.name for path in out.iterdir()] == ["theirs"]


# --- beside PEFT ----------------------------------------------------------------------------------------------------


def test_equal_to_peft_where_it_rounds_once(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    merge(adapter, tmp_path / "out")
    with battery.quiet():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        peer: Any = PeftModel.from_pretrained(model, adapter)
        twin = copy.deepcopy(peer)
        plain = dict(peer.merge_and_unload().named_parameters())
        safe = dict(twin.merge_and_unload(safe_merge=True).named_parameters())
    ours = load_file(tmp_path / "out/model.safetensors")
    assert set(ours) == set(plain)
    folded = [name for name in ours if "proj" in name]
    assert len(folded) == 14
    unequal = [float((ours[n] != plain[n]).float().mean()) for n in ours]
    # Sums of products in another order move a few weights that lie half-way between two numbers of bf16.
    assert max(unequal) < 0.01
    twice = [float((ours[n] != safe[n]).float().mean()) for n in folded]
    assert min(twice) > 0.02


def test_an_adapter_that_peft_made(base: Path, tmp_path: Path) -> None:
    with battery.quiet():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_rslora=True)
        peer: Any = get_peft_model(model, config)
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in peer.named_parameters():
                if "lora_B" in key:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
        peer.base_model.model.config._name_or_path = str(base)
        peer.peft_config["default"].base_model_name_or_path = str(base)
        peer.eval().save_pretrained(tmp_path / "peer")
    wanted = logits(peer)
    merge(
        tmp_path / "peer", tmp_path / "out", settings=UNCHECKED.model_copy(update={"dtype": "fp32"})
    )
    got = logits(loaded(tmp_path / "out"))
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


# --- the measures ---------------------------------------------------------------------------------------------------


def seen(*outputs: torch.Tensor, answers: tuple[str, ...] | None = None) -> merge_check.Seen:
    return merge_check.Seen(outputs, answers, logits=True)


def test_measures_of_a_known_difference() -> None:
    one = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    other = torch.tensor([[1.0, 3.0], [4.0, 2.0]])
    found = merge_check.difference(seen(one, answers=("a", "b")), seen(other, answers=("a", "c")))
    assert found.largest == 4
    assert found.mean == 1
    # Centred: the difference is (2, -2), the logits ±1 twice.
    assert found.relative == pytest.approx((8 / 4) ** 0.5)
    p = torch.tensor([0.0, 2.0]).double().softmax(0)
    q = torch.tensor([4.0, 2.0]).double().softmax(0)
    kl = float((p * (p / q).log()).sum())
    assert found.kl_largest == pytest.approx(kl)
    assert found.kl_mean == pytest.approx(kl / 2)
    assert found.top1 == 0.5
    assert (found.answers_equal, found.answers) == (1, 2)


def test_a_shift_of_all_logits_is_no_difference() -> None:
    one = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).double()
    found = merge_check.difference(seen(one), seen(one + 5))
    assert found.relative < 1e-14
    assert found.kl_mean < 1e-14
    assert found.top1 == 1


def test_the_limit_follows_format_and_depth() -> None:
    limits = [merge_check.tolerance(merge_check.roundoff(d), 16) for d in ("BF16", "F16", "F32")]
    assert limits == [4 * 2.0**-8, 4 * 2.0**-11, 1e-4]
    assert merge_check.tolerance(2.0**-8, 64) == 2 * limits[0]


def test_the_file_is_safetensors_as_the_library_reads_it(base: Path, tmp_path: Path) -> None:
    merge(adapter_of(tmp_path / "adapter", base, LoRA(rank=4)), tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16


def test_saved_while_merged_is_the_same_adapter(base: Path, tmp_path: Path) -> None:
    """The record's fingerprint is of the base, not of what was folded into it."""
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    model = loaded(base)
    edit = files.load(model, adapter)
    plain = files.save(edit, tmp_path / "plain", base=str(base))
    edit.merge()
    folded = files.save(edit, tmp_path / "folded", base=str(base))
    for name in ("adapter_model.safetensors", "adapter_config.json", "afina.json"):
        assert (plain / name).read_bytes() == (folded / name).read_bytes()
    with pytest.raises(AdapterError, match="another base"):
        files.load(copy.deepcopy(model), adapter)  # onto weights with the change in them already


def test_a_base_of_the_save_model_helper(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    adapter = adapter_of(tmp_path / "adapter", base, LoRA(rank=4))
    assert merge(adapter, tmp_path / "out", settings=QUICK).verified
