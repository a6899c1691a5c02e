"""The low-rank path with its own backward is the map with the changed weight written out; gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from afina.ops.lowrank import dropout_mask, expand_add, joined, low_rank_add, project
from afina.ops.reference import low_rank_linear

F64 = torch.float64


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=random, dtype=F64).requires_grad_(True) for s in shapes]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lead=st.sampled_from([(5,), (2, 3), (1, 1), (2, 1, 4)]),
    width=st.integers(1, 9),
    out=st.integers(1, 9),
    rank=st.integers(1, 4),
    scaling=st.sampled_from([1.0, 2.0, 0.125]),
)
def test_equals_the_changed_weight(
    lead: tuple[int, ...], width: int, out: int, rank: int, scaling: float
) -> None:
    x, weight, a, b = draw((*lead, width), (out, width), (rank, width), (out, rank))
    frozen = weight.detach()
    above = torch.linspace(-1, 1, out, dtype=F64)
    fast = low_rank_add(x, F.linear(x, frozen), a, b, scaling)
    mine = torch.autograd.grad((fast * above).sum(), [x, a, b])
    slow = low_rank_linear(x, frozen, a, b, scaling)
    theirs = torch.autograd.grad((slow * above).sum(), [x, a, b])
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("neighbours", [False, True])
def test_maps_that_share_their_input_are_one_product(neighbours: bool) -> None:
    x, a1, a2, b1, b2 = draw((4, 6), (2, 6), (3, 6), (5, 2), (7, 3))
    if neighbours:  # as views of one buffer
        buffer = torch.cat([a1.detach().flatten(), a2.detach().flatten()])
        a1 = buffer[:12].view(2, 6).requires_grad_(True)
        a2 = buffer[12:].view(3, 6).requires_grad_(True)
        assert joined([a1, a2]).data_ptr() == a1.data_ptr()
    else:
        assert joined([a1, a2]).data_ptr() != a1.data_ptr()
    assert torch.equal(joined([a1, a2]), torch.cat([a1, a2]))
    zeros = [torch.zeros(4, 5, dtype=F64), torch.zeros(4, 7, dtype=F64)]
    h1, h2 = project(x, [a1, a2])
    fast = [expand_add(h1, zeros[0], b1, 2.0), expand_add(h2, zeros[1], b2, 0.5)]
    slow = [2.0 * x @ a1.t() @ b1.t(), 0.5 * x @ a2.t() @ b2.t()]
    leaves = [x, a1, a2, b1, b2]
    mine = torch.autograd.grad(sum(y.square().sum() for y in fast), leaves)
    theirs = torch.autograd.grad(sum(y.square().sum() for y in slow), leaves)
    for one, other in zip([*fast, *mine], [*slow, *theirs], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_neighbours_in_another_order_are_copied() -> None:
    buffer = torch.arange(12.0, dtype=F64)
    first, second = buffer[:6].view(1, 6), buffer[6:].view(1, 6)
    assert torch.equal(joined([second, first]), torch.stack([buffer[6:], buffer[:6]]))


def saved_numbers(run: Any) -> dict[int, int]:
    """Sizes of the tensors that backward keeps, each piece of memory once."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.itemsize
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept


def test_nothing_is_saved_beyond_the_input_and_its_projection() -> None:
    x, weight, a, b = draw((50, 30), (40, 30), (3, 30), (40, 3))
    frozen = weight.detach()

    def fast() -> Tensor:
        return low_rank_add(x, F.linear(x, frozen), a, b, 2.0, dropout=0.5)

    def usual() -> Tensor:
        return F.linear(x, frozen) + F.linear(F.linear(F.dropout(x, 0.5), a), b) * 2.0

    weights = {t.untyped_storage().data_ptr() for t in (frozen, a, b)}
    numbers = [n for place, n in saved_numbers(fast).items() if place not in weights]
    assert sorted(numbers) == [50 * 3, 50 * 30]
    usual_numbers = [n for place, n in saved_numbers(usual).items() if place not in weights]
    assert sum(usual_numbers) > sum(numbers)


def test_the_output_is_written_in_place_where_it_may_be() -> None:
    x, a, b = draw((4, 6), (2, 6), (5, 2))
    y = torch.zeros(4, 5, dtype=F64)
    assert low_rank_add(x, y, a, b, 1.0).data_ptr() == y.data_ptr()
    leaf = torch.zeros(4, 5, dtype=F64, requires_grad=True)
    assert low_rank_add(x, leaf, a, b, 1.0).data_ptr() != leaf.data_ptr()
    slanted = torch.zeros(5, 4, dtype=F64).t()
    torch.testing.assert_close(low_rank_add(x, slanted, a, b, 1.0), (x @ a.t() @ b.t()).detach())


def test_an_output_that_is_a_view_has_its_gradients() -> None:
    """As that of GPT-2's maps is."""
    x, weight, a, b = draw((2, 3, 6), (6, 5), (2, 6), (5, 2))
    frozen = weight.detach()

    def run(fast: bool) -> Tensor:
        flat = torch.addmm(torch.ones(5, dtype=F64), x.view(-1, 6), frozen)
        y = flat.view(2, 3, 5)
        return low_rank_add(x, y, a, b, 2.0) if fast else y + 2.0 * x @ a.t() @ b.t()

    pair = [torch.autograd.grad(run(fast).square().sum(), [x, a, b]) for fast in (True, False)]
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_dropout_is_the_mask_of_its_seed_forward_and_backward() -> None:
    x, a, b = draw((6, 8), (2, 8), (5, 2))
    torch.manual_seed(3)
    fast = low_rank_add(x, torch.zeros(6, 5, dtype=F64), a, b, 2.0, dropout=0.25)
    mine = torch.autograd.grad(fast.square().sum(), [x, a, b])
    torch.manual_seed(3)
    mask = dropout_mask(x, 0.25, int(torch.randint(2**62, ())))
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.75}
    slow = 2.0 * (x * mask) @ a.t() @ b.t()
    theirs = torch.autograd.grad(slow.square().sum(), [x, a, b])
    for one, other in zip([fast, *mine], [slow, *theirs], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.manual_seed(4)
    other_draw = low_rank_add(x, torch.zeros(6, 5, dtype=F64), a, b, 2.0, dropout=0.25)
    assert not torch.equal(other_draw, fast)


def test_dropout_keeps_the_mean() -> None:
    mask = dropout_mask(torch.zeros(200, 200, dtype=F64), 0.3, 7)
    assert abs(float(mask.mean()) - 1) < 0.01
    assert abs(float((mask == 0).double().mean()) - 0.3) < 0.01


def test_recomputation_gives_the_same_gradients() -> None:
    x, weight, a, b = draw((6, 8), (5, 8), (2, 8), (5, 2))

    def run(x: Tensor) -> Tensor:
        return low_rank_add(x, F.linear(x, weight.detach()), a, b, 2.0, dropout=0.5).tanh()

    torch.manual_seed(1)
    plain = torch.autograd.grad(run(x).sum(), [x, a, b])
    torch.manual_seed(1)
    again: Any = checkpoint(run, x, use_reentrant=False)
    for one, other in zip(plain, torch.autograd.grad(again.sum(), [x, a, b]), strict=True):
        assert torch.equal(one, other)


def test_wide_weights_beside_a_narrow_base() -> None:
    x, weight, a, b = draw((16, 24), (20, 24), (4, 24), (20, 4))
    narrow = x.detach().bfloat16().requires_grad_(True)
    a32, b32 = (t.detach().float().requires_grad_(True) for t in (a, b))
    y = low_rank_add(narrow, F.linear(narrow, weight.detach().bfloat16()), a32, b32, 0.5)
    assert y.dtype == torch.bfloat16
    mine = torch.autograd.grad(y.float().sum(), [narrow, a32, b32])
    assert [g.dtype for g in mine] == [torch.bfloat16, torch.float32, torch.float32]
    slow = low_rank_linear(x, weight.detach(), a, b, 0.5)
    for one, other in zip(mine, torch.autograd.grad(slow.sum(), [x, a, b]), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-2


class Placed(Tensor):
    """Stands for a distributed tensor."""


def test_other_kinds_of_tensor_go_the_slower_way() -> None:
    x, a, b = draw((4, 6), (2, 6), (5, 2))
    placed = a.detach().as_subclass(Placed).requires_grad_(True)
    y = low_rank_add(x, torch.zeros(4, 5, dtype=F64), placed, b, 2.0)
    torch.testing.assert_close(y.as_subclass(Tensor), 2.0 * x @ a.t() @ b.t())


def test_a_frozen_side_gets_no_gradient() -> None:
    x, a, b = draw((4, 6), (2, 6), (5, 2))
    y = low_rank_add(x.detach(), torch.zeros(4, 5, dtype=F64), a.detach(), b, 1.0)
    (db,) = torch.autograd.grad(y.sum(), [b])
    torch.testing.assert_close(db, torch.ones(5, 4, dtype=F64) @ (x @ a.t()).detach())
