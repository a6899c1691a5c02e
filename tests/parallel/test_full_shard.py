"""ZeRO stage 3: weights that are shared out, beside all that calls the model or runs it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.config import ParallelSettings
from afina.models.blocks import Blocks, Recompute
from afina.models.forward import own_attention, packing
from afina.parallel.full_shard import Sum
from afina.parallel.processes import Processes
from afina.parallel.runtime import OneProcess
from afina.seams.calls import instead
from afina.train.loop import backward
from afina.train.validate import mean_loss
from afina.train.window import Micro
from tests.parallel.parity import Case, Found, edited, joined, run, whole, windows, work_of
from tests.parallel.pool import Failed, Pool
from tests.parallel.test_zero import same

pytestmark = pytest.mark.dist

SHARED = ParallelSettings(zero=3)
Gradients = dict[str, Tensor]


def gradients(
    case: Case,
    settings: ParallelSettings | None,
    around: Callable[[nn.Module], Any],
    before: Callable[[nn.Module], None] = lambda model: None,
) -> Gradients:
    """Of the first window, with something around the passes, and something done before weights are shared out."""
    mesh: Any = OneProcess() if settings is None else Processes(settings)
    edit = edited(case)
    before(edit.model)
    work = work_of(case, mesh, edit)
    with packing(edit.model, True), around(edit.model):
        backward(work, mesh.share(windows(case)[0]), 0)
        mesh.reduce(edit.trainable())
        return whole(mesh.own(edit.trainable()))


def equal(found: Sequence[Gradients], expected: Gradients, *, atol: float = 1e-9) -> None:
    """Asserts that what processes know of gradients is what one process finds."""
    wholes = joined(found)
    assert wholes.keys() == expected.keys()
    for name, gradient in wholes.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=atol)


# --- recomputation ---------------------------------------------------------------------------------------------


def recomputed(how: Recompute, model: nn.Module) -> Any:
    return Blocks(model, how).running()


def all_recomputed(case: Case, hows: Sequence[Recompute]) -> list[Gradients]:
    return [gradients(case, SHARED, functools.partial(recomputed, how)) for how in hows]


@pytest.mark.parametrize("technique", ["lora", "full"])
def test_blocks_that_run_again_in_backward(pool: Pool, technique: str) -> None:
    case = Case(technique, 2)
    hows: list[Recompute] = [True, 2, "selective"]
    expected = gradients(case, None, functools.partial(recomputed, False))
    for found in zip(*pool.run(2, all_recomputed, case, hows), strict=True):
        equal(found, expected)


class Hidden(torch.autograd.Function):
    """A call that runs again in backward, and hides from autograd which tensors it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(again), grads)
        return again.grad, None


def hidden(model: nn.Module) -> Any:
    """The second block runs so."""

    def way(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, **rest: Hidden.apply(x, lambda state: call(state, **rest))

    return instead({model.get_submodule("model.layers.1"): way})


def hides(case: Case, settings: ParallelSettings | None) -> Gradients:
    return gradients(case, settings, hidden)


def test_a_function_that_calls_a_block_again_is_right(pool: Pool) -> None:
    case = Case("full", 2)
    expected = gradients(case, None, functools.partial(recomputed, False))
    equal(pool.run(2, hides, case, SHARED), expected)


class Closed(torch.autograd.Function):
    """x Wᵀ, where W is known to the function alone, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[nn.Parameter]) -> Tensor:
        ctx.held = held
        ctx.save_for_backward(x)
        return x @ held[0].T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.held[0]
        found = grads[0].flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad = found if weight.grad is None else weight.grad + found
        return grads[0] @ weight, None


def closed(case: Case, settings: ParallelSettings | None) -> Gradients:
    def close(model: nn.Module) -> None:
        linear: Any = model.get_submodule("model.layers.1.mlp.down_proj")
        held = [linear.weight]
        linear.forward = lambda x: Closed.apply(x, held)

    return gradients(case, settings, lambda model: nullcontext(), before=close)


def test_a_function_that_hides_its_tensors_is_seen(pool: Pool) -> None:
    """The control of this file: in one process such a function is right; beside shared-out weights it is wrong, and
    nothing but a comparison of gradients tells.
    """
    case = Case("full", 2)
    expected = gradients(case, None, functools.partial(recomputed, False))
    equal([closed(case, None)], expected)
    found = pool.run(2, closed, case, SHARED)
    with pytest.raises(AssertionError, match="not close"):
        equal(found, expected)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not joined(found)[name].any()


# --- passes of others ------------------------------------------------------------------------------------------


def validated(settings: ParallelSettings | None) -> tuple[float, list[int], float]:
    """Mean loss of rows of which each process has its own, what is generated, and the loss of a training pass after."""
    case = Case("lora", 1, rows=5)
    mesh: Any = OneProcess() if settings is None else Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    rows, later = windows(case)
    with packing(edit.model, True):
        loss = mean_loss(edit.model, work.cut(mesh.share(rows)), work.passes, mesh)
        with mesh.opened(), own_attention(edit.model, "eager"):
            model: Any = edit.model
            ids = model.generate(
                torch.tensor([[5, 9, 11]]), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        then = backward(work, mesh.share(later), 0).loss
    return loss, ids[0].tolist(), then


def test_validation_and_generation(pool: Pool) -> None:
    expected = validated(None)
    for found in pool.run(2, validated, SHARED):
        assert found[0] == pytest.approx(expected[0], abs=1e-9)
        assert found[1] == expected[1]
        assert found[2] == pytest.approx(expected[2], abs=1e-9)


def idles_badly(case: Case, silent: bool) -> Found:
    """A process without rows makes a pass whose loss is not a number."""

    def bad(micro: Micro) -> Tensor:
        passes = micro.work.passes
        return passes.losses(passes.idle()).sum() * float("nan")

    class Wrong(Processes):
        def hold(self, model: nn.Module, tensors: Any) -> None:
            super().hold(model, tensors)
            held: Any = self._held
            if not silent:
                held._sum.__class__ = Loud

    kept, Micro.idle = Micro.idle, bad  # type: ignore[method-assign]
    try:
        return run(case, SHARED, make=Wrong)
    finally:
        Micro.idle = kept  # type: ignore[method-assign]


class Loud(Sum):
    """Sends what is there."""

    silent = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


def test_nothing_comes_from_a_pass_without_rows(pool: Pool) -> None:
    case = Case("full", 1, rows=2, steps=1)
    same(case, pool.run(3, idles_badly, case, True))
    with pytest.raises((AssertionError, Failed)):
        same(case, pool.run(3, idles_badly, case, False))
