"""Optimisers by name: equal to torch's own, through masters where the tensor is half, kept bitwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.errors import ConfigError
from afina.optim import optimisers
from afina.optim.optimisers import Optimiser
from tests import battery

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    sizes = {"x": (3, 4), "x.y": (5,), "z": (2, 2)}
    return {n: nn.Parameter(torch.randn(s).to(dtype)) for n, s in sizes.items()}


def gradients(own: Mapping[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in own.values():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def run(optimiser: Optimiser, own: Mapping[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        gradients(own, step)
        optimiser.set_lr(0.01 * (step + 1))
        optimiser.step()


def values(own: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in own.items()}


def test_equals_adamw_of_torch_step_by_step() -> None:
    mine, theirs = tensors(), tensors()
    optimiser = Optimiser(mine, {}, "adamw", OPTIONS)
    peer = torch.optim.AdamW(list(theirs.values()), fused=True, **OPTIONS)
    for step in range(5):
        run(optimiser, mine, range(step, step + 1))
        gradients(theirs, step)
        peer.param_groups[0]["lr"] = 0.01 * (step + 1)
        peer.step()
        for name in mine:
            assert torch.equal(mine[name], theirs[name])


def test_one_step_of_adamw_by_hand() -> None:
    x = nn.Parameter(torch.tensor([2.0]))
    optimiser = Optimiser({"x": x}, {}, "AdamW", OPTIONS)
    optimiser.set_lr(0.5)
    x.grad = torch.tensor([3.0])
    optimiser.step()
    # Decay 2·(1 − 0.5·0.1), then one full step of lr against the gradient's sign.
    assert x.item() == pytest.approx(2 * 0.95 - 0.5, abs=1e-6)


def test_groups_take_their_multiple_of_the_rate() -> None:
    own = tensors()
    optimiser = Optimiser(own, {"x": 1.0, "z": 16.0}, "sgd", {})
    before = values(own)
    gradients(own, 0)
    optimiser.set_lr(0.01)
    optimiser.step()
    for name, scale in {"x": 1, "x.y": 1, "z": 16}.items():
        slope = own[name].grad
        assert slope is not None
        torch.testing.assert_close(own[name].detach(), before[name] - 0.01 * scale * slope)


def test_loraplus_reaches_the_groups() -> None:
    from afina.table import apply
    from afina.techniques.lora import LoRA

    edit = apply(battery.build("llama"), [LoRA(rank=2, loraplus_ratio=16)])
    optimiser = Optimiser(edit.trainable(), edit.lr_scales(), "adamw", OPTIONS)
    optimiser.set_lr(1e-3)
    rates = {id(p): group["lr"] for group in optimiser.inner.param_groups for p in group["params"]}
    for name, parameter in edit.trainable().items():
        assert rates[id(parameter)] == pytest.approx(16e-3 if name.endswith(".b") else 1e-3)


def small_steps(parameter: nn.Parameter, optimiser: Any, steps: int = 50) -> float:
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimiser.step()
    return parameter.item()


def test_half_precision_trains_through_masters() -> None:
    # Near 1 the spacing of bf16 is 1/128: steps of 0.001 vanish in it, 50 of them do not in the master.
    x = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimiser = Optimiser({"x": x}, {}, "sgd", {})
    optimiser.set_lr(0.001)
    assert small_steps(x, optimiser) == pytest.approx(0.95, abs=1 / 256)
    assert optimiser.state_tensors()["x.master"].item() == pytest.approx(0.95, abs=1e-5)
    bare = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert small_steps(bare, torch.optim.SGD([bare], lr=0.001)) == 1.0


@pytest.mark.parametrize("bunch", [1, 9, 10**6])
def test_tensors_with_masters_move_in_bunches_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch, bunch: int
) -> None:
    monkeypatch.setattr(optimisers, "BUNCH", bunch)
    own, wide = tensors(torch.bfloat16), tensors(torch.bfloat16)
    none = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
    optimiser = Optimiser({"none": none, **own}, {"z": 16.0}, "adamw", OPTIONS)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in wide.items()}
    groups = [{"params": [masters["x"], masters["x.y"]]}, {"params": [masters["z"]]}]
    peer = torch.optim.AdamW(groups, fused=True, **OPTIONS)
    for step in range(3):
        run(optimiser, own, range(step, step + 1))
        gradients(wide, step)
        for name, master in masters.items():
            slope = wide[name].grad
            assert slope is not None
            master.grad = slope.float()
        for group, scale in zip(peer.param_groups, (1, 16), strict=True):
            group["lr"] = 0.01 * (step + 1) * scale
        peer.step()
        for name in own:
            assert torch.equal(own[name], masters[name].bfloat16())
            assert torch.equal(optimiser.state_tensors()[f"{name}.master"], masters[name])


def test_a_tensor_without_gradient_is_left_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        own = tensors(dtype)
        optimiser = Optimiser(own, {}, "adamw", OPTIONS)
        gradients(own, 0)
        own["z"].grad = None
        before = values(own)
        optimiser.set_lr(0.1)
        optimiser.step()
        assert torch.equal(own["z"], before["z"])
        assert not torch.equal(own["x"], before["x"])
        optimiser.clear_gradients()
        assert all(p.grad is None for p in own.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "adafactor"]
)
def test_kept_state_goes_on_bitwise(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS | ({"momentum": 0.9} if name in ("sgd", "rmsprop") else {})
    if name == "adafactor":
        options = {}
    straight = tensors(dtype)
    whole = Optimiser(straight, {"z": 2.0}, name, options)
    run(whole, straight, range(3))
    kept = {k: v.clone() for k, v in whole.state_tensors().items()}
    middle = values(straight)
    run(whole, straight, range(3, 6))

    again = {n: nn.Parameter(middle[n].clone()) for n in middle}
    resumed = Optimiser(again, {"z": 2.0}, name, options)
    resumed.load_state_tensors(kept)
    run(resumed, again, range(3, 6))
    for n in straight:
        assert torch.equal(straight[n], again[n]), n
    assert set(resumed.state_tensors()) == set(whole.state_tensors())
    for key, value in whole.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[key], value), key


def test_kept_state_goes_to_the_device_of_its_tensor() -> None:
    """It comes from a file, so from the CPU. (The meta device stands for a GPU here; its kernels are not fused.)"""
    own = tensors()
    optimiser = Optimiser(own, {}, "adamw", OPTIONS)
    run(optimiser, own, range(1))
    elsewhere = {n: nn.Parameter(p.detach().to("meta")) for n, p in own.items()}
    other = Optimiser(elsewhere, {}, "adamw", OPTIONS)
    other.load_state_tensors(optimiser.state_tensors())
    for parameter in elsewhere.values():
        state = other.inner.state[parameter]
        assert state["exp_avg"].device.type == "meta"
        assert state["exp_avg_sq"].device.type == "meta"
        assert state["step"].device.type == "cpu"


def test_without_its_state_it_would_go_on_differently() -> None:
    straight = tensors()
    whole = Optimiser(straight, {}, "adamw", OPTIONS)
    run(whole, straight, range(3))
    again = {n: nn.Parameter(v) for n, v in values(straight).items()}
    run(whole, straight, range(3, 6))
    run(Optimiser(again, {}, "adamw", OPTIONS), again, range(3, 6))
    assert not torch.equal(straight["x"], again["x"])


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Optimiser(tensors(), {}, "adam_w", {})
    assert "'adam_w'" in str(caught.value)
    assert "adamw" in str(caught.value.wanted)


@pytest.mark.parametrize("name", ["lbfgs", "SparseAdam", "optimizer"])
def test_what_the_loop_cannot_drive_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer"):
        Optimiser(tensors(), {}, name, {})


@pytest.mark.parametrize("name", sorted(optimisers.kinds()))
def test_every_optimiser_that_is_offered_moves_a_matrix(name: str) -> None:
    """With all the options of the settings; Adafactor's two eps are not the one that these have."""
    own = {"x": tensors()["x"]}
    before = values(own)
    run(Optimiser(own, {}, name, OPTIONS), own, range(2))
    assert not torch.equal(own["x"], before["x"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(optimisers.kinds()))
def test_tensors_that_move_one_by_one_move_as_all_at_once(name: str, dtype: torch.dtype) -> None:
    at_once, one_by_one = (
        {n: own[n] for n in ("x", "z")} for own in (tensors(dtype), tensors(dtype))
    )
    whole, parts = (Optimiser(own, {"z": 2.0}, name, OPTIONS) for own in (at_once, one_by_one))
    for step in range(3):
        run(whole, at_once, range(step, step + 1))
        gradients(one_by_one, step)
        parts.set_lr(0.01 * (step + 1))
        for n in reversed(one_by_one):
            others = values(one_by_one)
            parts.step_of(n)
            moved = [o for o in others if not torch.equal(one_by_one[o], others[o])]
            # Adadelta's first steps are smaller than the spacing of bf16.
            assert moved == [n] or (not moved and dtype == torch.bfloat16)
            one_by_one[n].grad = None
    for n in at_once:
        assert torch.equal(at_once[n], one_by_one[n])
    for key, value in whole.state_tensors().items():
        assert torch.equal(parts.state_tensors()[key], value), key


def test_what_an_optimiser_takes_is_asked_of_it() -> None:
    found = {n: optimisers.takes(optimisers.kind_of(n), "betas") for n in ("AdamW", "sgd")}
    assert found == {"AdamW": True, "sgd": False}
    assert optimisers.takes(optimisers.kind_of("rmsprop"), "eps")
    assert not optimisers.takes(optimisers.kind_of("adafactor"), "eps")


def test_tensors_that_an_optimiser_cannot_train_are_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="Muon cannot train these tensors") as caught:
        Optimiser(tensors(), {}, "muon", OPTIONS)
    assert "adamw" in str(caught.value.cure)


@pytest.mark.parametrize("name", sorted(optimisers.kinds()))
def test_a_step_of_pieces_is_a_step_of_the_whole_where_it_is_said_to_be(name: str) -> None:
    def steps(cut: bool) -> list[Tensor]:
        torch.manual_seed(0)
        wholes = [torch.randn(5, 4), torch.randn(7, 3)]
        # Uneven pieces, and for those that can have it an empty one.
        ends = (3,) if name in optimisers.WHOLE else (3, 0)
        parts = [[*w.chunk(3), *(w[:0] for _ in ends[1:])] if cut else [w] for w in wholes]
        own = {f"{i}.{j}": nn.Parameter(p) for i, ps in enumerate(parts) for j, p in enumerate(ps)}
        optimiser = Optimiser(own, {}, name, {"lr": 0.05, "weight_decay": 0.1})
        for _ in range(4):
            gradients = [torch.randn(w.shape) for w in wholes]
            for parts_of, gradient, number in zip(parts, gradients, range(2), strict=True):
                sizes = [len(part) for part in parts_of]
                for at, piece in enumerate(gradient.split(sizes)):
                    own[f"{number}.{at}"].grad = piece.clone()
            optimiser.step()
        return wholes

    equal = all(torch.equal(a, b) for a, b in zip(steps(False), steps(True), strict=True))
    assert equal == (name not in optimisers.WHOLE)


def test_an_optimiser_of_whole_tensors_is_refused_pieces_with_those_that_work() -> None:
    for name in ("Muon", "adafactor"):
        with pytest.raises(ConfigError, match="adamw") as refused:
            optimisers.refuse_pieces(name, "parallel.zero=1")
        assert "parallel.zero=1" in str(refused.value)
    optimisers.refuse_pieces("AdamW", "parallel.zero=1")
