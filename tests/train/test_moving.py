"""Tensors that move inside the backward pass: the same run bit for bit, with one gradient in memory at a time."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from afina.errors import ConfigError, RunError
from afina.models.forward import packing
from afina.optim.optimisers import Optimiser
from afina.parallel.runtime import OneProcess
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.loop import loop
from afina.train.memory import NO_MEMORY_ON_CPU
from afina.train.metrics import read_metrics
from afina.train.moving import Mover, hooked
from afina.train.nonfinite import NotFiniteError
from afina.train.report import Silent
from afina.train.work import Step, Work
from afina.tree import Edit, Seams
from afina.types import Row
from tests.tiny import tiny_llama
from tests.train.kit import Stop, edited, ragged_rows, run, stop_after, work_of


def windows(count: int = 4) -> Iterator[list[Row]]:
    return iter([ragged_rows(6, seed=step) for step in range(count)])


def made(technique: Any, *, in_backward: bool, **more: Any) -> tuple[Edit, Work, list[Step]]:
    """Four steps of full fine-tuning on a tiny model."""
    dtype = more.pop("dtype", torch.float64)
    edit = edited(technique, **more.pop("model", {}))
    edit.model.to(dtype)
    work = work_of(edit, step_in_backward=in_backward, headed=True, **more)
    with packing(edit.model, True):
        return edit, work, list(loop(work, windows()))


@pytest.mark.parametrize("each", [None, 2])
@pytest.mark.parametrize(
    ("technique", "more"),
    [
        (Full(), {}),
        (Full(), {"model": {"tie_word_embeddings": True}}),
        (Full(layers="1"), {}),
        (Full(), {"dtype": torch.bfloat16}),
        (LoRA(rank=2, loraplus_ratio=4, modules_to_save=("lm_head",)), {}),
    ],
    ids=["full", "tied", "upper", "bf16", "lora"],
)
def test_a_run_is_the_same_bit_for_bit(
    technique: Any, more: dict[str, Any], each: int | None
) -> None:
    (edit, work, steps), (other, whole, wanted) = (
        made(technique, in_backward=b, rows_each=each, **copy.deepcopy(more)) for b in (True, False)
    )
    assert [(s.loss, s.gradient_norm, s.moved) for s in steps] == [
        (s.loss, s.gradient_norm, s.moved) for s in wanted
    ]
    assert len(steps) == 4
    for name, tensor in edit.trainable().items():
        assert torch.equal(tensor, other.trainable()[name]), name
    kept, expected = work.optimiser.state_tensors(), whole.optimiser.state_tensors()
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)


def most_bytes(edit: Edit, work: Work) -> int:
    """The most bytes of gradients that are there at once in a step."""
    most = [0]

    def count(name: str, parameter: nn.Parameter) -> None:
        there = [p.grad for p in edit.trainable().values() if p.grad is not None]
        most[0] = max(most[0], sum(g.numel() * g.element_size() for g in there))

    # It is called before the run's own, which drops the gradient.
    with hooked(edit.trainable(), count), packing(edit.model, True):
        next(loop(work, windows()))
    return most[0]


def test_one_gradient_is_there_at_a_time() -> None:
    def of(in_backward: bool, each: int | None) -> tuple[int, Edit]:
        edit = edited(Full())
        work = work_of(edit, step_in_backward=in_backward, rows_each=each, headed=True)
        return most_bytes(edit, work), edit

    found, edit = of(True, None)
    sizes = [p.numel() * 8 for p in edit.trainable().values()]
    assert found == max(sizes)
    assert of(False, None)[0] == sum(sizes)
    # Several micro-batches are summed first, in memory as ever.
    assert of(True, 2)[0] == sum(sizes)


def test_a_trial_pass_holds_what_the_run_will_hold() -> None:
    edit = edited(Full())
    work = work_of(edit, step_in_backward=True)
    seen: list[int] = []

    def count(name: str, parameter: nn.Parameter) -> None:
        seen.append(sum(p.grad is not None for p in edit.trainable().values()))

    with hooked(edit.trainable(), count), packing(edit.model, True):
        work.passes.trial(ragged_rows(3), edit, dropping=True)
        assert set(seen) == {1}
        seen.clear()
        work.passes.trial(ragged_rows(3), edit)
        assert max(seen) == len(edit.trainable())
    assert all(p.grad is None for p in edit.trainable().values())


# --- what a step may meet ------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two tensors, one of which a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.z = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        self.tensors = {"x": self.x, "z": self.z}
        self.optimiser = Optimiser(self.tensors, {}, "sgd", {})
        self.optimiser.set_lr(0.1)
        self.mover = Mover(self.optimiser, self.tensors, OneProcess())


def test_what_only_an_earlier_micro_batch_reached_moves_too() -> None:
    two = Two()
    (two.x.sum() * two.z.sum()).backward()
    two.mover.backward(two.z.sum() * 2, 9.0)
    assert two.mover.moved == ["z", "x"]
    assert two.x.tolist() == pytest.approx([1 - 0.3, 2 - 0.3])  # slope z = 3
    assert two.z.tolist() == pytest.approx([3 - 0.1 * (3 + 2)])
    assert float(two.mover.norm()) == pytest.approx((3**2 * 2 + 5**2) ** 0.5)
    assert (two.mover.missing(), two.mover.zero, two.mover.torn) == ([], [], False)
    assert two.x.grad is two.z.grad is None


def test_what_got_no_gradient_or_a_zero_one_is_known() -> None:
    two = Two()
    two.mover.backward((two.z * 0).sum() + 1, 0.0)
    assert (two.mover.missing(), two.mover.zero, two.mover.torn) == (["x"], ["z"], False)
    tiny = Two()
    tiny.mover.backward(tiny.x.sum() * 1e-200, 0.0)  # its square is zero, it is not
    assert (float(tiny.mover.norm()), tiny.mover.zero) == (0.0, [])


@pytest.mark.parametrize(("loss", "before"), [(float("nan"), 0.0), (1.0, float("inf"))])
def test_a_loss_that_is_not_finite_moves_nothing(loss: float, before: float) -> None:
    two = Two()
    two.mover.backward(two.z.sum() * loss, before)
    assert (two.mover.acted, two.mover.moved, two.mover.torn) == (False, [], False)
    assert two.z.grad is not None  # for whoever looks for the cause
    assert two.z.item() == 3.0


def slope(value: float) -> Callable[[Tensor], Tensor]:
    """A hook that gives a tensor this gradient in the place of its own."""
    return lambda gradient: torch.full_like(gradient, value)


def test_a_gradient_that_is_not_finite_stops_the_rest() -> None:
    two = Two()
    two.x.register_hook(slope(float("inf")))
    two.mover.backward(two.x.sum() + two.z.sum(), 0.0)
    first = two.mover.moved
    assert two.mover.torn == (first == ["z"])
    assert two.x.tolist() == [1.0, 2.0]
    assert two.x.grad is not None


def test_an_error_in_the_middle_leaves_it_torn() -> None:
    edit = edited(Full())
    work = work_of(edit, step_in_backward=True)
    mover = Mover(work.optimiser, edit.trainable(), OneProcess())

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    edit.trainable()["model.layers.0.mlp.up_proj.weight"].register_hook(fail)
    with packing(edit.model, True), pytest.raises(MemoryError):
        mover.backward(work.passes.loss(work.passes.batch(ragged_rows(2))), 0.0)
    assert mover.torn
    assert mover.moved[0] in ("model.norm.weight", "lm_head.weight")


# --- in a run ------------------------------------------------------------------------------------------------------

WHOLE = {"technique": Full(), "clip": None}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)]


def model_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model" / "model.safetensors")


def test_a_run_goes_on_bit_for_bit_and_with_either_way(tmp_path: Path) -> None:
    more: dict[str, Any] = {**WHOLE, "steps": 5, "save_every": 2, "micro_rows": 4}
    run(tmp_path / "plain", **more)
    wanted = losses(tmp_path / "plain"), model_of(tmp_path / "plain")
    for first, then in ((True, True), (True, False), (False, True)):
        out = tmp_path / f"{first}-{then}"
        stop = {"seams": stop_after(3)}
        with pytest.raises(Stop):
            run(out, step_in_backward=first, options=stop, **more)
        run(out, step_in_backward=then, options={"resume": True}, **more)
        assert losses(out) == wanted[0]
        found = model_of(out)
        assert all(torch.equal(found[name], wanted[1][name]) for name in wanted[1])


RUN: dict[str, Any] = {**WHOLE, "steps": 6, "micro_rows": 4, "save_every": 2, "share": False}


@pytest.fixture
def poisoned(tmp_path: Path) -> Callable[..., str]:
    """What a run says whose gradient of one tensor is infinite, or otherwise spoilt, at its fourth step."""

    def start(name: str, **more: Any) -> str:
        now = [-1]

        def count(losses_N: Tensor, batch: Any, step: int) -> Tensor:
            now[0] = step
            return losses_N

        model = tiny_llama()
        spoil = more.pop("spoil", slope(float("inf")))
        model.get_parameter(name).register_hook(lambda g: spoil(g) if now[0] == 3 else g)
        options = {"seams": Seams(loss=(count,))}
        with pytest.raises(RunError) as caught:
            run(
                tmp_path / "run",
                model=model,
                options=options,
                step_in_backward=True,
                **{**RUN, **more},
            )
        return str(caught.value)

    return start


def saved(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").glob("step-*"))


def test_half_moved_weights_are_never_saved(poisoned: Callable[..., str], tmp_path: Path) -> None:
    said = poisoned("model.embed_tokens.weight")  # the last that gets its gradient
    assert saved(tmp_path / "run") == ["step-000002"]
    assert "some weights had moved" in said
    assert "step 2" in said
    again = run(tmp_path / "run", step_in_backward=True, options={"resume": True}, **RUN)
    run(tmp_path / "whole", **RUN)
    assert again.steps == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_lack_of_memory_in_the_middle_saves_nothing_either(
    poisoned: Callable[..., str], tmp_path: Path
) -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError(f"{NO_MEMORY_ON_CPU}: you tried to allocate 1 byte")

    said = poisoned("model.embed_tokens.weight", spoil=fail)
    assert saved(tmp_path / "run") == ["step-000002"]
    assert "too little memory" in said
    assert "some weights had moved" in said
    assert "go on from the checkpoint of step 2" in said
    # The control: where nothing had moved, the third step is saved.
    shutil.rmtree(tmp_path / "run")
    said = poisoned("lm_head.weight", spoil=fail)
    assert saved(tmp_path / "run")[-1] == "step-000003"
    assert "some weights had moved" not in said


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputed_blocks_may_move_meanwhile(recompute: Any, tmp_path: Path) -> None:
    for in_backward in (False, True):
        run(tmp_path / str(in_backward), step_in_backward=in_backward, recompute=recompute, **RUN)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    found, wanted = (model_of(tmp_path / name) for name in ("True", "False"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_compiled_blocks_may_move_meanwhile(tmp_path: Path) -> None:
    for in_backward in (False, True):
        torch._dynamo.reset()
        run(tmp_path / str(in_backward), step_in_backward=in_backward, compile=True,
            model=tiny_llama(dtype=torch.float32), **RUN)  # fmt: skip
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    found, wanted = (model_of(tmp_path / name) for name in ("True", "False"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_with_nothing_saved_the_way_on_is_from_the_beginning(
    poisoned: Callable[..., str], tmp_path: Path
) -> None:
    said = poisoned("model.embed_tokens.weight", save_every=None)
    assert saved(tmp_path / "run") == []
    assert "--overwrite" in said


def test_where_nothing_had_moved_the_run_is_saved_as_it_was(
    poisoned: Callable[..., str], tmp_path: Path
) -> None:
    said = poisoned("lm_head.weight")  # the first
    assert saved(tmp_path / "run")[-1] == "step-000003"
    assert "some weights had moved" not in said


def test_the_audit_names_what_does_not_learn() -> None:
    for in_backward in (True, False):
        edit = edited(Full())
        edit.trainable()["model.norm.weight"].register_hook(slope(0.0))
        work = work_of(edit, step_in_backward=in_backward)
        with (
            packing(edit.model, True),
            pytest.raises(RunError, match=r"1 of 21 .* did not learn") as e,
        ):
            next(loop(work, windows()))
        assert e.value.got == "model.norm.weight (all zero)"


def test_a_loss_that_is_not_finite_names_its_rows_as_ever() -> None:
    edit = edited(Full())
    nan = Seams(loss=(lambda losses, batch, step: losses * float("nan"),))
    work = work_of(edit, step_in_backward=True, seams=nan)
    before = {n: p.detach().clone() for n, p in edit.trainable().items()}
    with packing(edit.model, True), pytest.raises(NotFiniteError) as caught:
        next(loop(work, windows()))
    assert not caught.value.fault.torn
    assert all(torch.equal(before[n], p) for n, p in edit.trainable().items())


def test_rows_without_a_label_move_nothing() -> None:
    edit = edited(Full())
    work = work_of(edit, step_in_backward=True, rows_each=1)
    idle = ragged_rows(2, untrained=(0, 1))
    last = [*ragged_rows(2), *ragged_rows(1, seed=4, untrained=(0,))]
    steps: list[Step] = []
    with packing(edit.model, True):
        steps += loop(work, iter([idle, last, idle, idle]))
    assert [step.moved for step in steps] == [False, True, False, False]


# --- what it cannot be combined with -------------------------------------------------------------------------------


def test_what_wants_the_whole_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clip \(1\.0\) cannot be kept: set clip to null"):
        run(tmp_path / "a", **{**WHOLE, "clip": 1.0}, step_in_backward=True)
    with pytest.raises(ConfigError, match="leave on_nan out"):
        run(tmp_path / "b", **WHOLE, step_in_backward=True, on_nan="skip")

    def look(step: int, tensors: dict[str, nn.Parameter]) -> None:
        """Looks at gradients."""

    for place in ("before_step", "moved"):
        with pytest.raises(ConfigError, match="looks at all of them") as caught:
            run(
                tmp_path / "c",
                **WHOLE,
                step_in_backward=True,
                options={"seams": Seams(**{place: (look,)})},
            )
        assert "look" in str(caught.value.got)
    assert list(tmp_path.iterdir()) == []


def test_several_micro_batches_are_told(tmp_path: Path) -> None:
    said: list[str] = []

    class Told(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    for each in (2, 4):
        more: dict[str, Any] = {**WHOLE, "steps": 1, "micro_rows": each, "step_in_backward": True}
        run(tmp_path / str(each), options={"reporter": Told()}, **more)
    told = [line for line in said if "step_in_backward" in line]
    assert len(told) == 1
    assert "2 micro-batches" in told[0]
