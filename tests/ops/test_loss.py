"""The head's loss in pieces is that of all logits at once, values and gradients, and holds no more than a piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afina.ops.loss import Part, linear_cross_entropy
from afina.ops.reference import token_losses
from afina.types import IGNORE
from tests.ops.test_tiles_memory import Ledger


def draw(
    positions: int,
    width: int,
    vocabulary: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, bias and targets, every fifth ignored."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, width, generator=random, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=random, dtype=torch.float64)
    targets = torch.randint(vocabulary, (positions,), generator=random)
    targets[::5] = IGNORE
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, scale: float, cap: Any
) -> Tensor:
    """All logits at once."""
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return token_losses(logits, targets)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    positions=st.integers(0, 13),
    width=st.integers(1, 7),
    vocabulary=st.integers(1, 19),
    piece=st.integers(1, 2000),
    scale=st.sampled_from([1.0, 0.3]),
    cap=st.sampled_from([None, 2.5]),
    biased=st.booleans(),
    trains=st.booleans(),
)
def test_pieces_equal_the_whole(
    positions: int,
    width: int,
    vocabulary: int,
    piece: int,
    scale: float,
    cap: float | None,
    biased: bool,
    trains: bool,
) -> None:
    hidden, weight, bias, targets = draw(positions, width, vocabulary, seed=positions)
    above = torch.linspace(-1, 2, positions, dtype=torch.float64)
    found: list[list[Tensor | None]] = []
    for fast in (True, False):
        leaves = [
            x.clone().requires_grad_(i == 0 or trains) for i, x in enumerate((hidden, weight, bias))
        ]
        h, w, b = leaves
        losses = (
            linear_cross_entropy(
                h,
                w,
                targets,
                bias_V=b if biased else None,
                scale=scale,
                softcap=cap,
                piece_bytes=piece,
            )
            if fast
            else reference(h, w, targets, b if biased else None, scale, cap)
        )
        (losses * above).sum().backward()
        found.append([losses.detach(), *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_an_ignored_position_has_no_loss_and_no_gradient() -> None:
    hidden, weight, _, targets = draw(6, 4, 9)
    hidden.requires_grad_(True)
    losses = linear_cross_entropy(hidden, weight, targets)
    losses.sum().backward()
    assert losses[0] == 0
    assert torch.equal(hidden.grad[0], torch.zeros(4, dtype=torch.float64))
    assert bool((hidden.grad[1] != 0).all())


@pytest.mark.parametrize("trains", [False, True])
def test_equals_torchs_own_with_a_piece_that_is_ignored_whole(trains: bool) -> None:
    """X1 of the known checks: fp64, 1e-12, and a vocabulary that no piece divides."""
    hidden, weight, _, targets = draw(14, 5, 19)
    targets[4:8] = IGNORE  # the second of the pieces of four
    found: list[list[Tensor]] = []
    for fast in (True, False):
        h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(trains)
        if fast:
            losses = linear_cross_entropy(h, w, targets, piece_bytes=4 * 19 * 8 + 5)
        else:
            losses = F.cross_entropy(h @ w.t(), targets, ignore_index=IGNORE, reduction="none")
        losses.sum().backward()
        grads = [leaf.grad for leaf in (h, w) if leaf.grad is not None]
        found.append([losses.detach(), *grads])
    assert len(found[0]) == 2 + trains
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert not found[0][1][4:8].any()


@pytest.mark.parametrize("trains", [False, True])
def test_what_comes_from_above_scales_the_gradient(trains: bool) -> None:
    """X3: half of the loss has half of its gradient, though that of a frozen head is made before it is known."""
    hidden, weight, _, targets = draw(9, 4, 11)
    found: dict[float, list[Tensor]] = {}
    for above in (1.0, 0.5):
        h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(trains)
        losses = linear_cross_entropy(h, w, targets, piece_bytes=300)
        losses.sum().backward(torch.tensor(above, dtype=torch.float64))
        found[above] = [leaf.grad for leaf in (h, w) if leaf.grad is not None]
    assert len(found[1.0]) == 1 + trains
    for whole, half in zip(found[1.0], found[0.5], strict=True):
        assert torch.equal(whole / 2, half)


def test_the_most_that_is_held_is_less_than_a_quarter_of_the_usual() -> None:
    """X2: at a vocabulary of 32,768, with pieces of the size that they have."""
    hidden, weight, _, targets = draw(1024, 2, 32768, dtype=torch.float32)
    most: list[int] = []
    for fast in (True, False):
        h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True)
        with Ledger() as ledger:
            losses = (
                linear_cross_entropy(h, w, targets)
                if fast
                else F.cross_entropy(h @ w.t(), targets, ignore_index=IGNORE, reduction="none")
            )
            losses.sum().backward()
        most.append(ledger.most)
    assert most[0] < most[1] / 4
    assert most[1] > 2 * 1024 * 32768 * 4  # the control: logits and their gradient are seen


class Widest(TorchDispatchMode):
    """The most numbers that one tensor made inside the block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


@pytest.mark.parametrize("trains", [False, True])
def test_no_tensor_is_wider_than_a_piece(trains: bool) -> None:
    hidden, weight, _, targets = draw(64, 8, 500, dtype=torch.float32)
    hidden.requires_grad_(True)
    weight.requires_grad_(trains)
    with Widest() as seen:
        linear_cross_entropy(hidden, weight, targets, piece_bytes=4 * 500 * 4).sum().backward()
    assert seen.numbers == 8 * 500  # the head itself, seen as its transpose; a piece has 4 · 500
    with Widest() as all_at_once:
        reference(hidden, weight, targets, None, 1.0, None).sum().backward()
    assert all_at_once.numbers == 64 * 500


def test_half_precision_is_as_near_to_the_truth_as_the_usual_way() -> None:
    hidden, weight, _, targets = draw(32, 16, 300, dtype=torch.bfloat16)
    truth = hidden.double().requires_grad_(True)
    reference(truth, weight.double(), targets, None, 1.0, None).sum().backward()
    errors: list[float] = []
    for fast in (True, False):
        mine = hidden.clone().requires_grad_(True)
        if fast:
            losses = linear_cross_entropy(mine, weight, targets, piece_bytes=9000)
        else:
            losses = reference(mine.float(), weight.float(), targets, None, 1.0, None)
        assert losses.dtype == torch.float32
        losses.sum().backward()
        errors.append(float((mine.grad.double() - truth.grad).norm() / truth.grad.norm()))
    assert errors[0] < 2e-2
    assert errors[1] < errors[0]  # the control: fp32 throughout is nearer, so the measure measures


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    hidden, weight, _, targets = draw(6, 4, 9)
    with pytest.raises(ValueError, match="do not belong together"):
        linear_cross_entropy(hidden, weight, targets[:5])


class Talk:
    """Threads that each have a part, and what they tell each other."""

    def __init__(self, parts: int) -> None:
        self.barrier = threading.Barrier(parts, timeout=30)
        self.told: dict[int, Tensor] = {}

    def all(self, part: int, put: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
        def say(value: Tensor) -> Tensor:
            self.told[part] = value.detach().clone()
            self.barrier.wait()
            found = put(torch.stack(list(self.told.values())))
            self.barrier.wait()
            return found

        return say


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("cap", [None, 2.5])
def test_parts_of_a_vocabulary_give_the_loss_of_the_whole(trains: bool, cap: float | None) -> None:
    hidden, weight, bias, targets = draw(14, 5, 18)
    h, w = hidden.clone().requires_grad_(True), weight.clone().requires_grad_(trains)
    whole = linear_cross_entropy(h, w, targets, bias_V=bias, scale=0.7, softcap=cap)
    (whole * torch.arange(14)).sum().backward()
    talk = Talk(3)

    def one(number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        mine = slice(number * 6, number * 6 + 6)
        h, w = hidden.clone().requires_grad_(True), weight[mine].clone().requires_grad_(trains)
        part = Part(
            number * 6,
            lambda x: x,
            talk.all(number, lambda x: x.amax(0)),
            talk.all(number, lambda x: x.sum(0)),
        )
        # Pieces of four positions.
        losses = linear_cross_entropy(
            h, w, targets, bias_V=bias[mine], scale=0.7, softcap=cap, part=part, piece_bytes=200
        )
        (losses * torch.arange(14)).sum().backward()
        assert h.grad is not None
        return losses.detach(), h.grad, w.grad

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(one, range(3)))
    for losses, _, _ in found:
        torch.testing.assert_close(losses, whole.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(f[1] for f in found), h.grad, rtol=0, atol=1e-12)
    if trains:
        together = torch.cat([f[2] for f in found if f[2] is not None])
        torch.testing.assert_close(together, w.grad, rtol=0, atol=1e-12)
    else:
        assert all(f[2] is None for f in found)
