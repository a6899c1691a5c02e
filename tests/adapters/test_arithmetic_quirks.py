"""Arithmetic with what is unusual and allowed: classifiers, parts of several techniques, quantised bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import afina
from afina.adapters import files
from afina.adapters.card import head_of_base
from afina.adapters.rounded import read_rounded
from afina.adapters.sources import read_source
from afina.errors import AdapterError
from afina.tree import Technique
from tests import battery
from tests.tiny import byte_tokenizer, save_model, tiny_llama

IDS = torch.arange(9)[None] + 40
COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and adapters on it."""
    folder = tmp_path_factory.mktemp("quirks")
    save_model(folder / "base", tiny_llama(), byte_tokenizer())

    def make(name: str, *techniques: Technique, seed: int = 1, **head: Any) -> None:
        model, _ = afina.load(folder / "base", dtype="fp32", device="cpu", **head)
        edit = afina.apply(model, list(techniques))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in edit.trainable().values():
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
        files.save(edit, folder / name, base=str(folder / "base"))

    colours: dict[str, Any] = {"task": "classification", "labels": COLOURS}
    make("one", afina.LoRA(rank=2), **colours)
    make("two", afina.LoRA(rank=3, rslora=True), seed=2, **colours)
    make("numbers", afina.LoRA(rank=2), task="classification", labels=("1", "2", "3"))
    make("words", afina.LoRA(rank=2), task="token_classification", labels=COLOURS)
    make("plain", afina.LoRA(rank=2))
    make("stack", afina.LoRA(rank=2), afina.IA3())
    make("no_sum", afina.IA3(), afina.BitFit())
    make("packed", afina.Quantize(kind="nf4", block=16), afina.LoRA(rank=2), afina.IA3())
    make("dora", afina.DoRA(rank=2))
    make("tokens", afina.LoRA(rank=2), afina.TrainableTokens(tokens=(7,)))
    return folder


def classified(base: Path, *adapters: tuple[Path, float]) -> Tensor:
    """The logits of the classes with these adapters' changes written in, each so many times."""
    total: Tensor | None = None
    for folder, weight in adapters:
        model, _ = afina.load(
            base, dtype="fp32", device="cpu", task="classification", labels=COLOURS
        )
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        edit = files.load(model, folder)
        edit.merge()
        edit.keep()
        moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
        head = dict(model.named_parameters())["score.weight"].detach()
        values = {n: weight * m for n, m in moved.items()} | {"score.weight": weight * head}
        total = values if total is None else {n: total[n] + v for n, v in values.items()}  # type: ignore[assignment]
    model, _ = afina.load(base, dtype="fp32", device="cpu", task="classification", labels=COLOURS)
    assert isinstance(total, dict)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(total[name] if name == "score.weight" else parameter + total[name])
        return model(IDS).logits


def test_classifiers_are_averaged_head_and_all(made: Path, tmp_path: Path) -> None:
    weights = [(made / "one", 0.7), (made / "two", 0.3)]
    out = afina.combine(weights, tmp_path / "out").out
    assert head_of_base(out) == {"task": "classification", "labels": COLOURS}
    model, _ = afina.load(
        made / "base", dtype="fp32", device="cpu", task="classification", labels=COLOURS
    )
    edit = files.load(model, out)
    assert "its base is this model, by fingerprint" in edit.notes
    with torch.no_grad():
        got = model(IDS).logits
    battery.close(got, classified(made / "base", *weights), 1e-4)
    battery.differs(got, classified(made / "base", (made / "one", 1.0)))


def test_a_classifier_is_resized_with_its_head(made: Path, tmp_path: Path) -> None:
    out = afina.resize(
        made / "two", tmp_path / "out", settings=afina.ResizeSettings(energy=1.0)
    ).out
    battery.close(
        classified(made / "base", (out, 1.0)), classified(made / "base", (made / "two", 1.0)), 1e-4
    )


@pytest.mark.parametrize(
    ("names", "weights", "says"),
    [
        (("one", "two"), (0.7, 0.7), "add up to 1.4"),
        (("one",), (0.5,), "add up to 0.5"),
        (("one", "numbers"), (0.5, 0.5), r"(?s)other heads.*red, green, blue.*1, 2, 3"),
        (("one", "words"), (0.5, 0.5), r"(?s)other heads.*token_classification"),
        (("one", "plain"), (1.0, 1.0), r"(?s)other heads.*no classes"),
        (("plain", "one"), (1.0, 1.0), "other heads"),
    ],
    ids=str,
)
def test_heads_that_no_sum_is_of_are_refused(
    made: Path, tmp_path: Path, names: tuple[str, ...], weights: tuple[float, ...], says: str
) -> None:
    pairs = [(made / n, w) for n, w in zip(names, weights, strict=True)]
    with pytest.raises(AdapterError, match=says):
        afina.combine(pairs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_of_several_techniques_knows_its_base(made: Path, tmp_path: Path) -> None:
    """The record lies in the folder of them all; without it a quantised base would be taken for a whole one."""
    whole, part = read_source(made / "plain"), read_source(made / "stack" / "lora")
    assert part.record is not None
    assert part.record == whole.record
    rounded = read_rounded(made / "packed" / "lora")
    assert rounded is not None
    assert rounded.technique.kind == "nf4"
    with pytest.raises(AdapterError, match="different weights of one base"):
        afina.combine([(made / "packed" / "lora", 1), (made / "plain", 1)], tmp_path / "out")
    out = afina.combine([(made / "stack" / "lora", 1), (made / "plain", 1)], tmp_path / "out").out
    assert read_source(out).record == whole.record


def test_a_folder_of_that_name_elsewhere_is_no_part(made: Path, tmp_path: Path) -> None:
    """A folder beside the parts that is not listed as one keeps its own counsel."""
    import shutil

    shutil.copytree(made / "stack", tmp_path / "stack")
    (tmp_path / "stack" / "lora").rename(tmp_path / "stack" / "other")
    assert read_source(tmp_path / "stack" / "other").record is None


def test_the_parts_that_can_be_named_are_said(made: Path) -> None:
    with pytest.raises(AdapterError) as caught:
        read_source(made / "stack")
    assert str(caught.value.cure).endswith("stack/lora")
    with pytest.raises(AdapterError, match="afina extract"):
        read_source(made / "no_sum")


def test_inspection_calls_a_method_by_its_name(made: Path) -> None:
    told = {"plain": "lora", "dora": "dora", "tokens": "lora + trainable_tokens"}
    assert {name: afina.inspect(made / name).method for name in told} == told
    assert not any(afina.inspect(made / name).every_strange for name in told)
