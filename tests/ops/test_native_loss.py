"""The loss's kernel is as near to the truth as the same in torch, and says the same each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from afina.ops import native
from afina.ops.loss import linear_cross_entropy
from afina.ops.native import loss as kernel
from afina.ops.native.rooms import STEP, rooms
from afina.types import IGNORE
from tests.ops.test_loss import reference
from tests.ops.test_tiles_memory import Ledger

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=str(native.missing())),
    pytest.mark.usefixtures("multiplies"),
]

POSITIONS, WIDTH = 37, 64


@dataclass(frozen=True)
class Form:
    """Of a head: its vocabulary (which sixteen does not divide), and how logits follow from products."""

    vocabulary: int = 1003
    scale: float = 1.0
    cap: float | None = None
    bias: torch.dtype | None = None
    trains: bool = False
    bias_trains: bool = False


FORMS = {
    "plain": Form(),
    "whole registers": Form(vocabulary=1024),
    "less than a register": Form(vocabulary=5),
    "scaled": Form(scale=0.25),
    "scaled below zero": Form(scale=-0.5),
    "capped": Form(scale=1.5, cap=6.0),
    "biased": Form(bias=torch.bfloat16),
    "biased in fp32, capped": Form(bias=torch.float32, cap=6.0, scale=0.5),
    "trained": Form(trains=True),
    "trained, biased, capped": Form(bias=torch.bfloat16, cap=6.0, trains=True),
    "trained with its bias": Form(bias=torch.bfloat16, trains=True, bias_trains=True),
}
LEAVES = ("hidden", "weight", "bias")


def draw(form: Form) -> tuple[list[Tensor | None], Tensor]:
    """Hidden states, head and bias as bf16 has them, and targets, every fifth ignored."""
    random = torch.Generator().manual_seed(form.vocabulary)
    hidden = torch.randn(POSITIONS, WIDTH, generator=random).bfloat16()
    weight = (torch.randn(form.vocabulary, WIDTH, generator=random) * 0.4).bfloat16()
    bias = None
    if form.bias is not None:
        bias = torch.randn(form.vocabulary, generator=random).bfloat16().to(form.bias)
    targets = torch.randint(form.vocabulary, (POSITIONS,), generator=random)
    targets[::5] = IGNORE
    return [hidden, weight, bias], targets


def results(
    way: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], form: Form, wide: bool = False
) -> dict[str, Tensor]:
    """Losses and gradients; `wide` is in fp64."""
    drawn, targets = draw(form)
    leaves = [None if x is None else (x.double() if wide else x.clone()) for x in drawn]
    for leaf in leaves[: 1 + form.trains + form.bias_trains]:
        if leaf is not None:
            leaf.requires_grad_()
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None
    losses = way(hidden, weight, targets, bias)
    (losses * torch.linspace(0.5, 2, POSITIONS)).sum().backward()
    found = {"losses": losses.detach()}
    for name, leaf in zip(LEAVES, leaves, strict=True):
        if leaf is not None and leaf.grad is not None:
            found[name] = leaf.grad
    return found


def ours(form: Form, switched: bool = True) -> dict[str, Tensor]:
    """By the kernel, or without it by its twin in torch; pieces of eight positions."""

    def way(h: Tensor, w: Tensor, targets: Tensor, b: Tensor | None) -> Tensor:
        size = 8 * form.vocabulary * (2 if switched else 4)
        return linear_cross_entropy(
            h, w, targets, bias_V=b, scale=form.scale, softcap=form.cap, piece_bytes=size
        )

    with nullcontext() if switched else native.off():
        return results(way, form)


def truth(form: Form) -> dict[str, Tensor]:
    """In fp64, from the same numbers."""
    return results(
        lambda h, w, targets, b: reference(h, w, targets, b, form.scale, form.cap), form, True
    )


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_further_from_the_truth_than_torch(form: Form) -> None:
    mine, twin, true = ours(form), ours(form, False), truth(form)
    assert mine.keys() == twin.keys() == true.keys()
    for name in true:
        assert mine[name].dtype == twin[name].dtype
        far = error(twin[name], true[name])
        assert error(mine[name], true[name]) <= 1.2 * far, name
        assert far < 2e-2


def test_the_measure_sees_a_wrong_form() -> None:
    """The control: a cap that is left out is further from the truth than any rounding."""
    true = truth(FORMS["capped"])
    wrong = ours(Form(scale=1.5))
    for name in true:
        assert error(wrong[name], true[name]) > 5e-2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_ignored_position_has_no_loss_and_no_gradient(form: Form) -> None:
    mine = ours(form)
    assert not mine["losses"][::5].any()
    assert not mine["hidden"][::5].any()
    assert bool((mine["losses"][1::5] != 0).all())


def test_says_the_same_each_time_and_with_any_number_of_threads() -> None:
    form, threads = FORMS["trained, biased, capped"], torch.get_num_threads()
    drawn, targets = draw(form)
    assert drawn[0] is not None
    assert drawn[1] is not None
    products = drawn[0] @ drawn[1].t()
    found: list[tuple[Tensor, Tensor]] = []
    try:
        for number in (1, 2, 3, 2):
            torch.set_num_threads(number)
            slopes = products.clone()
            losses = kernel.losses_(slopes, targets, bias_V=drawn[2], softcap=6.0, slopes=True)
            found.append((losses, slopes))
    finally:
        torch.set_num_threads(threads)
    for losses, slopes in found[1:]:
        assert torch.equal(losses, found[0][0])
        assert torch.equal(slopes, found[0][1])


def test_slopes_are_those_of_the_products_rounded_once() -> None:
    """Products far apart, and factors from above: sums and shares of almost one are those of fp64."""
    random = torch.Generator().manual_seed(3)
    products = (torch.randn(9, 777, generator=random) * 20).bfloat16()
    targets = torch.randint(777, (9,), generator=random)
    targets[:4] = products[:4].float().argmax(1)  # shares of almost one
    above = torch.linspace(-2, 3, 9)
    true = products.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(true, targets, reduction="none")
    (losses * above).sum().backward()
    slopes = products.clone()
    found = kernel.losses_(slopes, targets, above_C=above, slopes=True)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(slopes.double(), true.grad, rtol=2**-8, atol=3e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_product_that_is_no_number_is_told_by_its_row_alone(bad: float) -> None:
    products = torch.zeros(3, 50).bfloat16()
    products[1, 7] = bad
    losses = kernel.losses_(products, torch.tensor([1, 2, 3]), slopes=True)
    assert losses.isfinite().tolist() == [True, False, True]
    assert products.isfinite().all(1).tolist() == [True, False, True]


def test_a_product_of_minus_infinity_has_no_share() -> None:
    products = torch.zeros(1, 50).bfloat16()
    products[0, 7] = -torch.inf
    losses = kernel.losses_(products, torch.tensor([1]), slopes=True)
    torch.testing.assert_close(losses, torch.tensor([49.0]).log())
    assert products[0, 7] == 0


@pytest.mark.parametrize("target", [-1, 50])
def test_a_target_that_is_no_id_is_refused(target: int) -> None:
    products = torch.zeros(2, 50).bfloat16()
    with pytest.raises(IndexError, match="none of the 50 ids"):
        kernel.losses_(products, torch.tensor([1, target]))


def test_nothing_is_held_beside_the_products() -> None:
    form, piece = Form(vocabulary=5000), POSITIONS * 5000 * 2
    drawn, targets = draw(form)
    hidden, weight, _ = drawn
    assert hidden is not None
    assert weight is not None
    most: dict[bool, int] = {}
    rooms.clear()
    for switched in (True, False):
        leaf = hidden.clone().requires_grad_()
        with nullcontext() if switched else native.off(), Ledger() as ledger:
            linear_cross_entropy(leaf, weight, targets).sum().backward()
        most[switched] = ledger.most - 2 * weight.numel()  # the head, seen as its transpose
    assert piece <= most[True] < 1.1 * piece + 2 * STEP  # rooms are rounded up
    assert most[False] >= 3 * piece  # the control: its twin in torch has fp32 beside them
