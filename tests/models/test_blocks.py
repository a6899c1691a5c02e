"""Blocks that are recomputed in backward, or compiled, give what they give when run plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from afina.errors import TechniqueError
from afina.models.blocks import Blocks, Recompute, plainly
from afina.models.forward import packing
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train.passes import Passes
from afina.tree import Edit
from tests.models.test_sharing import some_rows
from tests.ops.test_attention import build, gemma2, gpt2, llama

WAYS: tuple[Recompute, ...] = (True, 2, "selective")


def changed(make: Any, dropout: float = 0.0) -> tuple[Any, Edit]:
    model = build(make).train()
    edit = apply(model, [LoRA(rank=2, dropout=dropout)])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in edit.trainable().values():
            parameter.normal_(0, 0.1)
    return model, edit


def gradients(model: Any, edit: Edit) -> dict[str, Tensor]:
    """Of the loss of a packed batch, and the loss itself."""
    passes = Passes(model, True, False, 0, None)
    torch.manual_seed(7)
    with packing(model, True):
        loss = passes.loss(passes.batch(some_rows()))
        loss.backward()
    found = {name: p.grad.clone() for name, p in edit.trainable().items() if p.grad is not None}
    for parameter in edit.trainable().values():
        parameter.grad = None
    return {**found, "loss": loss.detach()}


def kept_bytes(model: Any, edit: Edit) -> int:
    """Of what a pass keeps for backward, beside the parameters."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    passes = Passes(model, True, False, 0, None)
    with packing(model, True), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        passes.loss(passes.batch(some_rows()))
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [llama, gpt2, gemma2], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_equal_bit_for_bit(make: Any, way: Recompute, dropout: float) -> None:
    model, edit = changed(make, dropout)
    wanted = gradients(model, edit)
    with Blocks(model, way).running():
        found = gradients(model, edit)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if way == "selective":
            # The change is added out of place there, and its last bit may be another.
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(value, wanted[name]), name


def test_less_is_kept_the_more_is_recomputed() -> None:
    model, edit = changed(llama)
    plain = kept_bytes(model, edit)
    found: dict[Any, int] = {}
    for way in WAYS:
        with Blocks(model, way).running():
            found[way] = kept_bytes(model, edit)
    assert found[True] < found[2] < plain
    # What is kept of products is counted apart: it does not go through autograd.
    assert found["selective"] == found[True]


class Products(TorchDispatchMode):
    """Counts the products of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten.mm.default, aten.addmm.default, aten.addmm_.default)
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice_where_recomputing_selects() -> None:
    model, edit = changed(llama)
    found: dict[Any, int] = {}
    for way in (False, *WAYS):
        with Blocks(model, way).running(), Products() as products:
            gradients(model, edit)
        found[way] = products.count
    blocks = len(model.model.layers)
    a_block = 7 * 3  # each of seven linears: the base's product, A's and B's
    assert found["selective"] == found[False]
    assert found[True] - found[False] == blocks * a_block
    assert found[2] - found[False] == a_block * blocks // 2


def test_blocks_run_as_before_afterwards() -> None:
    model, edit = changed(llama)
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("input_layernorm"):
            module.register_forward_hook(lambda m, a, o, name=name: calls.append(name))
    with Blocks(model, True).running():
        gradients(model, edit)
        assert len(calls) == 2 * len(set(calls))  # once forward, once in backward
        calls.clear()
        with torch.no_grad():
            gradients_free(model)
        assert len(calls) == len(set(calls))
        calls.clear()
        with plainly(model):
            gradients(model, edit)
        assert len(calls) == len(set(calls))
    calls.clear()
    gradients(model, edit)
    assert len(calls) == len(set(calls))


def gradients_free(model: Any) -> None:
    passes = Passes(model, True, False, 0, None)
    with packing(model, True):
        passes.loss(passes.batch(some_rows()))


def test_a_model_without_blocks_cannot_recompute_them() -> None:
    flat = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TechniqueError, match=r"train\.recompute"):
        Blocks(flat, True)
    with pytest.raises(TechniqueError, match=r"train\.compile"):
        Blocks(flat, must_compile=True)
    Blocks(flat)  # nothing is asked of it
