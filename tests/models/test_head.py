"""The loss through the trunk and the head's weight is the model's own, and a head of another form keeps its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from afina.data.packing import collate
from afina.data.prefix import collate_shared
from afina.models.forward import packing, trained_logits, trained_losses
from afina.models.head import head_of
from afina.ops.reference import token_losses
from afina.table import apply
from afina.techniques.lora import LoRA
from tests.models.test_sharing import some_rows
from tests.ops.test_attention import SIZES, build, gemma2, gpt2, llama, qwen2


def cohere() -> Any:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))


def granite() -> Any:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


EVERY = (llama, qwen2, gemma2, gpt2, cohere, granite)


@pytest.mark.parametrize("make", EVERY, ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", ["packed", "shared", "padded"])
def test_losses_are_those_of_the_models_logits(make: Callable[[], Any], kind: str) -> None:
    if make is gemma2 and kind == "padded":
        pytest.skip("in fp64 its own eager attention is not finite where a window lies in padding")
    model, rows = build(make), some_rows()
    head = head_of(model)
    assert head is not None
    batch = collate_shared(rows, 0) if kind == "shared" else collate(rows, kind == "packed", 0)
    with packing(model, kind != "padded"):
        wanted = token_losses(*trained_logits(model, batch))
        got = trained_losses(model, batch, head)
        whole = trained_losses(model, batch, None)
    for losses in (got, whole):
        torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-10)
    one, other = (
        torch.autograd.grad(x.sum(), model.get_input_embeddings().weight, retain_graph=True)[0]
        for x in (got, wanted)
    )
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "scale", "softcap"),
    [(llama, 1.0, None), (gemma2, 1.0, 3.0), (cohere, 0.25, None), (granite, 0.125, None)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_form_by_value(make: Callable[[], Any], scale: float, softcap: float | None) -> None:
    head = head_of(build(make))
    assert head is not None
    assert (head.scale, head.softcap) == (scale, softcap)


def test_a_head_that_does_more_than_its_configuration_says_keeps_its_logits() -> None:
    model = build(llama)
    assert head_of(model) is not None
    model.config.logit_scale = 3.0  # Llama's code knows no such thing
    assert head_of(model) is None
    del model.config.logit_scale
    hook = model.register_forward_hook(lambda module, args, output: None)
    assert head_of(model) is None  # a hook of the user's is called with the whole model
    hook.remove()
    assert head_of(model) is not None
    apply(model, [LoRA(rank=2, target=("lm_head",))])
    assert head_of(model) is None


def test_looking_changes_nothing() -> None:
    model = build(gpt2).train()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with packing(model, True):
        name = model.config._attn_implementation
        assert head_of(model) is not None
        assert model.config._attn_implementation == name
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
