"""One base has one fingerprint, however it is loaded; another base has another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import afina
from afina.adapters.fingerprint import base_fingerprint, same_base
from tests import battery
from tests.tiny import tiny_gpt2, tiny_llama

EXACT = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def checkpoint(dtype: torch.dtype, **changes: Any) -> Any:
    """A model whose numbers are those of a checkpoint in `dtype`."""
    return tiny_llama(dtype=torch.float32, **changes).to(dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_one_checkpoint_has_one_fingerprint_in_every_exact_type(stored: torch.dtype) -> None:
    base = checkpoint(stored)
    assert len({base_fingerprint(copy.deepcopy(base).to(t)) for t in EXACT.values()}) == 1


def test_a_checkpoint_in_fp16_is_one_base_in_every_type() -> None:
    base = checkpoint(torch.float16)
    prints = {n: base_fingerprint(copy.deepcopy(base).to(t)) for n, t in EXACT.items()}
    assert len(set(prints.values())) == 1
    assert same_base(prints["fp32"], base_fingerprint(base))


@pytest.mark.parametrize("stored", EXACT.values(), ids=str)
def test_a_base_loaded_in_fp16_is_known_again(stored: torch.dtype) -> None:
    base = checkpoint(stored, initializer_range=1e-4)
    half = copy.deepcopy(base).half()
    # The control: rounded to fp16 first, the values are others in bf16, and many are below what fp16 holds well.
    assert (
        not torch.equal(half.lm_head.weight.bfloat16(), base.lm_head.weight.float().bfloat16())
        or stored == torch.float64
    )
    assert same_base(base_fingerprint(base), base_fingerprint(half))
    assert same_base(base_fingerprint(half), base_fingerprint(base))
    assert not same_base(base_fingerprint(half), base_fingerprint(checkpoint(stored, seed=1)))
    assert not same_base(
        base_fingerprint(half), base_fingerprint(checkpoint(torch.float16, seed=1))
    )


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, battery.bert])
def test_an_adapter_on_it_changes_nothing(build: Any) -> None:
    model = build()
    before = base_fingerprint(model)
    edit = afina.apply(model, [afina.LoRA(rank=2)])
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.add_(1)
    assert base_fingerprint(model, edit) == before
    assert base_fingerprint(model) == before
    edit.undo()
    assert base_fingerprint(model) == before


def test_tensors_trained_in_place_are_left_out() -> None:
    model = tiny_llama()
    edit = afina.apply(model, [afina.LoRA(rank=2, modules_to_save=("lm_head",))])
    before = base_fingerprint(model, edit)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert base_fingerprint(model, edit) == before
    assert base_fingerprint(tiny_llama(), without=("lm_head.weight",)) == before
    assert base_fingerprint(model) != before
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert base_fingerprint(model, edit) != before


def test_a_tied_tensor_is_left_out_under_any_of_its_names() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    prints = [base_fingerprint(model, without=(name,)) for name in names]
    assert prints[0] == prints[1] != base_fingerprint(model)


def test_every_tensor_counts() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    before = base_fingerprint(model)
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.02)
        assert base_fingerprint(model) != before, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert base_fingerprint(model) == before


def test_another_base_shape_or_tie_is_another() -> None:
    variants = [{}, {"seed": 1}, {"vocab_size": 268}, {"tie_word_embeddings": True}]
    assert len({base_fingerprint(tiny_llama(**changes)) for changes in variants}) == len(variants)


def test_a_base_that_moved_under_another_name_is_the_same() -> None:
    """As models of text and images were in Transformers: `language_model.model` became `model.language_model`."""
    model = tiny_llama()
    roof = torch.nn.Module()
    roof.language_model = model
    assert base_fingerprint(roof) == base_fingerprint(model)
    without = ("lm_head.weight",)
    assert base_fingerprint(roof, without=without) == base_fingerprint(model, without=without)
    assert base_fingerprint(roof, without=without) != base_fingerprint(model)
    reordered = torch.nn.Module()
    reordered.head, reordered.rest = torch.nn.Module(), model.model
    reordered.head.lm_head = model.lm_head
    assert next(n for n, _ in reordered.named_parameters()) == "head.lm_head.weight"
    assert base_fingerprint(reordered) == base_fingerprint(model)


def test_blocks_in_another_order_are_another_base() -> None:
    model = tiny_llama()
    before = base_fingerprint(model)
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert base_fingerprint(model) != before


def test_the_samples_fall_into_all_columns_of_a_square() -> None:
    """A stride of size / samples would look at the first column alone wherever widths are powers of two."""
    linear = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(64 * 64.0).reshape(64, 64))
    seen = set()
    for column in range(64):
        changed = copy.deepcopy(linear)
        with torch.no_grad():
            changed.weight[:, column] += 1000
        seen.add(base_fingerprint(changed) != base_fingerprint(linear))
    assert seen == {True}
