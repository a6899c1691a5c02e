"""Noise on gradients: known deviations, a function of seed, step and name alone, and nothing where nothing is asked."""

from __future__ import annotations

import math
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.config import TrainSettings
from afina.errors import ConfigError, RunError
from afina.models.forward import packing
from afina.optim.gradient_noise import GradientNoise, add, deviation, noise, rms
from afina.table import apply
from afina.techniques.full import Full
from afina.techniques.lora import LoRA, LoRADelta
from afina.train.loop import loop
from afina.train.plan import optimiser_of
from afina.tree import Edit, Seams, seed_of
from tests.tiny import tiny_llama
from tests.train import kit

# --- the numbers ------------------------------------------------------------------------------------------------

STEPS = (0, 1, 10, 100, 1000, 10_000)
KNOWN = {
    0.01: (0.1, 0.082645, 0.051715, 0.028107, 0.014958, 0.007943),
    0.3: (0.547723, 0.452665, 0.283255, 0.153947, 0.08193, 0.043506),
    1.0: (1.0, 0.82645, 0.517151, 0.281068, 0.149582, 0.079431),
}
"""Deviations by variance at the first step, with gamma 0.55."""


@pytest.mark.parametrize("eta", KNOWN)
def test_the_deviation_falls_as_in_the_paper(eta: float) -> None:
    for step, value in zip(STEPS, KNOWN[eta], strict=True):
        assert deviation(step, eta, 0.55) == pytest.approx(value, abs=6e-7)
    assert deviation(10_000, eta, 0.0) == math.sqrt(eta)


def test_a_million_draws_have_the_deviation_and_no_mean() -> None:
    found = torch.zeros(1000, 1000)
    add(found, noise(found.shape, seed=4), deviation(10, 0.3, 0.55))
    wanted = deviation(10, 0.3, 0.55)
    assert float(found.double().var()) == pytest.approx(wanted**2, rel=0.01)
    assert abs(float(found.double().mean())) < 4 * wanted / 1000


def test_a_part_of_a_tensor_gets_its_part_of_the_noise() -> None:
    """What a process needs that holds a shard: the whole's noise, cut; and the whole's size."""
    torch.manual_seed(0)
    whole = torch.randn(12, 7)
    drawn, size = noise(whole.shape, seed=9), 0.5 * rms(whole)
    parts = [whole[rows].clone() for rows in (slice(0, 5), slice(5, 12))]
    for part, rows in zip(parts, (slice(0, 5), slice(5, 12)), strict=True):
        add(part, drawn[rows], size)
    add(whole, noise(whole.shape, seed=9), size)
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(
        noise((5, 7), seed=9), drawn[:5]
    )  # the control: a part drawn alone is another


def test_noise_is_added_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    half = torch.randn(64, 64).bfloat16()
    drawn = noise(half.shape, seed=1)
    wanted = (half.float() + drawn * 0.01).bfloat16()
    add(half, drawn, 0.01)
    assert torch.equal(half, wanted)
    twice = (torch.zeros(64, 64).bfloat16() + drawn.bfloat16() * 0.01).bfloat16()
    assert not torch.equal(twice, (drawn * 0.01).bfloat16())  # the control: in bf16 it is another
    wide = torch.zeros(3, 3, dtype=torch.float64)
    add(wide, noise((3, 3), seed=1), 0.5)
    assert torch.equal(wide, noise((3, 3), seed=1).double() * 0.5)


def test_the_size_of_a_tensor_is_its_root_mean_square() -> None:
    assert float(rms(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))) == 2.5
    # 300 squared is beyond fp16.
    assert float(rms(torch.full((5,), 300.0, dtype=torch.float16))) == 300.0


# --- at a step --------------------------------------------------------------------------------------------------


def tensors(seed: int = 0) -> dict[str, nn.Parameter]:
    """Three with gradients of their own size, one without, one that is frozen."""
    torch.manual_seed(seed)
    made = {n: nn.Parameter(torch.zeros(40, 50)) for n in ("large", "small", "none", "nought")}
    made["large"].grad = torch.randn(40, 50)
    made["small"].grad = torch.randn(40, 50) * 1e-4
    made["nought"].grad = torch.zeros(40, 50)
    return made


def added(value: GradientNoise, step: int, seed: int = 0) -> dict[str, Tensor]:
    """What a step adds to the gradients of `tensors`."""
    made = tensors()
    before = {n: p.grad.clone() for n, p in made.items() if p.grad is not None}
    torch.manual_seed(seed)
    value.add(step, made)
    assert made["none"].grad is None
    return {n: made[n].grad - g for n, g in before.items()}  # type: ignore[operator]


@pytest.mark.parametrize("step", [0, 100])
def test_relative_noise_has_the_size_of_its_tensor(step: int) -> None:
    found, before = added(GradientNoise(eta=0.01), step), tensors()
    for name in ("large", "small"):
        gradient = before[name].grad
        assert gradient is not None
        size = KNOWN[0.01][STEPS.index(step)] * float(gradient.square().mean().sqrt())
        drawn = noise(gradient.shape, seed_of(0, f"noise {step} {name}"))
        torch.testing.assert_close(found[name], drawn * size, rtol=1e-4, atol=size * 1e-4)
    assert float(found["large"].std()) > 1000 * float(found["small"].std())
    assert not found["nought"].any()


def test_absolute_noise_has_one_size() -> None:
    found = added(GradientNoise(eta=0.01, mode="absolute"), 0)
    assert all(float(one.std()) == pytest.approx(0.1, rel=0.05) for one in found.values())


def test_noise_is_a_function_of_seed_step_and_name() -> None:
    value = GradientNoise(eta=1.0, gamma=0.0, mode="absolute")
    found = added(value, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(found.values(), added(value, 3).values(), strict=True)
    )
    assert not torch.equal(found["large"], found["small"])
    for other in (added(value, 4), added(value, 3, seed=1)):
        assert not torch.equal(found["nought"], other["nought"])
    # Whatever else trains: a tensor's own noise stays.
    alone = {"nought": tensors()["nought"]}
    torch.manual_seed(0)
    value.add(3, alone)
    assert torch.equal(alone["nought"].grad, found["nought"])  # type: ignore[arg-type]


# --- in a run ---------------------------------------------------------------------------------------------------


def noisy(value: GradientNoise, **changes: Any) -> Edit:
    return apply(tiny_llama(**changes), [Full(), value])


def noise_of(edit: Edit, **options: Any) -> list[dict[str, Tensor]]:
    """What each step of a loop adds to the gradients."""
    found: list[dict[str, Tensor]] = []

    def copy(tensors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in tensors.items() if p.grad is not None}

    seams = Seams(before_step=(lambda step, tensors: found.append(copy(tensors)),))
    seams = seams.and_then(edit.seams(3))

    def take(step: int, tensors: dict[str, nn.Parameter]) -> None:
        found[-1] = {n: g - found[-1][n] for n, g in copy(tensors).items()}

    seams = seams.and_then(Seams(before_step=(take,)))
    work = kit.work_of(edit, seams=seams, total_steps=3, **options)
    with packing(edit.model, True):
        list(loop(work, repeat(kit.ragged_rows(8))))
    return found


ABSOLUTE = GradientNoise(eta=1.0, gamma=0.0, mode="absolute")


def test_noise_comes_once_a_step_however_it_is_cut() -> None:
    """Eight micro-batches would otherwise have eight times the variance."""
    one, eight = (noise_of(noisy(ABSOLUTE), rows_each=each) for each in (8, 1))
    assert len(one) == len(eight) == 3
    for first, second in zip(one, eight, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-9)
            if first[name].numel() > 1000:
                assert float(first[name].std()) == pytest.approx(1.0, rel=0.1)


def test_the_runs_seed_is_the_noises() -> None:
    one, same, other = (noise_of(noisy(ABSOLUTE), seed=seed) for seed in (0, 0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    for first, again, apart in zip(one, same, other, strict=True):
        assert torch.equal(first[name], again[name])
        assert float((first[name] - apart[name]).abs().max()) > 0.1
    assert float((one[0][name] - one[1][name]).abs().max()) > 0.1
    seed = seed_of(seed_of(0, "step 1"), f"noise 1 {name}")
    expected = noise(one[1][name].shape, seed).double()
    torch.testing.assert_close(one[1][name], expected, rtol=0, atol=1e-9)


def test_noise_comes_after_clipping() -> None:
    edit = noisy(ABSOLUTE)
    found = noise_of(edit, clip=1e-6)
    assert float(found[0]["lm_head.weight"].std()) == pytest.approx(1.0, rel=0.1)


def test_no_variance_is_the_plain_run_bit_for_bit(tmp_path: Path) -> None:
    lora = LoRA(rank=2)
    found = {
        name: kit.weights(kit.run(tmp_path / name, [lora, *beside], steps=4))
        for name, beside in {
            "plain": [],
            "none": [GradientNoise(eta=0.0)],
            "some": [GradientNoise(eta=0.01)],
        }.items()
    }
    assert kit.same(found["plain"], found["none"])
    assert not kit.same(found["plain"], found["some"])  # the control: noise is seen


def test_a_run_goes_on_with_the_same_noise(tmp_path: Path) -> None:
    beside = [LoRA(rank=2), GradientNoise(eta=1.0)]
    whole = kit.weights(kit.run(tmp_path / "whole", beside, steps=6, save_every=2))
    with pytest.raises(kit.Stop):
        kit.run(
            tmp_path / "run", beside, steps=6, save_every=2, options={"seams": kit.stop_after(3)}
        )
    again = kit.run(tmp_path / "run", beside, steps=6, save_every=2, options={"resume": True})
    assert kit.same(whole, kit.weights(again))


def test_noise_does_not_speak_for_a_tensor_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of a run's first steps asks before the noise is there."""
    edit = apply(tiny_llama(), [LoRA(rank=2), ABSOLUTE])
    monkeypatch.setattr(
        LoRADelta, "forward", lambda self, x, y, base: y + 0 * (self.a.sum() + self.b.sum())
    )
    with packing(edit.model, True), pytest.raises(RunError, match="did not learn"):
        list(loop(kit.work_of(edit, seams=edit.seams(4)), repeat(kit.ragged_rows(4))))


def test_tensors_that_move_in_backward_are_refused_with_noise() -> None:
    settings = TrainSettings(steps=1, step_in_backward=True, clip=None)
    edit = noisy(GradientNoise())
    with pytest.raises(ConfigError) as caught:
        optimiser_of(edit, settings, edit.seams(1))
    assert "GradientNoise.add" in str(caught.value)
    assert "leave train.step_in_backward out" in str(caught.value)
    quiet = noisy(GradientNoise(eta=0.0))
    optimiser_of(quiet, settings, quiet.seams(1))  # the control: nothing looks at the gradients


def test_noise_alone_trains_nothing_and_says_what_does(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        kit.run(tmp_path / "run", [GradientNoise()], steps=1)
    assert "nothing would train" in str(caught.value)
    assert "--technique gradient_noise --technique lora" in str(caught.value)
