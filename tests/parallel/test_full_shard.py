"""ZeRO stage 3: weights that are shared out, beside all that calls the model or runs it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from afina.config import ParallelSettings
from afina.errors import ConfigError, TechniqueError
from afina.models.blocks import Blocks, Recompute
from afina.models.forward import own_attention, packing
from afina.parallel.beside import refuse_techniques
from afina.parallel.copies import carried
from afina.parallel.full_shard import Sum
from afina.parallel.held import refuse_offload
from afina.parallel.plan import Plan
from afina.parallel.processes import Processes
from afina.parallel.runtime import OneProcess
from afina.parallel.units import units_of
from afina.seams.calls import instead
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.techniques.quantize import Quantize
from afina.train.ahead import made
from afina.train.loop import backward
from afina.train.passes import Passes
from afina.train.validate import mean_loss
from afina.train.window import Micro
from tests.parallel.parity import Case, Found, edited, joined, run, whole, windows, work_of
from tests.parallel.pool import Failed, Pool
from tests.parallel.test_zero import same
from tests.tiny import tiny_llama
from tests.train.kit import ragged_rows

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
        backward(work, made(work, mesh.share(windows(case)[0])), 0)
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
        then = backward(work, made(work, mesh.share(later)), 0).loss
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


# --- what is gathered ------------------------------------------------------------------------------------------


def here(tensors: Any) -> int:
    """Numbers of tensors that are in this process just now."""
    found = [t.detach().to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() for t in found)


def most_gathered(case: Case) -> tuple[int, int]:
    """Most numbers of the model in this process at once, looked at in every block, forward and backward; and all."""
    edit = edited(case)
    every = sum(p.numel() for p in edit.model.parameters())
    work = work_of(case, mesh := Processes(SHARED), edit)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, here(edit.model.parameters()))

    for block in edit.model.get_submodule("model.layers").children():
        block.get_submodule("mlp").register_forward_hook(look)
        block.get_submodule("mlp").register_full_backward_hook(look)
    with packing(edit.model, True):
        backward(work, made(work, mesh.share(windows(case)[0])), 0)
    look()
    return most, every


def test_no_process_ever_has_the_whole_model(pool: Pool) -> None:
    blocks = 6
    case = Case("full", None, model=(("num_hidden_layers", blocks),))
    edit = edited(case)
    block = here(edit.model.get_submodule("model.layers.0").parameters())
    around = here(edit.model.parameters()) - blocks * block
    for most, every in pool.run(2, most_gathered, case):
        # What lies outside of blocks, half of each block, the other half of this one, and of the next in advance.
        assert most <= around + blocks * block // 2 + 2 * block // 2 < every


# --- types and ties --------------------------------------------------------------------------------------------


def mixed(case: Case, settings: ParallelSettings | None) -> Gradients:
    """LoRA in fp32 in a model in bf16, whose norms train in place in bf16."""
    mesh: Any = OneProcess() if settings is None else Processes(settings)
    edit = apply(tiny_llama(dtype=torch.bfloat16), [MIXED], seed=5)
    with torch.no_grad():
        for name, tensor in edit.trainable().items():
            if name.endswith(".b"):
                tensor.fill_(0.01)
    work = work_of(case, mesh, edit)
    with packing(edit.model, True):
        backward(work, made(work, mesh.share(windows(case)[0])), 0)
        mesh.reduce(edit.trainable())
    return whole(mesh.own(edit.trainable()))


MIXED = LoRA(rank=3, modules_to_save=("input_layernorm", "norm"))


def test_a_frozen_half_precision_base_beside_fp32_adapters_and_norms_that_train(pool: Pool) -> None:
    # Each row by itself, for bf16 rounds by what lies beside it.
    case = Case("lora", 1)
    expected = mixed(case, None)
    assert {g.dtype for g in expected.values()} == {torch.float32, torch.bfloat16}
    for name, gradient in joined(pool.run(2, mixed, case, SHARED)).items():
        # Sums of seven rows: in bf16 in another order.
        near = (
            {"rtol": 0.03, "atol": 0.03}
            if gradient.dtype == torch.bfloat16
            else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(gradient, expected[name], **near)


def test_what_trains_in_another_type_is_gathered_by_itself() -> None:
    edit = apply(tiny_llama(dtype=torch.bfloat16), [MIXED], seed=5)
    names = [unit.name for unit in units_of(edit.model, edit.trainable())]
    assert names == [
        "model.layers.0.input_layernorm",
        "model.layers.0",
        "model.layers.1.input_layernorm",
        "model.layers.1",
    ]
    plain = apply(tiny_llama(), [LoRA(rank=3)], seed=5)
    assert [u.name for u in units_of(plain.model, plain.trainable())] == names[1::2]


def test_two_types_in_one_module_are_refused() -> None:
    edit = apply(tiny_llama(dtype=torch.bfloat16), [LoRA(rank=3, target=("q_proj",))], seed=5)
    weight = edit.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    both = {**edit.trainable(), "model.layers.0.self_attn.q_proj.weight": weight}
    with pytest.raises(ConfigError, match="two dtypes") as refused:
        units_of(edit.model, both)
    assert "train.dtype=fp32" in str(refused.value)


def test_tied_ends(pool: Pool) -> None:
    case = Case("full", 2, model=(("tie_word_embeddings", True),))
    same(case, pool.run(2, run, case, SHARED))


def scaled(settings: ParallelSettings | None) -> Gradients:
    """Of a model one of whose tensors is a number, which no process can have a part of."""
    mesh: Any = OneProcess() if settings is None else Processes(settings)
    model = tiny_llama()
    block = model.model.layers[0]
    block.register_parameter("gain", nn.Parameter(torch.tensor(1.5, dtype=torch.float64)))
    block.register_forward_hook(lambda module, args, out: out * module.gain)
    case = Case("full", 1)  # one process makes a pass more than the other
    work = work_of(case, mesh, apply(model, [Full()], seed=5))
    tensors = work.edit.trainable()
    with packing(model, True):
        backward(work, made(work, mesh.share(windows(case)[0])), 0)
        mesh.reduce(tensors)
        own = mesh.own(tensors)
        return {**whole(own), "norm": mesh.norm(own).reshape(1).double()}


def test_a_number_without_dimensions(pool: Pool) -> None:
    expected = scaled(None)
    assert expected["model.layers.0.gain"].shape == ()
    for zero in (1, 2, 3):
        settings = ParallelSettings.model_validate({"zero": zero})
        equal(pool.run(2, scaled, settings), expected)


# --- weights that lie elsewhere than they compute --------------------------------------------------------------


def offloaded(cases: Sequence[Case]) -> list[Found]:
    """The path of what lies in the CPU, gathered where it computes, which is the CPU here as well."""
    with mock.patch("afina.parallel.held.refuse_offload"):
        return [run(case, ParallelSettings(zero=3, offload=True), more=True) for case in cases]


def test_pieces_that_lie_in_the_cpu(pool: Pool) -> None:
    cases = [Case("lora", 2), Case("full", 2)]
    for case, found in zip(cases, zip(*pool.run(2, offloaded, cases), strict=True), strict=True):
        expected = run(case, None)
        equal([one.gradients for one in found], expected.gradients)
        assert found[0].losses == pytest.approx(expected.losses, abs=1e-9)


def test_batches_go_where_passes_run() -> None:
    meta, model = torch.device("meta"), tiny_llama()
    batch = Passes(model, True, False, 0, None, computes=meta).batch(ragged_rows(2))
    assert batch.tokens_BT.device == meta
    assert Passes(model, True, False, 0, None).device == torch.device("cpu")
    gpu = Processes(ParallelSettings(zero=3, offload=True), 2, rank=1, device="cuda")
    assert gpu.computes is not None
    assert gpu.computes.type == "cuda"
    assert Processes(ParallelSettings(zero=3), 2, rank=1, device="cuda").computes is None
    assert OneProcess().computes is None


def test_messages_of_nccl_go_from_the_gpu() -> None:
    group: Any = None
    with (
        mock.patch("torch.distributed.get_backend", return_value="nccl"),
        mock.patch.object(Tensor, "cuda", lambda tensor: tensor.to("meta")),
    ):
        assert carried(torch.ones(2), group).is_meta
    with mock.patch("torch.distributed.get_backend", return_value="gloo"):
        assert not carried(torch.ones(2), group).is_meta


def test_what_was_exchanged_cannot_be_put_back() -> None:
    model = tiny_llama()
    edit = apply(model, [Full()], seed=5)
    edit.renew()  # nothing is new: the originals are kept
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    edit.renew()
    with pytest.raises(TechniqueError, match="cannot undo"):
        edit.undo()


# --- what cannot be --------------------------------------------------------------------------------------------


def test_offload_without_a_gpu_is_refused() -> None:
    plan = Plan(shard=2, zero=3, offload=True)
    with pytest.raises(ConfigError, match="no GPU"):
        refuse_offload(plan, torch.device("cpu"))
    refuse_offload(plan, torch.device("cuda"))


def test_techniques_that_weights_cannot_be_shared_out_beside_are_refused() -> None:
    plan = Plan(shard=2, zero=3)
    for key in ("adalora", "reversible", "quantize"):
        with pytest.raises(ConfigError, match=f"{key} does not go with parallel.zero=3"):
            refuse_techniques(plan, ["lora", key])
        refuse_techniques(Plan(shard=2, zero=2), [key])
    refuse_techniques(plan, ["lora", "dora", "prefix"])


def test_packed_weights_and_models_without_blocks_are_refused() -> None:
    edit = apply(tiny_llama(dtype=torch.float32), [Quantize(), LoRA(rank=2)], seed=5)
    with pytest.raises(ConfigError, match="packed weights"):
        units_of(edit.model, edit.trainable())
    with pytest.raises(ConfigError, match="no stack of equal blocks"):
        units_of(nn.Sequential(nn.Linear(2, 2)), {})
