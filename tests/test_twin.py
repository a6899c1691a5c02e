"""A twin has names, shapes and files of the model it is of, no values, and leaves that model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afina.adapters import contents
from afina.table import apply
from afina.techniques.adalora import AdaLoRA
from afina.techniques.bitfit import BitFit
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.trainable_tokens import TrainableTokens
from afina.tree import Edit, Technique
from afina.tree.twin import give, twin_of
from tests.tiny import tiny_llama

TECHNIQUES: list[Technique] = [
    LoRA(rank=2),
    LoRA(rank=2, modules_to_save=("lm_head",)),
    LoRA(rank=2, start="pissa"),
    DoRA(rank=2),
    AdaLoRA(init_rank=3, target_rank=2),
    BitFit(),
    IA3(),
    Bottleneck(width=2),
    PromptTuning(tokens=2),
    PrefixTuning(tokens=2),
    TrainableTokens(tokens=(3, 5)),
]


def edited(technique: Technique, **changes: Any) -> Edit:
    return apply(tiny_llama(**changes), [technique], seed=3)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda t: t.key)
def test_with_what_trained_a_twin_gives_the_same_files(technique: Technique) -> None:
    edit = edited(technique)
    twin = twin_of(edit)
    assert all(p.is_meta for p in twin.model.parameters())
    assert {n: p.shape for n, p in twin.trainable().items()} == {
        n: p.shape for n, p in edit.trainable().items()
    }
    for _ in range(2):  # into the meta device, and into values
        with torch.no_grad():
            for parameter in edit.trainable().values():
                parameter.add_(0.5)
        give(twin, {**edit.trainable(), **edit.state()})
        found, wanted = contents.peft_tensors(twin), contents.peft_tensors(edit)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert contents.peft_config(twin, "base") == contents.peft_config(edit, "base")
    # What it was given is its own.
    before = {name: p.detach().clone() for name, p in twin.trainable().items()}
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.zero_()
    assert all(torch.equal(p, before[name]) for name, p in twin.trainable().items())


def test_ties_and_the_model_itself_stay_as_they_are() -> None:
    edit = edited(Full(), tie_word_embeddings=True)
    before = {name: (id(p), p.clone()) for name, p in edit.model.named_parameters()}
    twin = twin_of(edit)
    whole: Any = twin.model
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    assert twin.in_place["model.embed_tokens.weight"] is whole.lm_head.weight
    give(twin, edit.trainable())
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    for name, parameter in edit.model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    ids = torch.arange(6)[None]
    with torch.no_grad():
        for name, buffer in edit.model.named_buffers():
            module, _, own = name.rpartition(".")
            setattr(twin.model.get_submodule(module), own, buffer)
        assert torch.equal(whole(ids).logits, edit.model(ids).logits)
