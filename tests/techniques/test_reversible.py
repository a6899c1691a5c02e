"""Reversible blocks in a model: gradients, what is saved, random numbers, and what else is in the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.errors import RunError
from afina.ops import reference
from afina.ops import reversible_pass as reversible
from afina.table import apply
from afina.techniques.bottleneck import Bottleneck
from afina.techniques.dora import DoRA
from afina.techniques.full import Full
from afina.techniques.ia3 import IA3
from afina.techniques.lora import LoRA
from afina.techniques.p_tuning import PTuning
from afina.techniques.prefix import PrefixTuning
from afina.techniques.prompt import PromptTuning
from afina.techniques.reversible import Reversible, pass_of
from afina.techniques.reversible_pass import sign
from afina.tree import Edit, Technique
from tests import battery

FORMS = ("bdia", "additive")


def deep(name: str = "gpt2", blocks: int = 4, **changes: Any) -> Any:
    """A tiny model in fp64, in training mode, with so many blocks."""
    torch.manual_seed(0)
    if name == "llama":
        model = battery.llama(num_hidden_layers=blocks, **changes)
    else:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": battery.VOCABULARY, "n_embd": 16, "n_head": 2, "n_positions": 32}
        drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.3}
        ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
        model = GPT2LMHeadModel(
            GPT2Config(**{**sizes, **drops, **ends, "n_layer": blocks, **changes})
        )
    return model.to(torch.float64).train()


def on(model: Any, *techniques: Technique, **settings: Any) -> Edit:
    return apply(model, [*techniques, Reversible(**{"check": "always", **settings})])


def learnt(edit: Edit, seed: int = 3) -> tuple[float, dict[str, Tensor]]:
    """A loss and its gradients."""
    torch.manual_seed(seed)
    loss = battery.backward(edit.model)
    found = {n: p.grad.clone() for n, p in edit.trainable().items() if p.grad is not None}
    edit.model.zero_grad()
    return loss, found


@contextmanager
def remembered(monkeypatch: Any) -> Iterator[None]:
    """Inside the block the same forward is run by ordinary autograd: nothing is forgotten, nothing runs again."""

    def keep(call: Callable[[Tensor], Any], place: Tensor, **_: Any) -> Any:
        return call(place)

    with monkeypatch.context() as patch:
        patch.setattr(reversible.recomputation, "checkpoint", keep)
        yield


def moved(edit: Edit) -> Edit:
    """The same with tensors that are not at their start, so that every gradient counts."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in edit.trainable().items():
            if name not in edit.in_place:
                tensor += torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) / 5
    return edit


# --- R1: gradients ---------------------------------------------------------------------------------------------


def entered(
    model: Any,
) -> tuple[list[Callable[[Tensor], Tensor]], list[Any], Tensor, dict[str, Any]]:
    """The plain model's blocks as functions of a state, themselves, what enters the first, and what it is given."""
    blocks = list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)
    caught: list[Any] = []
    handle = blocks[0].register_forward_pre_hook(
        lambda m, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    model(input_ids=battery.IDS, use_cache=False)
    handle.remove()
    (args, kwargs) = caught[0]

    def call(block: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: block(x, *args[1:], **kwargs)

    return [call(block) for block in blocks], blocks, args[0], kwargs


def ended(model: Any, state: Tensor) -> Tensor:
    last = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    return model.lm_head(last(state))


def signs(edit: Edit, names: list[str], bits: int) -> list[Tensor]:
    """The factors of each block, row by row, as they are in the first step of a run with seed 0."""
    return [
        torch.tensor([sign(0, 0, name, row) for row in range(2)], dtype=torch.float64).view(2, 1, 1)
        * 2.0**-bits
        for name in names
    ]


def compared(fast: Tensor, slow: Tensor, inputs: dict[str, Tensor], within: float) -> None:
    seed = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1), dtype=fast.dtype)
    assert (fast - slow).abs().max() <= within
    got = torch.autograd.grad(fast, list(inputs.values()), seed, retain_graph=True)
    true = torch.autograd.grad(slow, list(inputs.values()), seed)
    for name, one, other in zip(inputs, got, true, strict=True):
        assert other.abs().max() > 0, name
        battery.close(one, other, within)


@pytest.mark.parametrize(("name", "within"), [("gpt2", 1e-10), ("llama", 1e-5)])
@pytest.mark.parametrize("bits", [1, 4])
def test_bdia_is_the_reference_for_every_parameter(name: str, within: float, bits: int) -> None:
    """Llama's norms compute in fp32, whatever the model's type."""
    model = deep(name)
    with torch.no_grad():
        calls, _, _, _ = entered(model)
    edit = on(model, Full(), form="bdia", plain=2, bits=bits, signs="row")
    fast = model(input_ids=battery.IDS, use_cache=False).logits
    with pass_of(edit).off():
        calls, _, x, _ = entered(model)
        blocks = [n.removesuffix(".reversible") for n in edit.deltas]
        assert len(blocks) == 3
        state = reference.multi_bit_bdia(
            calls[0](x), calls[1:], signs(edit, blocks[1:], bits), bits, 16
        )
        slow = ended(model, state)
        compared(fast, slow, edit.trainable(), within)


@pytest.mark.parametrize(("name", "within"), [("gpt2", 1e-10), ("llama", 1e-5)])
def test_additive_is_the_reference_for_every_parameter(name: str, within: float) -> None:
    model = deep(name)
    edit = on(model, Full(), form="additive", grid=30)
    fast = model(input_ids=battery.IDS, use_cache=False).logits
    with pass_of(edit).off():
        _, blocks, x, kwargs = entered(model)

    # As a block adds them up, for otherwise a summand's last bits differ, and it may be rounded to the other side.
    def halves(block: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        if name == "gpt2":
            return (
                lambda s: (s + block.attn(block.ln_1(s))[0]) - s,
                lambda s: (s + block.mlp(block.ln_2(s))) - s,
            )
        return (
            lambda s: (
                (s + block.self_attn(hidden_states=block.input_layernorm(s), **kwargs)[0]) - s
            ),
            lambda s: (s + block.mlp(block.post_attention_layernorm(s))) - s,
        )

    state = reference.additive_coupling(x, [halves(block) for block in blocks], 30)
    compared(fast, ended(model, state), edit.trainable(), within)


INSIDE: dict[str, Technique] = {
    "lora": LoRA(rank=3, dropout=0.2),
    "dora": DoRA(rank=3),
    "bottleneck": Bottleneck(width=5),
    "parallel": Bottleneck(kind="parallel", width=5, dropout=0.1),
    "ia3": IA3(),
    "prompt": PromptTuning(tokens=2),
    "p_tuning": PTuning(tokens=2),
    "prefix": PrefixTuning(tokens=2),
    "projected": PrefixTuning(tokens=2, projection=True),
    "upper": LoRA(rank=3, layers="2-3"),
    "full": Full(),
}


@pytest.mark.parametrize("key", INSIDE)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_inside_learns_as_by_ordinary_autograd(
    key: str, name: str, monkeypatch: Any
) -> None:
    """Frozen embeddings, dropout and what is shared between blocks (a prefix's network) included."""
    edit = moved(on(deep(name), INSIDE[key], plain=1))
    found = learnt(edit)
    with remembered(monkeypatch):
        true = learnt(edit)
    assert found[0] == true[0]
    assert found[1].keys() == true[1].keys() == edit.trainable().keys()
    for tensor, gradient in found[1].items():
        battery.close(gradient, true[1][tensor], 1e-12)
    assert pass_of(edit)._checked


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_additive_learns_as_by_ordinary_autograd(name: str, monkeypatch: Any) -> None:
    edit = on(deep(name, 4), Full(), form="additive")
    found = learnt(edit)
    with remembered(monkeypatch):
        true = learnt(edit)
    assert found[0] == true[0]
    assert all(torch.equal(found[1][n], true[1][n]) for n in edit.trainable())
    assert pass_of(edit)._checked


@pytest.mark.parametrize("form", FORMS)
def test_in_fp32_gradients_are_those_of_ordinary_autograd(form: Any, monkeypatch: Any) -> None:
    edit = on(deep("gpt2").float(), Full(), form=form)
    found = learnt(edit)
    with remembered(monkeypatch):
        true = learnt(edit)
    assert found[0] == true[0]
    assert found[1].keys() == true[1].keys() == edit.trainable().keys()
    for name, gradient in true[1].items():
        assert float((found[1][name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name
    plain = learnt(apply(deep("gpt2").float(), [Full()]))[1]  # the control: another function's
    assert any(float((plain[n] - g).norm()) > 1e-3 * float(g.norm()) for n, g in true[1].items())


# --- R2, R6: bit for bit ---------------------------------------------------------------------------------------


@contextmanager
def watched(monkeypatch: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The states in front of blocks, as they were and as they came back, both in the order of backward."""
    gone: list[Tensor] = []
    back: list[Tensor] = []
    step, inverse = reversible.following, reversible.before

    def following(past: Tensor, cur: Tensor, *rest: Any) -> Any:
        gone.insert(0, past.clone())
        return step(past, cur, *rest)

    def before(*given: Any) -> Tensor:
        back.append(inverse(*given).clone())
        return back[-1]

    with monkeypatch.context() as patch:
        patch.setattr(reversible, "following", following)
        patch.setattr(reversible, "before", before)
        yield gone, back


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stream", ["fp64", "fp32"])
def test_states_come_back_bit_for_bit_through_24_blocks_with_dropout(
    form: Any, dtype: torch.dtype, stream: Any, monkeypatch: Any
) -> None:
    drops = {"resid_pdrop": 0.1, "attn_pdrop": 0.1}
    model = deep("gpt2", 24, initializer_range=0.1, **drops).to(dtype)
    edit = on(model, Full(), form=form, stream=stream)
    with watched(monkeypatch) as (gone, back):
        learnt(edit)
    assert len(back) == (21 if form == "bdia" else 47)
    assert all(torch.equal(a, b) for a, b in zip(gone, back, strict=False))
    assert all(x.dtype == {"fp64": torch.float64, "fp32": torch.float32}[stream] for x in back)
    assert pass_of(edit)._checked


def test_under_autocast_too(monkeypatch: Any) -> None:
    model = deep("llama").float()
    edit = moved(on(model, LoRA(rank=2), plain=1))
    with torch.autocast("cpu", torch.bfloat16):
        found = learnt(edit)
        with remembered(monkeypatch):
            true = learnt(edit)
    assert found[0] == true[0]
    assert all(torch.equal(found[1][n], true[1][n]) for n in edit.trainable())


def test_without_dropout_drawn_again_nothing_comes_back(monkeypatch: Any) -> None:
    """The control: torch's recomputation restores the random state, and here it does not."""
    whole = reversible.recomputation.checkpoint
    monkeypatch.setattr(
        reversible.recomputation,
        "checkpoint",
        lambda *a, **k: whole(*a, **k, preserve_rng_state=False),
    )
    edit = on(deep("gpt2", resid_pdrop=0.1), Full())
    with pytest.raises(RunError, match="does not come back"):
        learnt(edit)


# --- R3: what is saved -----------------------------------------------------------------------------------------


def saved(edit: Edit) -> tuple[int, list[int]]:
    """Bytes that one forward keeps, the model's own tensors left out; and the sizes of packed side bits among them."""
    own = {p.untyped_storage().data_ptr() for p in edit.model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            held[place] = tensor  # so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = edit.model(input_ids=LONG, use_cache=False).logits
    assert out.requires_grad
    every = [t.untyped_storage().nbytes() for t in held.values()]
    bits = [t.untyped_storage().nbytes() for t in held.values() if t.dtype == torch.uint8]
    return sum(every), bits


LONG = torch.arange(64).view(2, 32) % battery.VOCABULARY


def test_additive_saves_the_same_at_any_depth() -> None:
    few, many = (
        saved(on(deep("llama", blocks), Full(), form="additive", check="never"))
        for blocks in (4, 16)
    )
    assert few[1] == many[1] == []
    assert many[0] < 1.1 * few[0]
    plain = [saved(apply(deep("llama", blocks), [Full()]))[0] for blocks in (4, 16)]
    assert plain[1] > 3 * plain[0]  # the control


@pytest.mark.parametrize("bits", [1, 4, 5])
def test_bdia_saves_just_its_side_bits_for_each_block(bits: int) -> None:
    few, many = (
        saved(on(deep("llama", blocks), Full(), bits=bits, plain=2, check="never"))
        for blocks in (4, 16)
    )
    each = bits * LONG.numel() * 16 // 8
    assert few[1] == [each] * 2
    assert many[1] == [each] * 14
    assert many[0] - few[0] == 12 * each
    # Blocks that stay plain keep what they ever kept: each its share of a plain model's.
    more = saved(on(deep("llama", 16), Full(), bits=bits, plain=3, check="never"))
    plain = [saved(apply(deep("llama", blocks), [Full()]))[0] for blocks in (4, 5)]
    assert more[0] - many[0] == plain[1] - plain[0] - each


def test_states_are_gone_between_forward_and_backward() -> None:
    """What the counting of saved tensors cannot see: nobody else holds them either."""
    import gc
    import weakref

    seen: list[weakref.ref[Tensor]] = []
    edit = on(deep("gpt2", 6), Full(), plain=1, check="never")
    whole = reversible.following

    def following(past: Tensor, cur: Tensor, *rest: Any) -> Any:
        seen.extend((weakref.ref(past), weakref.ref(cur)))
        return whole(past, cur, *rest)

    reversible.following = following
    try:
        out = edit.model(input_ids=battery.IDS, use_cache=False).logits
    finally:
        reversible.following = whole
    gc.collect()
    alive = {id(found) for ref in seen if (found := ref()) is not None}
    assert len(seen) == 12
    assert len(alive) <= 1  # the last state but one, which backward begins with
    out.sum().backward()


# --- R4: random numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_random_state_after_backward_is_that_of_a_plain_run(form: Any) -> None:
    states: list[Tensor] = []
    for value in ([], [Reversible(form=form)]):
        edit = apply(deep("gpt2", resid_pdrop=0.1, attn_pdrop=0.1), [Full(), *value])
        for _ in range(2):  # additive looks at its blocks in the first
            learnt(edit)
            if form == "bdia" or not value:
                states.append(torch.get_rng_state())
    if form == "bdia":
        assert all(torch.equal(states[0], state) for state in states)
        return
    # Additive coupling draws for its two halves, which is another number; but backward draws nothing.
    edit = on(deep("gpt2", resid_pdrop=0.1), Full(), form=form)
    torch.manual_seed(0)
    loss = edit.model(input_ids=battery.IDS, use_cache=False).logits.sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
