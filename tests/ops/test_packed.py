"""A packed weight in the place of a weight: products, gradients, what is kept for backward, copies, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from afina.errors import TechniqueError
from afina.ops.packed import PackedWeight, dense, pack, stored_bytes
from afina.ops.quantise import Scheme
from afina.ops.sample import sample

SCHEMES = (Scheme(), Scheme(double=False), Scheme("int8", double=False), Scheme(block=32))


def linear(scheme: Scheme, dtype: torch.dtype = torch.float64, **about: Any) -> nn.Linear:
    """A linear of 32 to 48 whose weight is packed."""
    torch.manual_seed(0)
    module = nn.Linear(32, 48, dtype=dtype)
    module.weight = pack(module.weight, scheme, name="a.weight", **about)
    return module


def packed_of(module: nn.Module) -> PackedWeight:
    weight = module.get_parameter("weight")
    assert isinstance(weight, PackedWeight)
    return weight


def both_ways(call: Callable[[Tensor], Tensor], *wanted: Tensor) -> list[Tensor]:
    """Output, and the gradients to the input and to `wanted`."""
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_(True)
    y = call(x)
    return [y, *torch.autograd.grad(y, (x, *wanted), torch.ones_like(y).cumsum(-1))]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_linear_equals_one_of_its_values_with_gradients(scheme: Scheme) -> None:
    module = linear(scheme)
    values = dense(module.weight)
    assert type(values) is Tensor
    fast = both_ways(module, module.bias)
    slow = both_ways(lambda x: F.linear(x, values, module.bias), module.bias)
    for one, other in zip(fast, slow, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_conv1d_equals_one_of_its_values_with_gradients(scheme: Scheme) -> None:
    torch.manual_seed(0)
    module = Conv1D(48, 32).double()
    module.weight = pack(module.weight, scheme, name="a.weight")
    values = dense(module.weight)
    fast = both_ways(module, module.bias)
    slow = both_ways(lambda x: x @ values + module.bias, module.bias)
    for one, other in zip(fast, slow, strict=True):
        assert (one - other).abs().max() <= 1e-12


def test_gradients_are_those_of_finite_differences() -> None:
    module = linear(Scheme())
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_another_type_of_products_rounds_the_values_to_it() -> None:
    module = linear(Scheme(), torch.float32, compute=torch.bfloat16)
    x = torch.randn(4, 32)
    weight, bias = packed_of(module), module.bias
    assert torch.equal(weight.unpacked(), weight.unpacked(torch.bfloat16).float())
    assert not torch.equal(weight.unpacked(), linear(Scheme(), torch.float32).weight.unpacked())
    slow = F.linear(x.bfloat16(), weight.unpacked(torch.bfloat16)).float() + bias
    assert torch.equal(module(x), slow)


def kept_bytes(module: nn.Module) -> int:
    """What autograd keeps of matrices as large as the weight, between forward and backward."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x).sum().backward()
    return sum(stored_bytes(tensor) for tensor in kept if tensor.numel() == 32 * 48)


def test_only_the_packed_weight_is_kept_for_backward() -> None:
    assert kept_bytes(linear(Scheme())) == Scheme().bytes_of(32 * 48)
    assert kept_bytes(nn.Linear(32, 48, dtype=torch.float64)) == 8 * 32 * 48


def test_everything_else_sees_the_values() -> None:
    weight = linear(Scheme()).weight
    values = weight.unpacked()
    assert torch.equal(weight.t(), values.t())
    assert torch.equal(weight @ values.t(), values @ values.t())
    assert torch.equal(weight.norm(dim=1), values.norm(dim=1))
    assert torch.equal(weight[3, 4:7], values[3, 4:7])
    assert torch.equal(torch.cat([weight, values]), torch.cat([values, values]))
    assert torch.equal(F.embedding(torch.tensor([5, 1]), weight), values[[5, 1]])


def test_it_says_it_is_the_weight() -> None:
    weight = linear(Scheme()).weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((48, 32), torch.float64, "cpu")
    assert weight.numel() == 1536
    assert not weight.requires_grad
    assert "nf4" in repr(weight)
    assert stored_bytes(weight) == Scheme().bytes_of(1536)
    assert stored_bytes(torch.zeros(3, dtype=torch.float64)) == 24


def test_it_keeps_the_sample_of_the_weight_that_it_was_made_of() -> None:
    original = torch.randn(48, 32).bfloat16()
    weight = pack(original, Scheme(), name="a")
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.kept, sample(original))
    assert not torch.equal(weight.kept, sample(weight.unpacked()))


def test_copies_and_moves_stay_packed() -> None:
    module = linear(Scheme(), settings="some")
    x = torch.randn(3, 32, dtype=torch.float64)
    twin = copy.deepcopy(module)
    assert packed_of(twin).codes is not packed_of(module).codes
    assert packed_of(twin).settings == "some"
    assert torch.equal(twin(x), module(x))
    moved = copy.deepcopy(module).to(torch.bfloat16)
    assert packed_of(moved).dtype == torch.bfloat16
    assert packed_of(moved).scales.dtype == packed_of(module).scales.dtype
    assert torch.equal(packed_of(moved).unpacked(), packed_of(module).unpacked(torch.bfloat16))
    assert list(module.state_dict()) == ["weight", "bias"]
    meta = copy.deepcopy(module).to("meta")
    assert packed_of(meta).is_meta
    assert stored_bytes(meta.weight) == stored_bytes(module.weight)
    assert isinstance(moved.weight, nn.Parameter)


def test_on_the_meta_device() -> None:
    weight = pack(torch.empty(48, 32, device="meta"), Scheme(), name="a")
    assert F.linear(torch.empty(2, 32, device="meta"), weight).shape == (2, 48)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.data.copy_(torch.zeros(48, 32)),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: torch.nn.init.zeros_(w),
        lambda w: w.zero_(),
        lambda w: torch.add(torch.ones(48, 32), 1, out=w),
    ],
)
def test_writing_is_refused(write: Callable[[Tensor], object]) -> None:
    weight = linear(Scheme(), torch.float32).weight
    before = weight.unpacked()
    with pytest.raises(TechniqueError, match="cannot be written"), torch.no_grad():
        write(weight)
    assert torch.equal(weight.unpacked(), before)


def test_training_is_refused() -> None:
    weight = linear(Scheme()).weight
    with pytest.raises(TechniqueError, match="cannot train"):
        weight.requires_grad_(True)
    with pytest.raises(TechniqueError, match="cannot train"):
        weight.requires_grad = True
    assert not weight.requires_grad_(False).requires_grad


def test_saving_it_as_a_weight_is_refused() -> None:
    with pytest.raises(TechniqueError, match="cannot be saved as it is"):
        save({"weight": linear(Scheme()).weight})


def test_what_is_not_finite_is_refused_by_name() -> None:
    weight = torch.zeros(4, 64)
    weight[0, 0] = torch.nan
    with pytest.raises(TechniqueError, match=r"layers\.0\.weight .* NaN") as caught:
        pack(weight, Scheme(), name="layers.0.weight")
    assert "quantize.exclude" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
def test_compiled_equals_eager(scheme: Scheme) -> None:
    module = linear(scheme)
    compiled: Any = torch.compile(module, dynamic=True, fullgraph=True)
    for one, other in zip(
        both_ways(compiled, module.bias), both_ways(module, module.bias), strict=True
    ):
        assert (one - other).abs().max() <= 1e-12
