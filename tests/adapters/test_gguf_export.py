"""GGUF files of merged models, read back by our own loader: the same logits, tokens and template, or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import afina
from afina.adapters import export_gguf, export_tokens, files
from afina.adapters.export_gguf import export, interleaved, refuse_uncovered
from afina.adapters.merge import MergeSettings
from afina.errors import AdapterError, AfinaError, ConfigError, ModelError
from afina.models.gguf import convert
from afina.models.hub import load
from afina.table import apply
from afina.techniques.lora import LoRA
from tests.tiny import CHATML, tiny_gpt2

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the cat sat on the mat in 2024 and 2025", "o pão está quente às 7h30", "x = 12 * 34"]
TEXTS = [*CORPUS, "  two  spaces\n\tand a tab", "1234567", "<|im_start|>user\nhé<|im_end|>"]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
QUICK = MergeSettings(max_new_tokens=2, device="cpu")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))


def tokenizer_of(pre: str = "smollm") -> Any:
    """A small byte-level BPE with merges, whose words are split as one of the covered ways says."""
    backend = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = plain if pre == "gpt-2" else pre_tokenizers.Sequence([digits, plain])
    if pre in ("llama-bpe", "qwen2"):
        split, _ = export_tokens.PRE[pre]
        words = pre_tokenizers.Split(Regex(split["pattern"]["Regex"]), "isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, rest])
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    return tokenizer


def model_of(kind: str, *, rows: int = 320, **changes: Any) -> Any:
    torch.manual_seed(0)
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "mistral": (MistralForCausalLM, MistralConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }
    made, config = kinds[kind]
    own = {"sliding_window": None} if kind == "mistral" else {}
    model = made(config(**(SIZES | own | {"vocab_size": rows} | changes))).eval()
    with torch.no_grad():  # biases, which start at zero
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def folder_of(path: Path, model: Any, tokenizer: Any = None) -> Path:
    model.to(torch.float32).save_pretrained(path)
    (tokenizer or tokenizer_of()).save_pretrained(path)
    return path


def again(file: Path, out: Path) -> tuple[Any, Any]:
    """What our loader reads from a GGUF file."""
    out.mkdir()
    convert(file, out)
    return load(out, "fp32", "cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 70, 33, 222, 9, 4, 101, 5]])).logits


CASES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with unused rows": {"rows": 352},
    "llama with wide heads": {"head_dim": 32},
    "llama with another rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "mistral": {},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip(name: str, tmp_path: Path) -> None:
    model, tokenizer = model_of(name.split()[0], **CASES[name]), tokenizer_of()
    base = folder_of(tmp_path / "base", model, tokenizer)
    export(base, tmp_path / "m.gguf", "F32")
    back, read = again(tmp_path / "m.gguf", tmp_path / "again")
    assert torch.equal(logits(back), logits(model))
    tokenizer = load(base, "fp32", "cpu")[
        1
    ]  # Transformers gives a Qwen2 model Qwen2's own way to split
    for text in TEXTS:
        ids = [t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, read)]
        assert ids[0] == ids[1]
    assert read.chat_template == CHATML
    assert (read.bos_token, read.eos_token) == (SPECIAL[0], SPECIAL[2])


def test_a_name_that_transformers_mistakes(tmp_path: Path) -> None:
    model = model_of("llama")
    base = folder_of(tmp_path / "base", model)
    export(base, tmp_path / "mistral.gguf", "F32")
    back, _ = again(tmp_path / "mistral.gguf", tmp_path / "again")
    assert type(back) is LlamaForCausalLM
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize("pre", list(export_tokens.PRE))
def test_the_ways_to_split_text(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(pre)
    base = folder_of(tmp_path / "base", model_of("llama"), tokenizer)
    export(base, tmp_path / "m.gguf", "F32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("tokenizer.ggml.pre").contents() == pre
    _, read = again(tmp_path / "m.gguf", tmp_path / "again")
    for text in TEXTS:
        ids = [t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, read)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("F16", 1e-5, 2e-3), ("BF16", 1e-4, 2e-2), ("Q8_0", 1e-4, 3e-2)]
)
def test_formats(dtype: str, least: float, most: float, tmp_path: Path) -> None:
    model = model_of("llama")
    base = folder_of(tmp_path / "base", model)
    export(base, tmp_path / "m.gguf", dtype)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == dtype
    back, _ = again(tmp_path / "m.gguf", tmp_path / "again")
    error = float((logits(back) - logits(model)).norm() / logits(model).norm())
    assert least < error < most


def test_a_row_that_blocks_do_not_divide_is_fp16_in_q8(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", model_of("llama", intermediate_size=80))
    export(base, tmp_path / "m.gguf", "Q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_interleaving_by_hand() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four rows
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_without_the_interleaving_the_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = folder_of(tmp_path / "base", model_of("llama"))
    monkeypatch.setattr(export_gguf, "interleaved", lambda weight, heads: weight)
    out = tmp_path / "m.gguf"
    with pytest.raises(AdapterError, match="NOT VERIFIED"):
        afina.merge(base, out, settings=QUICK)
    assert json.loads((tmp_path / "m.gguf.merge.json").read_text())["verified"] is False


def adapter_of(path: Path, base: Path) -> Path:
    model, tokenizer = load(base, "fp32", "cpu")
    edit = apply(model, [LoRA(rank=4)])
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return files.save(edit, path, base=str(base), tokenizer=tokenizer)


@pytest.mark.parametrize("dtype", [None, "fp16", "q8_0"])
def test_a_run_becomes_a_file(dtype: str | None, tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", model_of("llama"))
    adapter = adapter_of(tmp_path / "adapter", base)
    out = tmp_path / "out" / "m.gguf"
    merged = afina.merge(adapter, out, settings=QUICK.model_copy(update={"dtype": dtype}))
    assert merged.verified
    assert merged.record["dtype"] == {None: "F32", "fp16": "F16", "q8_0": "Q8_0"}[dtype]
    assert {path.name for path in out.parent.iterdir()} == {"m.gguf", "m.gguf.merge.json"}
    model, _ = load(base, "fp32", "cpu")
    files.load(model, adapter)
    wanted, got = logits(model), logits(load(out, "fp32", "cpu")[0])
    limit = {None: 1e-5, "fp16": 3e-3, "q8_0": 3e-2}[dtype]
    assert (got - wanted).norm() < limit * wanted.norm()
    with pytest.raises(ConfigError, match="the output exists"):
        afina.merge(adapter, out, settings=QUICK)
    again = QUICK.model_copy(update={"verify": False, "overwrite": True})
    assert afina.merge(adapter, out, settings=again).record["verified"] is None
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="take the place of what it is made from"):
        afina.merge(adapter, out, base=out, settings=again)
    assert out.read_bytes() == before


def test_a_gguf_base_is_unpacked_and_merged_into(tmp_path: Path) -> None:
    """The adapter was trained beside the unpacked weights of a quantised file, and those are what it is merged into."""
    folder = folder_of(tmp_path / "base", model_of("llama"))
    base = tmp_path / "base.gguf"
    export(folder, base, "Q8_0")
    adapter = adapter_of(tmp_path / "adapter", base)
    merged = afina.merge(adapter, tmp_path / "out", settings=QUICK)
    assert merged.verified
    model, _ = load(base, "fp32", "cpu")
    files.load(model, adapter)
    wanted, got = logits(model), logits(load(tmp_path / "out", "fp32", "cpu")[0])
    assert (got - wanted).norm() < 1e-5 * wanted.norm()


def test_an_unverified_file_says_so_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = folder_of(tmp_path / "base", model_of("llama"))
    for verify, file in ((False, tmp_path / "not.gguf"), (True, tmp_path / "yes.gguf")):
        afina.merge(base, file, settings=QUICK.model_copy(update={"verify": verify}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(file, "fp32", "cpu")
        assert ("was not verified" in caplog.text) is not verify


def refused(says: str, model: Path) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        refuse_uncovered(model, model)
    assert "wanted:" in str(caught.value)
    with pytest.raises(AfinaError, match=says):
        afina.merge(model, model.parent / "m.gguf", settings=QUICK)
    assert not list(model.parent.glob("*.gguf"))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "a rotation that is scaled",
        ),
        ("llama", {"attention_bias": True}, "biases"),
        ("llama", {"hidden_act": "gelu"}, "another activation"),
        ("mistral", {"sliding_window": 64}, "a sliding window"),
    ],
)
def test_what_is_not_plain_is_refused(
    kind: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    base = folder_of(tmp_path / "base", model_of(kind, **changes))
    with pytest.raises(ModelError) as caught:
        refuse_uncovered(base, base)
    assert says in str(caught.value)
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM" in str(caught.value)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    refused("cannot be written as GGUF", folder_of(tmp_path / "base", tiny_gpt2()))


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    refused("this tokenizer", folder_of(tmp_path / "base", model_of("llama"), tokenizer))


def test_fp16_that_overflows_is_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    base = folder_of(tmp_path / "base", model)
    with np.errstate(over="ignore"), pytest.raises(ModelError, match="fp16 does not hold"):
        export(base, tmp_path / "m.gguf", "F16")


@pytest.mark.slow
def test_smollm2_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFINA_CACHE")
    source = afina.load  # the demo model, from the user's own cache
    model, tokenizer = source("smollm2-135m", dtype="fp32", device="cpu")
    wanted = logits(model)
    texts = {text: tokenizer(text)["input_ids"] for text in TEXTS}
    del model
    merged = afina.merge("smollm2-135m", tmp_path / "m.gguf", settings=MergeSettings(verify=False))
    assert merged.record["dtype"] == "F32"
    back, read = again(tmp_path / "m.gguf", tmp_path / "again")
    assert torch.equal(logits(back), wanted)
    assert {text: read(text)["input_ids"] for text in texts} == texts
    assert read.chat_template == tokenizer.chat_template
