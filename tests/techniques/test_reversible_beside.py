"""Reversible blocks in a model: when they act, what else may be there, and what may not."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from afina.errors import TechniqueError
from afina.models.blocks import Blocks
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from afina.techniques.reversible import Reversible, pass_of
from afina.techniques.reversible_pass import sign
from tests import battery
from tests.techniques.test_reversible import FORMS, deep, learnt, moved, on, remembered, saved

# --- when it acts ----------------------------------------------------------------------------------------------


def test_bdia_is_the_plain_model_but_in_training_with_a_gradient() -> None:
    model = deep("llama")
    plain = battery.logits(model)
    trained = model(input_ids=battery.IDS).logits.detach()
    assert torch.equal(plain, trained)
    edit = on(model, LoRA(rank=2), plain=1)
    assert torch.equal(battery.logits(model), plain)  # no gradient
    model.eval()
    assert torch.equal(model(input_ids=battery.IDS).logits, plain)
    model.train()
    mixed = model(input_ids=battery.IDS).logits
    assert 1e-6 < (mixed - plain).abs().max() < 3
    with edit.disabled():
        assert torch.equal(model(input_ids=battery.IDS).logits, plain)
    edit.undo()
    assert torch.equal(model(input_ids=battery.IDS).logits, plain)


def test_more_bits_are_nearer_to_the_plain_model() -> None:
    model = deep("llama")
    plain = battery.logits(model)
    far: list[float] = []
    for bits in (1, 3, 5, 8):
        edit = on(model, Full(), bits=bits, plain=1)
        far.append((model(input_ids=battery.IDS).logits - plain).abs().max().item())
        edit.undo()
    assert far == sorted(far, reverse=True)
    assert far[-1] < far[0] / 16


def test_merged_it_is_what_the_adapter_alone_merges_to() -> None:
    logits: list[Tensor] = []
    for more in ([], [Reversible(plain=1)]):
        edit = moved(apply(deep("llama"), [LoRA(rank=2), *more]))
        edit.merge()
        logits.append(battery.logits(edit.model))
        edit.unmerge()
        edit.merge()
        edit.keep()
        assert torch.equal(battery.logits(edit.model), logits[-1])
    assert torch.equal(logits[0], logits[1])


def test_additive_is_not_merged() -> None:
    edit = on(deep("llama"), Full(), form="additive")
    with pytest.raises(TechniqueError, match="reversible cannot be merged"):
        edit.merge()


def test_a_copy_runs_through_its_own_blocks() -> None:
    edit = moved(on(deep("llama"), LoRA(rank=2), plain=1))
    loss, _ = learnt(edit)
    twin = copy.deepcopy(edit.model)
    edit.undo()
    torch.manual_seed(3)
    assert battery.backward(twin) == loss
    for name, parameter in twin.named_parameters():
        assert (parameter.grad is not None) == (".lora." in name)


def test_signs_are_a_function_of_seed_step_block_and_row() -> None:
    drawn = [sign(s, t, b, r) for s in (0, 1) for t in (0, 1) for b in "ab" for r in range(50)]
    assert set(drawn) == {1, -1}
    assert 130 < sum(d == 1 for d in drawn) < 270
    assert drawn == [
        sign(s, t, b, r) for s in (0, 1) for t in (0, 1) for b in "ab" for r in range(50)
    ]
    parts = [tuple(drawn[i : i + 50]) for i in range(0, 400, 50)]
    assert len(set(parts)) == 8


# --- with what else there is -----------------------------------------------------------------------------------


def test_plain_blocks_are_recomputed_and_reversible_ones_left_alone() -> None:
    edit = moved(on(deep("llama", 5), LoRA(rank=2), plain=3, check="never"))
    loss, kept = learnt(edit)
    bytes_before, _ = saved(edit)
    with Blocks(edit.model, recompute=True).running():
        again = learnt(edit)
        bytes_after, bits = saved(edit)
    assert again[0] == loss
    assert all(torch.equal(again[1][n], kept[n]) for n in kept)
    assert bytes_after < bytes_before / 2
    assert len(bits) == 2
    every = on(deep("llama"), Full(), form="additive")
    with pytest.raises(TechniqueError, match="every block is reversible"):
        Blocks(every.model, recompute=True)


def test_compiling_is_refused_or_left_out() -> None:
    edit = on(deep("llama"), LoRA(rank=2))
    with pytest.raises(TechniqueError, match="reversible blocks are not compiled"):
        Blocks(edit.model, must_compile=True)
    assert not Blocks(edit.model).compilable
    edit.undo()
    assert Blocks(edit.model).compilable


def test_experts_and_a_quantised_base(monkeypatch: Any) -> None:
    """A router that chose otherwise the second time would make other gradients."""
    torch.manual_seed(0)
    mixture = battery.mixtral().to(torch.float64).train()
    packed = deep("llama", hidden_size=32)
    for model, more in ((mixture, []), (packed, [Quantize(block=16)])):
        edit = moved(on(model, LoRA(rank=2), *more, plain=1))
        found = learnt(edit)
        with remembered(monkeypatch):
            true = learnt(edit)
        assert found[0] == true[0]
        assert all(torch.equal(found[1][n], true[1][n]) for n in edit.trainable())


def test_encoders_and_models_of_two_kinds_of_attention() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": battery.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 3,
        "initializer_range": 0.3,
    }
    gemma = Gemma2ForCausalLM(Gemma2Config(**sizes)).to(torch.float64).train()
    for form in FORMS:
        edit = on(gemma, Full(), form=form)
        learnt(edit)
        assert pass_of(edit)._checked
        edit.undo()
    bert = battery.bert().to(torch.float64).train()
    edit = on(bert, LoRA(rank=2), plain=1)
    learnt(edit)
    assert pass_of(edit)._checked


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    edit = moved(on(deep("llama"), LoRA(rank=2), plain=1))
    true = learnt(edit)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = cast("Any", edit.model).model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        edit.model(input_ids=battery.IDS)
    assert pass_of(edit).front is None
    handle.remove()
    assert learnt(edit)[0] == true[0]


def test_what_acts_between_blocks_is_refused() -> None:
    edit = on(deep("llama"), LoRA(rank=2), plain=1)
    handle = cast("Any", edit.model).model.layers[1].register_forward_hook(lambda m, a, y: y * 2)
    with pytest.raises(TechniqueError, match="not given what the one before it said"):
        learnt(edit)
    handle.remove()


def test_a_cache_that_holds_something_is_refused_in_training() -> None:
    edit = on(deep("llama"), LoRA(rank=2), plain=1)
    with torch.no_grad():
        past: Any = cast("Any", edit.model)(input_ids=battery.IDS, use_cache=True)
    name = "cache" if getattr(past, "cache", None) else "past_key_values"
    with pytest.raises(TechniqueError, match="cannot begin with what a cache holds"):
        edit.model(input_ids=battery.IDS, **{name: getattr(past, name)})


# --- what cannot be --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )
    bert, llama = battery.build("bert"), deep("llama")
    for model, value, match in (
        (llama, Reversible(plain=4), "no block is left"),
        (llama, Reversible(form="bdia", plain=0), "takes its first two states from a plain block"),
        (t5, Reversible(), "models of one stack"),
        (bert, Reversible(form="additive"), "each a module of its own"),
    ):
        before = battery.picture(model)
        with pytest.raises(TechniqueError, match=match):
            apply(model, [Full(), value])
        battery.same_picture(battery.picture(model), before)


def test_additive_beside_an_adapter_needs_a_base_that_says_so() -> None:
    with pytest.raises(TechniqueError, match="an adapter's folder does not say"):
        on(deep("llama"), LoRA(rank=2), form="additive")
