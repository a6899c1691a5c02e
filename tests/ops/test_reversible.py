"""Streams that come back: bit for bit, in few bits, and with the gradients of the slow reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.errors import RunError
from afina.ops import reference
from afina.ops.reversible import Grid, Step, before, following, marks, pack, side_bits, unpack
from afina.ops.reversible_pass import Follow, Front, Way

F64 = torch.float64
ROWS, TOKENS, WIDTH = 2, 5, 8


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 4, 8)])
def test_side_bits_lie_without_gaps_and_come_back(bits: int, shape: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(bits)
    digits = torch.randint(0, 2**bits, shape, generator=drawn, dtype=torch.uint8)
    packed = pack(digits, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == bits * -(-digits.numel() // 8)
    assert torch.equal(unpack(packed, bits, digits.shape), digits)


def test_side_bits_are_the_lowest_digits_of_negative_numbers_too() -> None:
    grid = Grid(2, F64, F64)
    past = torch.tensor([-0.25, 0.25, 1.0, -1.75, 7.25], dtype=F64)
    found = side_bits(past, 3, grid)
    assert found.tolist() == [7, 1, 4, 1, 5]
    left = past * 4 - found
    assert torch.equal(left % 8, torch.zeros(5, dtype=F64))


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("blocks", [F64, torch.float32, torch.bfloat16], ids=str)
def test_the_state_before_comes_back_bit_for_bit(
    bits: int, dtype: torch.dtype, blocks: torch.dtype
) -> None:
    grid = Grid(9, dtype, blocks)
    past, cur = (grid.rounded(draw(ROWS, TOKENS, WIDTH, seed=n) * 40) for n in (1, 2))
    y = (cur + draw(ROWS, TOKENS, WIDTH, seed=3)).to(blocks)
    sign = torch.tensor([1.0, -1.0], dtype=dtype).view(2, 1, 1)
    step = Step(3, "block", sign * 2.0**-bits, 1 - sign * 2.0**-bits, 1 + sign * 2.0**-bits, bits)
    after, digits = following(past, cur, y, step, grid)
    assert torch.equal(after, grid.rounded(after))
    assert torch.equal(before(after, cur, y, step, grid, digits), past)
    # Without the side bits what multiplying lost is lost.
    assert digits is not None
    assert not torch.equal(before(after, cur, y, step, grid, torch.zeros_like(digits)), past)


def test_scaled_coupling_as_of_meft_does_not_come_back() -> None:
    """The control of the above: a = 0.1 is no power of two, and nothing was made divisible."""
    grid = Grid(9, F64, F64)
    past, cur = (grid.rounded(draw(ROWS, TOKENS, WIDTH, seed=n)) for n in (1, 2))
    after = grid.rounded(0.1 * past + cur)
    assert not torch.equal((after - cur) / 0.1, past)


@pytest.mark.parametrize("where", [0, 7])
def test_marks_see_one_number_that_is_off(where: int) -> None:
    grid = Grid(9, F64, F64)
    x = grid.rounded(draw(ROWS, TOKENS, WIDTH))
    other = x.clone()
    other[1, 2, where] += 2.0**-9
    wrong = (marks(x, grid) != marks(other, grid)).any(-1)
    assert wrong.nonzero().tolist() == [[1, 2]]
    swapped = x.flip(-1)  # equal sums, so the second one must tell
    assert (marks(x, grid)[..., 1] != marks(swapped, grid)[..., 1]).all()


# --- a whole pass ----------------------------------------------------------------------------------------------


def networks(count: int, dtype: torch.dtype = F64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).to(dtype)
        for _ in range(count)
    ]


def summed(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: x + network(x)


FACTORS = [torch.tensor([1.0, -1.0], dtype=F64).view(2, 1, 1) / 16 * (-1) ** k for k in range(4)]


def bdia(x: Tensor, calls: list[Callable[[Tensor], Tensor]], way: Way) -> Tensor:
    front = Front(x, way, (0.0, 1.0), "block 0")
    for place, call in enumerate(calls):

        def step_of(number: int, place: int = place) -> Step:
            if not place:
                return Step(number, "block 0", 0.0, 1.0, 1.0, first=True)
            past = FACTORS[place - 1]
            return Step(number, f"block {place}", past, 1 - past, 1 + past, 4)

        front.through(call, step_of)
    return front.leave()


def additive(x: Tensor, calls: list[Callable[[Tensor], Tensor]], way: Way) -> Tensor:
    front = Front(x, way, (0.5, 0.5), "block 0")
    for place, call in enumerate(calls):
        front.through(
            call, lambda n, place=place: Step(n, f"block {place}", 1.0, 0.0, 1.0, first=n == 1)
        )
    return front.leave()


@pytest.mark.parametrize("form", ["bdia", "additive"])
@pytest.mark.parametrize("checks", [True, False])
def test_a_pass_is_the_reference_in_values_and_gradients(form: str, checks: bool) -> None:
    nets = networks(5 if form == "bdia" else 6)
    calls = [summed(net) for net in nets]
    x = draw(ROWS, TOKENS, WIDTH).requires_grad_(True)
    done: list[bool] = []
    way = Way(Grid(12, F64, F64), checks, lambda: done.append(True))
    if form == "bdia":
        fast, slow = bdia(x, calls, way), reference.multi_bit_bdia(x, calls, FACTORS, 4, 12)
    else:
        halves = list(zip(nets[::2], nets[1::2], strict=True))
        fast, slow = additive(x, calls, way), reference.additive_coupling(x, halves, 12)
    assert torch.equal(fast, slow) if form == "bdia" else (fast - slow).abs().max() < 2.0**-12
    inputs = [x, *(p for net in nets for p in net.parameters())]
    seed = draw(ROWS, TOKENS, WIDTH, seed=9)
    for got, true in zip(
        torch.autograd.grad(fast, inputs, seed),
        torch.autograd.grad(slow, inputs, seed),
        strict=True,
    ):
        assert (got - true).abs().max() <= (1e-3 if form == "additive" else 1e-10)
    assert done == ([True] if checks else [])
    assert not way.states
    assert not way.digits


def test_a_second_backward_pass_and_two_passes_at_once() -> None:
    calls = [summed(net) for net in networks(5)]
    x = draw(ROWS, TOKENS, WIDTH).requires_grad_(True)
    grid = Grid(12, F64, F64)
    one, other = (bdia(x, calls, Way(grid, checks=True)) for _ in range(2))
    first = torch.autograd.grad(one.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(other.sum(), x)[0], first)
    assert torch.equal(torch.autograd.grad(one.sum(), x)[0], first)


def test_a_spoilt_side_bit_is_found_and_named(monkeypatch: Any) -> None:
    whole = Follow.backward

    def spoilt(ctx: Any, *gradients: Tensor) -> Any:
        found = whole(ctx, *gradients)
        if ctx.step.name == "block 3":
            packed = ctx.way.digits[ctx.step.number].clone()
            packed[2, 0] ^= 1
            ctx.way.digits[ctx.step.number] = packed
        return found

    monkeypatch.setattr(Follow, "backward", staticmethod(spoilt))
    calls = [summed(net) for net in networks(5)]
    x = draw(ROWS, TOKENS, WIDTH).requires_grad_(True)
    quiet = bdia(x, calls, Way(Grid(12, F64, F64)))
    torch.autograd.grad(quiet.sum(), x)  # nobody looked
    out = bdia(x, calls, Way(Grid(12, F64, F64), checks=True))
    with pytest.raises(RunError, match=r"what went into block 3 does not come back") as caught:
        out.sum().backward()
    assert "1 of 10 tokens differ" in str(caught.value.got)
    assert f"{2.0**-12:.3g}" in str(caught.value.got)


def test_a_block_that_says_something_else_again_is_found() -> None:
    calls = [summed(net) for net in networks(5)]
    times = [0]

    def moody(x: Tensor) -> Tensor:
        times[0] += 1
        return x + 0.1 * times[0] * x

    calls[2] = moody
    x = draw(ROWS, TOKENS, WIDTH).requires_grad_(True)
    out = bdia(x, calls, Way(Grid(12, F64, F64), checks=True))
    with pytest.raises(RunError, match="block 2 does not come back"):
        out.sum().backward()


def test_a_block_that_keeps_nothing_for_its_gradient_is_run_again_all_the_same() -> None:
    nets = networks(5)
    calls = [summed(net) for net in nets]
    calls[3] = calls[2] = lambda x: 1.25 * x
    x = draw(ROWS, TOKENS, WIDTH).requires_grad_(True)
    done: list[bool] = []
    way = Way(Grid(12, F64, F64), checks=True, checked=lambda: done.append(True))
    fast, slow = bdia(x, calls, way), reference.multi_bit_bdia(x, calls, FACTORS, 4, 12)
    inputs = [x, *nets[0].parameters(), *nets[4].parameters()]
    found = zip(
        torch.autograd.grad(fast.sum(), inputs),
        torch.autograd.grad(slow.sum(), inputs),
        strict=True,
    )
    assert all((got - true).abs().max() < 1e-10 for got, true in found)
    assert done == [True]
    assert not way.calls


def test_states_too_large_for_the_type_are_refused_with_numbers() -> None:
    calls = [summed(net) for net in networks(3, torch.float32)]
    calls[1] = lambda x: x + 20_000.0
    x = draw(ROWS, TOKENS, WIDTH, dtype=torch.float32).requires_grad_(True)
    with pytest.raises(RunError, match="states behind block 1 are too large") as caught:
        bdia(x, calls, Way(Grid(9, torch.float32, torch.float32)))
    assert 20_000 < int(str(caught.value.got).replace(",", "")) < 24_000
    assert caught.value.wanted == "below 16,384"
    # What is no number is told by the loss.
    calls[1] = lambda x: x * torch.inf
    assert not bdia(x, calls, Way(Grid(9, torch.float32, torch.float32))).isfinite().any()


def test_what_needs_no_gradient_costs_nothing() -> None:
    """Blocks below the lowest that trains keep no side bits, and are not run again."""
    nets = networks(5)
    for net in nets[:3]:
        net.requires_grad_(False)
    runs = [0] * 5

    def counted(place: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            runs[place] += 1
            return x + nets[place](x)

        return call

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = bdia(
            draw(ROWS, TOKENS, WIDTH),
            [counted(n) for n in range(5)],
            Way(Grid(12, F64, F64), checks=True),
        )
    assert sum(t.dtype == torch.uint8 for t in saved) == 1  # block 4's; block 3 is the lowest
    out.sum().backward()
    assert runs == [1, 1, 1, 2, 2]
