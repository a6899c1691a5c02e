"""Smaller adapters: the best of their rank, with the kept energy told, and read by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import afina
from afina.adapters import files
from afina.adapters.products import Product
from afina.adapters.resize import ResizeSettings, resize
from afina.adapters.sources import read_source
from afina.errors import AdapterError, ConfigError
from tests.adapters.kit import CONFIG, RECORD, WEIGHTS
from tests.adapters.test_combine import deltas, error, made_by_peft, read_by_peft
from tests.tiny import byte_tokenizer, save_model, save_run, tiny_llama

linalg: Any = torch.linalg  # it has no types
SETTINGS: dict[str, Any] = {
    "r": 6,
    "use_rslora": True,
    "target_modules": ["q_proj", "up_proj", "embed_tokens"],
    "rank_pattern": {"up_proj": 3},
}


@pytest.mark.parametrize("rank", [1, 3, 6, 40])
def test_each_place_is_the_best_of_its_rank(rank: int, tmp_path: Path) -> None:
    before = made_by_peft("llama", tmp_path / "a", SETTINGS, 0)
    made = resize(tmp_path / "a", tmp_path / "small", settings=ResizeSettings(rank=rank))
    after = deltas(read_by_peft("llama", tmp_path / "small"))
    rows = {f"base_model.model.{place.name}": place for place in made.places}
    assert set(after) == set(before) == set(rows)
    for name, delta in before.items():
        values = linalg.svdvals(delta)
        kept = min(rank, 3 if "up_proj" in name else 6)
        off = float((after[name] - delta).norm() / delta.norm())
        least = float(values[kept:].square().sum() / values.square().sum())
        assert rows[name].rank == kept
        assert off == pytest.approx(least**0.5, abs=1e-7)
        assert rows[name].error == pytest.approx(off, abs=1e-7)
        assert rows[name].kept == pytest.approx(1 - least, abs=1e-9)
    assert made.error == pytest.approx(error(after, before), abs=1e-7)
    assert (made.error < 1e-12) == (rank >= 6)


def test_by_energy_each_place_has_the_rank_it_needs(tmp_path: Path) -> None:
    before = made_by_peft("llama", tmp_path / "a", SETTINGS, 0)
    made = resize(tmp_path / "a", tmp_path / "small", settings=ResizeSettings(energy=0.8))
    assert len({place.rank for place in made.places}) > 1
    for place in made.places:
        squares = linalg.svdvals(before[f"base_model.model.{place.name}"]).square()
        shares = squares.cumsum(0) / squares.sum()
        assert shares[place.rank - 1] >= 0.8
        assert place.rank == 1 or shares[place.rank - 2] < 0.8
    assert made.kept >= 0.8
    after = deltas(read_by_peft("llama", tmp_path / "small"))
    assert error(after, before) == pytest.approx(made.error, rel=1e-6)
    both = ResizeSettings(energy=0.8, rank=2)
    made = resize(tmp_path / "a", tmp_path / "both", settings=both)
    assert max(place.rank for place in made.places) == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose adapter has a module whole."""
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    run = save_run(tmp_path / "run", base)
    model, tokenizer = afina.load(base, dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=4, alpha=64, modules_to_save=("norm",))])
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(torch.randn_like(parameter) / 4)
    files.save(edit, run / "adapter", base=str(base), tokenizer=tokenizer)
    return run


def test_a_run_at_full_rank_says_the_same(run: Path, tmp_path: Path) -> None:
    made = resize(run, tmp_path / "same", settings=ResizeSettings(rank=4))
    assert made.error < 1e-7
    assert made.whole == ("model.norm.weight",)
    one, other = (load_file(folder / WEIGHTS) for folder in (run / "adapter", tmp_path / "same"))
    key = "base_model.model.model.norm.weight"
    assert torch.equal(one[key], other[key])
    model, _ = afina.load(tmp_path / "base", dtype="fp32", device="cpu")
    ids = torch.arange(20)[None]
    logits: list[torch.Tensor] = []
    for folder in (run / "adapter", tmp_path / "same"):
        edit = afina.load_adapter(model, folder)
        assert "its base is this model, by fingerprint" in edit.notes
        with torch.no_grad():
            logits.append(model(ids).logits)
        edit.undo()
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    told = json.loads((tmp_path / "same" / RECORD).read_text())["settings"]
    assert (told["made by"], told["rank"]) == ("afina resize", 4)


def test_a_resized_adapter_can_be_used_further(run: Path, tmp_path: Path) -> None:
    resize(run, tmp_path / "small", settings=ResizeSettings(rank=2))
    resize(tmp_path / "small", tmp_path / "smaller", settings=ResizeSettings(rank=1))
    direct = resize(run, tmp_path / "direct", settings=ResizeSettings(rank=1))
    twice = {n: p.dense() for n, p in read_source(tmp_path / "smaller").products.items()}
    once = {n: p.dense() for n, p in read_source(tmp_path / "direct").products.items()}
    assert error(twice, once) < 1e-6
    assert json.loads((tmp_path / "smaller" / CONFIG).read_text())["r"] == 1
    assert direct.kept < 1


def test_a_place_that_changes_nothing_stays_trainable(tmp_path: Path) -> None:
    """B is 0 at the start of a training; A must not become 0 too, or no gradient would ever come."""
    base = save_model(tmp_path / "base", tiny_llama(), byte_tokenizer())
    model, _ = afina.load(base, dtype="fp32", device="cpu")
    edit = afina.apply(model, [afina.LoRA(rank=4)])
    files.save(edit, tmp_path / "a", base=str(base))
    made = resize(tmp_path / "a", tmp_path / "small", settings=ResizeSettings(rank=2))
    assert (made.kept, made.error) == (1, 0)
    products: list[Product] = list(read_source(tmp_path / "small").products.values())
    assert all(p.rank == 2 and not p.b_OR.any() and p.a_RI.any(dim=1).all() for p in products)


def test_refusals(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say how small"):
        ResizeSettings()
    for wrong in ({"rank": 0}, {"energy": 0}, {"energy": 1.1}, {"rank": True}):
        with pytest.raises(ConfigError):
            ResizeSettings(**wrong)  # pyright: ignore[reportArgumentType]
    small = ResizeSettings(rank=1)
    with pytest.raises(AdapterError, match="a model, without an adapter"):
        resize(tmp_path / "base", tmp_path / "small", settings=small)
    with pytest.raises(ConfigError, match="take the place"):
        resize(run, run / "adapter", settings=small)
    with pytest.raises(ConfigError, match="take the place"):
        resize(run, run, settings=ResizeSettings(rank=1, overwrite=True))
    assert not (tmp_path / "small").exists()
