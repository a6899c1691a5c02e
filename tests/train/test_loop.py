"""The loss of a step is a mean over its trained tokens, however the step is cut; and what the seams see."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.errors import RunError
from afina.models.forward import packing
from afina.ops import reference
from afina.techniques.lora import LoRA, LoRADelta
from afina.train.loop import loop
from afina.tree import Seams
from tests.train.kit import edited, gradients, largest_difference, ragged_rows, work_of


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows_each", [1, 3, 4])
def test_the_cut_into_micro_batches_does_not_change_the_gradient(
    rows_each: int, packed: bool
) -> None:
    """8x1 = 2x4 = 1x8, with ragged lengths, a short last micro-batch and one without any label."""
    edit = edited()
    rows = ragged_rows(8, untrained=(2,))
    whole_loss, whole = gradients(edit, rows, rows_each=8, packed=packed)
    loss, parts = gradients(edit, rows, rows_each=rows_each, packed=packed)
    assert abs(loss - whole_loss) < 1e-10
    assert largest_difference(whole, parts) < 1e-10


def test_packed_rows_and_padded_rows_give_the_same_gradient() -> None:
    edit = edited()
    rows = ragged_rows(6)
    packed_loss, packed = gradients(edit, rows, packed=True)
    padded_loss, padded = gradients(edit, rows, packed=False)
    assert abs(packed_loss - padded_loss) < 1e-10
    assert largest_difference(packed, padded) < 1e-10


def row_losses(edit: Any, rows: Any) -> list[Tensor]:
    """Token losses of each row, run alone through the plain model."""
    found: list[Tensor] = []
    for row in rows:
        logits = edit.model(torch.tensor([row.tokens])).logits[0, :-1]
        labels = torch.tensor(row.tokens[1:])
        kept = torch.tensor(row.trained[1:])
        found.append(reference.token_losses(logits[kept], labels[kept]).detach())
    return found


def test_the_loss_is_the_mean_over_all_trained_tokens() -> None:
    edit = edited()
    rows = ragged_rows(5)
    each = row_losses(edit, rows)
    loss, _ = gradients(edit, rows, rows_each=2)
    assert abs(loss - float(torch.cat(each).mean())) < 1e-10
    # The control: a mean of the rows' means is something else on ragged rows.
    assert abs(loss - float(torch.stack([x.mean() for x in each if len(x)]).mean())) > 1e-3


def test_a_window_without_any_label_moves_nothing() -> None:
    edit = edited()
    before = {n: t.detach().clone() for n, t in edit.trainable().items()}
    with packing(edit.model, True):
        (step,) = loop(work_of(edit, total_steps=1), repeat(ragged_rows(2, untrained=(0, 1))))
    assert (step.loss, step.trained_tokens) == (0.0, 0)
    assert all(torch.equal(t, before[n]) for n, t in edit.trainable().items())


def test_clipping_bounds_the_whole_gradient_and_reports_the_norm_before() -> None:
    edit = edited()
    seen: list[float] = []

    def look(step: int, tensors: dict[str, Any]) -> None:
        seen.append(float(torch.cat([t.grad.flatten() for t in tensors.values()]).norm()))

    work = work_of(edit, clip=1e-3, seams=Seams(before_step=(look,)), total_steps=1)
    with packing(edit.model, True):
        (step,) = loop(work, repeat(ragged_rows(4)))
    assert step.gradient_norm > 1e-3
    # Torch divides by the norm plus 1e-6.
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


def test_seams_see_batches_losses_and_steps() -> None:
    steps: list[int] = []
    halved = Seams(loss=(lambda losses, batch, step: losses / 2,), after_step=(steps.append,))
    edit = edited()
    rows = ragged_rows(4)
    plain_loss, plain = gradients(edit, rows)
    half_loss, half = gradients(edit, rows, seams=halved)
    assert half_loss == pytest.approx(plain_loss / 2)
    assert largest_difference({n: g / 2 for n, g in plain.items()}, half) < 1e-12
    with packing(edit.model, True):
        list(loop(work_of(edit, seams=halved), repeat(rows)))
    assert steps == [0, 1, 2, 3]


def test_dropout_is_a_function_of_seed_and_step_alone() -> None:
    edit = edited(LoRA(rank=3, dropout=0.5))
    edit.model.train()
    rows = ragged_rows(4)
    torch.manual_seed(123)
    _, first = gradients(edit, rows)
    torch.manual_seed(456)
    _, second = gradients(edit, rows)
    _, other = gradients(edit, rows, seed=1)
    assert largest_difference(first, second) == 0.0
    assert largest_difference(first, other) > 1e-4


def deafen(monkeypatch: pytest.MonkeyPatch, name: str, edit: Any, change: Any) -> None:
    """Makes one attached child act otherwise."""
    delta = edit.model.get_submodule(name)
    plain = LoRADelta.forward
    monkeypatch.setattr(
        LoRADelta,
        "forward",
        lambda self, x, y, base: change(self, x, y) if self is delta else plain(self, x, y, base),
    )


@pytest.mark.parametrize(
    ("step", "named", "change"),
    [
        (1, "lora.b (no gradient)", lambda d, x, y: y),
        (1, "lora.b (all zero)", lambda d, x, y: y + 0 * (d.a.sum() + d.b.sum())),
        (2, "lora.a (no gradient)", lambda d, x, y: y + (x @ d.a.detach().t()) @ d.b.t()),
    ],
)
def test_a_tensor_that_does_not_learn_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, step: int, named: str, change: Any
) -> None:
    """A missing gradient shows at the first step; A, whose first gradient is zero anyway, at the second."""
    from afina.table import apply
    from tests.tiny import tiny_llama

    edit = apply(tiny_llama(), [LoRA(rank=2)])
    deafen(monkeypatch, "model.layers.1.mlp.up_proj.lora", edit, change)
    missing_a = "(no gradient)" in named and named.startswith("lora.a")
    with packing(edit.model, True), pytest.raises(RunError) as caught:
        list(loop(work_of(edit), repeat(ragged_rows(4))))
    assert f"model.layers.1.mlp.up_proj.{named}" in str(caught.value)
    assert f"optimiser step {1 if missing_a else step}" in str(caught.value)


def test_a_learning_run_passes_the_audit() -> None:
    """The control of the test above."""
    from afina.table import apply
    from tests.tiny import tiny_llama

    edit = apply(tiny_llama(), [LoRA(rank=2)])
    with packing(edit.model, True):
        steps = list(loop(work_of(edit), repeat(ragged_rows(4))))
    assert len(steps) == 4
    assert steps[-1].loss < steps[0].loss


def test_a_loss_that_is_not_finite_names_the_rows() -> None:
    edit = edited()
    with torch.no_grad():
        edit.model.get_submodule("model.norm").weight.fill_(float("nan"))
    with packing(edit.model, True), pytest.raises(RunError, match=r"rows \[0, 1\]"):
        list(loop(work_of(edit), repeat(ragged_rows(2))))
