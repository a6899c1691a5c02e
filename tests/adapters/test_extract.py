"""A LoRA of the difference of two models: exact at full rank, the best below, and nothing silently dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import afina
from afina.adapters import extract as module
from afina.adapters.extract import ExtractSettings, extract
from afina.errors import AdapterError, ConfigError, ModelError
from tests.adapters.kit import CONFIG, RECORD, WEIGHTS
from tests.adapters.test_combine import error
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_gpt2, tiny_llama

linalg: Any = torch.linalg  # it has no types
IDS = torch.arange(24)[None]
FULL = ExtractSettings(energy=1)


def moved(model: Any, *parts: str, rank: int | None = None, seed: int = 5) -> Any:
    """The model with every tensor changed whose name has one of these parts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                change = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if rank is not None and parameter.dim() == 2:
                    inner = torch.randn(
                        rank, parameter.shape[1], generator=generator, dtype=torch.float64
                    )
                    change = change[:, :rank] @ inner
                parameter.add_(0.1 * change.to(parameter.dtype))
    return model


def logits(folder: Path, adapter: Path | None = None) -> Tensor:
    model, _ = afina.load(folder, dtype="fp32", device="cpu")
    if adapter is not None:
        edit = afina.load_adapter(model, adapter)
        assert "its base is this model, by fingerprint" in edit.notes
    with torch.no_grad():
        return model(IDS).logits


Build = Callable[..., Any]


def pair(tmp_path: Path, build: Build, *parts: str, **options: Any) -> tuple[Path, Path]:
    """The folders of a tuned model and its base."""
    base = save_model(tmp_path / "base", build(), byte_tokenizer())
    return save_model(tmp_path / "tuned", moved(build(), *parts, **options), byte_tokenizer()), base


def small_llama(**changes: Any) -> Any:
    return tiny_llama(initializer_range=0.2, **changes)


def test_at_full_rank_it_is_the_tuned_model(tmp_path: Path) -> None:
    """All linears, both norms, embedding and head."""
    tuned, base = pair(tmp_path, small_llama, "")
    made = extract(tuned, base, tmp_path / "out", settings=FULL)
    assert made.error < 1e-6
    assert {n for n in made.whole if "layers" not in n} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert "lm_head" in {place.name for place in made.places}
    torch.testing.assert_close(logits(base, tmp_path / "out"), logits(tuned), rtol=1e-4, atol=1e-4)
    assert float((logits(base) - logits(tuned)).abs().max()) > 0.1
    told = json.loads((tmp_path / "out" / RECORD).read_text())
    assert told["settings"]["made by"] == "afina extract"
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_below_it_is_the_best_of_its_rank(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, small_llama, "proj")
    made = extract(tuned, base, tmp_path / "out", settings=ExtractSettings(rank=3))
    assert made.whole == ()
    one, other = (afina.load(f, dtype="fp32", device="cpu")[0] for f in (tuned, base))
    for place in made.places:
        change = (
            one.get_submodule(place.name).weight - other.get_submodule(place.name).weight
        ).detach()
        squares = linalg.svdvals(change.double()).square()
        assert place.rank == 3
        assert place.kept == pytest.approx(float(squares[:3].sum() / squares.sum()), abs=1e-6)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_a_merged_lora_is_found_again(tmp_path: Path) -> None:
    """By energy, the ranks are those of the adapter; the sketch is what finds it, and proves itself."""
    tuned, base = pair(
        tmp_path, lambda: small_llama(hidden_size=64, intermediate_size=96), "q_proj", rank=2
    )
    made = extract(tuned, base, tmp_path / "out", settings=ExtractSettings(energy=0.99999))
    assert {place.rank for place in made.places} == {2}
    assert {place.name.rpartition(".")[2] for place in made.places} == {"q_proj"}
    assert made.error < 1e-3


def test_conv1d_with_biases(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, tiny_gpt2, "c_attn.weight", "c_fc", "ln_f", "wpe")
    made = extract(tuned, base, tmp_path / "out", settings=FULL)
    assert {place.name.rpartition(".")[2] for place in made.places} == {"c_attn"}
    assert {n for n in made.whole if ".0." in n} == {
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
    }
    torch.testing.assert_close(logits(base, tmp_path / "out"), logits(tuned), rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["fan_in_fan_out"] is True


def test_a_tied_embedding_is_saved_whole_with_its_tie(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, lambda: small_llama(tie_word_embeddings=True), "embed", "q_proj")
    made = extract(tuned, base, tmp_path / "out", settings=FULL)
    assert set(made.whole) == {"model.embed_tokens.weight", "lm_head.weight"}
    torch.testing.assert_close(logits(base, tmp_path / "out"), logits(tuned), rtol=1e-4, atol=1e-4)


def test_a_tie_that_was_torn(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_llama(tie_word_embeddings=True), byte_tokenizer())
    untied = small_llama()
    with torch.no_grad():
        untied.load_state_dict(small_llama(tie_word_embeddings=True).state_dict())
    head = save_model(tmp_path / "head", moved(untied, "lm_head"), byte_tokenizer())
    made = extract(head, base, tmp_path / "out", settings=FULL)  # the head alone: its own factors
    assert [place.name for place in made.places] == ["lm_head"]
    torch.testing.assert_close(logits(base, tmp_path / "out"), logits(head), rtol=1e-4, atol=1e-4)
    both = save_model(tmp_path / "both", moved(untied, "embed"), byte_tokenizer())
    with pytest.raises(AdapterError, match="became several that differ"):
        extract(both, base, tmp_path / "again", settings=FULL)


def test_what_is_no_linear_is_refused_or_counted(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, small_llama, "q_proj", "norm")
    with pytest.raises(AdapterError, match=r"5 tensors changed that are no weights"):
        extract(tuned, base, tmp_path / "out", settings=ExtractSettings(rank=2, rest="refuse"))
    assert not (tmp_path / "out").exists()
    made = extract(tuned, base, tmp_path / "out", settings=ExtractSettings(rank=2, rest="drop"))
    assert any(note.startswith("left out, as asked: 5 tensors: ") for note in made.notes)
    assert len(made.told["left out"]) == 5
    assert all(size > 0 for size in made.told["left out"].values())
    assert made.whole == ()


def test_it_is_deterministic(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, small_llama, "")
    for name in ("one", "two"):
        extract(tuned, base, tmp_path / name, settings=ExtractSettings(rank=3))
    for file in (WEIGHTS, CONFIG, RECORD):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_bf16_models(tmp_path: Path) -> None:
    base, tuned = small_llama(), moved(small_llama(), "q_proj")
    for name, model in (("base", base), ("tuned", tuned)):
        model.to(torch.bfloat16).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    made = extract(tmp_path / "tuned", tmp_path / "base", tmp_path / "out", settings=FULL)
    assert made.error < 1e-6
    change = tuned.model.layers[0].self_attn.q_proj.weight.double()
    change = change - base.model.layers[0].self_attn.q_proj.weight.double()
    from afina.adapters.sources import read_source

    found = read_source(tmp_path / "out").products["model.layers.0.self_attn.q_proj"].dense()
    assert error({"q": found}, {"q": change.detach()}) < 1e-6


def test_tensors_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of the models is on the disk, not in memory: no tensor is kept but in its turn."""
    tuned, base = pair(tmp_path, small_llama, "proj")
    import gc
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []
    plain = module._pair  # pyright: ignore[reportPrivateUsage]

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        found = plain(*args)
        gc.collect()
        most.append(sum(ref() is not None for ref in alive))
        alive.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(module, "_pair", counted)
    extract(tuned, base, tmp_path / "out", settings=ExtractSettings(rank=2))
    assert max(most) == 0


def test_refusals(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, small_llama, "q_proj")
    rank = ExtractSettings(rank=2)
    with pytest.raises(ConfigError, match="say how large"):
        ExtractSettings()
    with pytest.raises(AdapterError, match="no difference in any linear"):
        extract(base, base, tmp_path / "out", settings=rank)
    other = save_model(tmp_path / "other", tiny_llama(hidden_size=16), byte_tokenizer())
    with pytest.raises(ModelError, match="differ in") as caught:
        extract(tuned, other, tmp_path / "out", settings=rank)
    assert caught.value.cure is None
    run = save_run(tmp_path / "run", base)
    with pytest.raises(AdapterError, match="is an adapter already"):
        extract(run, base, tmp_path / "out", settings=rank)
    with pytest.raises(AdapterError, match="is an adapter already"):
        extract(tuned, run, tmp_path / "out", settings=rank)
    with pytest.raises(ModelError):
        extract("nowhere/at/all", base, tmp_path / "out", settings=rank)
    with pytest.raises(ConfigError, match="take the place"):
        extract(tuned, base, base, settings=ExtractSettings(rank=2, overwrite=True))
    assert not (tmp_path / "out").exists()


def test_biases_that_the_base_has_not_are_named_and_the_cure_helps(tmp_path: Path) -> None:
    """Those of a merged BitFit: alone, and beside a change that has factors."""
    tuned, base = pair(tmp_path, small_llama, "q_proj", rank=2)
    for start, other in ((base, "bare"), (tuned, "both")):
        model, tokenizer = afina.load(start, dtype="fp64", device="cpu")
        edit = afina.apply(model, [afina.BitFit(target=("q_proj", "k_proj", "v_proj", "o_proj"))])
        with torch.no_grad():
            for parameter in edit.trainable().values():
                parameter.fill_(0.5)
        edit.merge()
        edit.keep()
        save_model(tmp_path / other, model, tokenizer)
        with pytest.raises(AdapterError, match="biases that the base has not") as caught:
            extract(tmp_path / other, base, tmp_path / "out", settings=FULL)
        assert "q_proj.bias" in str(caught.value.got)
        assert "--rest drop" in str(caught.value.cure)
    drop = ExtractSettings(energy=1, rest="drop")
    with pytest.raises(AdapterError, match="no difference in any linear") as caught:
        extract(tmp_path / "bare", base, tmp_path / "out", settings=drop)
    assert "8 other tensors changed" in str(caught.value.got)
    made = extract(tmp_path / "both", base, tmp_path / "out", settings=drop)
    assert {place.name.rpartition(".")[2] for place in made.places} == {"q_proj"}
    assert any("left out, as asked: 8 tensors" in note for note in made.notes)
    torch.testing.assert_close(logits(base, made.out), logits(tuned), rtol=1e-4, atol=1e-4)


def test_a_classifier_and_a_grown_vocabulary_have_cures_that_help(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, small_llama, "q_proj", rank=2)
    model, tokenizer = afina.load(
        tuned, dtype="fp64", device="cpu", task="classification", labels=["a", "b"]
    )
    save_model(tmp_path / "classes", model, tokenizer)
    with pytest.raises(ModelError, match="differ in") as caught:
        extract(tmp_path / "classes", base, tmp_path / "out", settings=FULL)
    assert "of two kinds, LlamaForSequenceClassification and LlamaForCausalLM" in str(
        caught.value.cure
    )
    alike, tokenizer = afina.load(
        base, dtype="fp64", device="cpu", task="classification", labels=["a", "b"]
    )
    save_model(tmp_path / "alike", alike, tokenizer)
    assert extract(tmp_path / "classes", tmp_path / "alike", tmp_path / "out", settings=FULL).places
    grown = small_llama()
    grown.resize_token_embeddings(270)
    save_model(tmp_path / "grown", grown, byte_tokenizer())
    with pytest.raises(ModelError, match="differ in") as caught:
        extract(tmp_path / "grown", base, tmp_path / "more", settings=FULL)
    assert "resize_token_embeddings" in str(caught.value.cure)


def mixture(**changes: Any) -> Any:
    """Four experts a block, which its files keep apart."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**sizes | changes)).eval()


def test_fused_experts_are_extracted_from_files_that_keep_them_apart(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, mixture, "q_proj", "experts.")
    with safe_open(base / "model.safetensors", "pt") as file:
        assert any("experts.3.w1" in key for key in file.keys())  # noqa: SIM118
    made = extract(tuned, base, tmp_path / "out", settings=FULL)
    assert made.error < 1e-6
    assert len(made.places) == 2 * (1 + 2 * 4)
    torch.testing.assert_close(logits(base, tmp_path / "out"), logits(tuned), rtol=1e-4, atol=1e-4)
    assert float((logits(base) - logits(tuned)).abs().max()) > 0.1


def test_each_expert_has_the_best_of_its_rank(tmp_path: Path) -> None:
    def move(model: Any) -> Any:
        with torch.no_grad():
            own = moved(model, "down_proj").model.layers[0].mlp.experts.down_proj
            own[2] = mixture().model.layers[0].mlp.experts.down_proj[2]
        return model

    base = save_model(tmp_path / "base", mixture(), byte_tokenizer())
    tuned = save_model(tmp_path / "tuned", move(mixture()), byte_tokenizer())
    made = extract(tuned, base, tmp_path / "out", settings=ExtractSettings(rank=3))
    change = move(mixture()).model.layers[0].mlp.experts.down_proj.double()
    change = (change - mixture().model.layers[0].mlp.experts.down_proj.double()).detach()
    for expert in range(4):
        row = next(
            p for p in made.places if p.name.endswith(f"layers.0.mlp.experts.down_proj[{expert}]")
        )
        values = linalg.svdvals(change[expert])
        if expert == 2:  # it did not change
            assert (row.rank, row.energy, row.error) == (1, 0.0, 0.0)
        else:
            least = float(values[3:].square().sum() / values.square().sum()) ** 0.5
            assert row.error == pytest.approx(least, rel=1e-4)


def test_pieces_that_lack_one_are_told(tmp_path: Path) -> None:
    tuned, base = pair(tmp_path, mixture, "experts.")
    tensors = load_file(base / "model.safetensors")
    tensors.pop(next(key for key in tensors if key.endswith("experts.3.w1.weight")))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="do not make the model's tensor"):
        extract(tuned, base, tmp_path / "out", settings=FULL)
    assert not (tmp_path / "out").exists()
