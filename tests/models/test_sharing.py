"""Rows whose beginnings are computed once have the loss and the gradients of rows computed apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.data.packing import collate
from afina.data.prefix import collate_shared
from afina.models.forward import packing, token_losses, trained_logits
from afina.types import Batch, Row
from tests.ops.test_attention import build, gemma2, gpt2, llama, qwen2

EVERY = (llama, qwen2, gemma2, gpt2)


def some_rows() -> list[Row]:
    """Rows over 40 ids: a common beginning of 6, inner ones below it, one row in another's, equal rows, a stranger."""
    system = [3, 9, 14, 2, 7, 30]
    texts = [
        [*system, 5, 5, 1, 8],
        [*system, 5, 5, 1, 9, 11],
        [*system, 6, 2],
        [*system, 5, 5, 1, 8],
        [*system, 5],
        [22, 4, 17],
        [*system, 5, 5, 20, 21, 22, 23, 24],
    ]
    return [
        # Rows differ in what of the common part is trained.
        Row(tuple(t), tuple(i >= (4 if n % 2 else 6) for i in range(len(t))), n)
        for n, t in enumerate(texts)
    ]


def exact(make: Callable[[], Any]) -> Any:
    """The model with norms in its own dtype: Llama's are fp32 whatever that is, which would hide a difference."""
    model = build(make)
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon)
            norm.weight = module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, norm)
    return model


def loss_of(model: Any, batch: Batch) -> Tensor:
    losses = token_losses(*trained_logits(model, batch))
    return (losses if batch.entries is None else losses * batch.entries[2]).sum()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", EVERY, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("worth", "multiple"), [(1, None), (8, None), (1, 16), (1000, None)])
def test_loss_and_gradients_are_those_of_the_rows(
    make: Callable[[], Any], worth: int, multiple: int | None
) -> None:
    model, rows = exact(make), some_rows()
    with packing(model, True):
        apart = loss_of(model, collate(rows, True, 0))
        wanted = gradients(model, apart)
        batch = collate_shared(rows, 0, multiple, worth=worth)
        together = loss_of(model, batch)
        got = gradients(model, together)
    assert batch.trained_tokens == sum(row.trained_tokens for row in rows)
    assert batch.real_tokens == sum(len(row.tokens) for row in rows)
    saved = batch.real_tokens - int((batch.segments_BT >= 0).sum())
    assert saved == {1: 40, 8: 30, 1000: 0}[worth]
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)
    assert set(got) == set(wanted)
    # Gemma's own norms are fp32 too, and stay so here.
    within = 1e-5 if make is gemma2 else 1e-10
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=within, atol=within)


@pytest.mark.parametrize("make", [llama, gemma2, qwen2], ids=lambda m: m.__name__)
def test_the_same_in_fp32_where_other_kernels_compute_it(make: Callable[[], Any]) -> None:
    model, rows = build(make).float(), some_rows()
    with packing(model, True):
        wanted = gradients(model, loss_of(model, collate(rows, True, 0)))
        got = gradients(model, loss_of(model, collate_shared(rows, 0, worth=1)))
    for name, gradient in wanted.items():
        assert float((got[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


def test_a_wrong_count_would_be_seen() -> None:
    model, rows = build(llama), some_rows()
    with packing(model, True):
        apart = loss_of(model, collate(rows, True, 0))
        batch = collate_shared(rows, 0, worth=1)
        uncounted = token_losses(*trained_logits(model, batch)).sum()
    assert abs(float((uncounted - apart).detach())) > 1e-2


def test_other_places_would_be_seen() -> None:
    """The control of the attention: a token that does not see its row's beginning has other logits."""
    model, rows = build(llama), some_rows()
    batch = collate_shared(rows, 0, worth=1)
    blind = [type(run)(run.start, run.length) for run in batch.runs]
    with packing(model, True):
        one = loss_of(model, batch)
        other = loss_of(model, Batch(**{**vars(batch), "runs": tuple(blind)}))
    assert abs(float((one - other).detach())) > 1e-2


def same(rows: Sequence[Row]) -> set[int]:
    return {row.id for row in rows}


def test_the_batch_names_its_rows() -> None:
    rows = some_rows()
    batch = collate_shared(rows, 0)
    assert set(batch.rows) == same(rows)
    assert batch.packed
