"""Every method beside a base in bf16: what is added is fp32, the base stays as it is, and it learns and answers."""

from __future__ import annotations

import pytest
import torch

from afina.table import apply
from tests import battery


def first_cases() -> list[battery.Case]:
    """The first row of each method on the tiny Llama."""
    found = {c.technique.key: c for c in reversed(battery.CASES) if c.model == "llama"}
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.technique.key)
def test_it_learns_and_answers_beside_a_base_in_bf16(case: battery.Case) -> None:
    model = battery.build(case.model, torch.bfloat16)
    base = dict(model.named_parameters())
    edit = apply(model, [case.technique])
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    added = {n: p for n, p in edit.trainable().items() if n not in edit.in_place}
    assert {p.dtype for p in added.values()} <= {torch.float32}
    battery.train(model, edit, steps=1)
    battery.backward(model)
    for name, parameter in edit.trainable().items():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    logits = battery.logits(model)
    assert logits.dtype == torch.bfloat16
    said = model.generate(input_ids=battery.IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(said[:, battery.IDS.shape[1]], logits[:, -1].argmax(-1))
    assert said.shape == (2, battery.IDS.shape[1] + 3)
