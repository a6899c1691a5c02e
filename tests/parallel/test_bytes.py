"""What each process holds with ZeRO is what the formulas say, and gradients go within the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from afina.config import ParallelSettings
from afina.models.forward import packing
from afina.parallel.processes import Processes
from afina.parallel.shares import span
from afina.parallel.zero import Shards
from afina.train.loop import loop
from afina.train.work import Work
from afina.tree import Seams
from afina.types import Batch
from tests.parallel.parity import Case, edited, windows, work_of
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist

SETTINGS: tuple[ParallelSettings, ...] = tuple(ParallelSettings(zero=z) for z in (0, 1, 2, 3))
Bytes = dict[str, int]
WIDE = 8
"""Bytes of a number in fp64."""


def ledger(work: Work) -> Bytes:
    """What this process holds, found by walking its tensors: of each kind the bytes."""
    tensors = work.edit.trainable()
    own = work.mesh.own(tensors)
    gradients = {id(p.grad): p.grad for p in (*tensors.values(), *own.values())}
    state = [v for k, v in work.optimiser.state_tensors().items() if not k.endswith(".step")]
    return {
        "parameters": size(work.model.parameters()),
        "gradients": size(g for g in gradients.values() if g is not None),
        "state": size(state),
    }


def size(tensors: Any) -> int:
    """Bytes of the parts of tensors that are here."""
    here = [t.detach().to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in here)


def held(case: Case, settings: ParallelSettings) -> list[Bytes]:
    """The ledger between the two passes of the third step."""
    mesh = Processes(settings)
    edit = edited(case)
    seen: list[Bytes] = []
    work = work_of(case, mesh, edit)

    def look(batch: Batch, step: int) -> Batch:
        if step == 2:
            seen.append(ledger(work))
        return batch

    work = replace(work, seams=Seams(on_batch=(look,)))
    with packing(edit.model, True):
        list(loop(work, iter(windows(case))))
    return seen[1:2]


def all_held(cases: tuple[Case, ...], settings: tuple[ParallelSettings, ...]) -> list[Any]:
    return [held(case, one) for one in settings for case in cases]


def by_formula(case: Case, zero: int, processes: int, rank: int) -> Bytes:
    """ZeRO's formulas, with the pieces of this process where numbers do not divide."""
    edit = edited(case)
    trains = edit.trainable()
    all_of = sum(p.numel() for p in edit.model.parameters())
    psi_t = sum(p.numel() for p in trains.values())

    def piece(tensors: Any) -> int:
        ends = ((p, *span(p.shape[0], processes, rank)) for p in tensors)
        return sum((end - first) * p[0].numel() for p, first, end in ends)

    mine = piece(trains.values())
    return {
        "parameters": WIDE * (piece(edit.model.parameters()) if zero == 3 else all_of),
        "gradients": WIDE * (mine if zero >= 2 else psi_t),
        "state": 2 * WIDE * (mine if zero >= 1 else psi_t),
    }


@pytest.mark.parametrize("processes", [2, 3])
def test_bytes_of_each_process_are_those_of_the_formulas(pool: Pool, processes: int) -> None:
    cases = tuple(Case(t, 1, rows=6, steps=3, optimizer="adamw") for t in ("lora", "full"))
    found = pool.run(processes, all_held, cases, SETTINGS)
    for rank, mine in enumerate(found):
        wanted = [[by_formula(c, s.zero, processes, rank)] for s in SETTINGS for c in cases]
        assert mine == wanted


def most_at_once(most_bytes: int) -> tuple[int, int]:
    """Most bytes of whole gradients at any time of a backward pass, and messages of it."""
    case = Case("full", None, steps=1)
    mesh = Processes(ParallelSettings(zero=2))
    edit = edited(case)
    work = work_of(case, mesh, edit)
    tensors = edit.trainable()
    sharing: Any = mesh._held
    assert isinstance(sharing, Shards)
    sharing = Shards(tensors, sharing.groups, every_round=True, most_bytes=most_bytes)
    mesh._held = sharing
    most = 0

    def look(tensor: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in tensors.values() if p.grad is not None))

    for parameter in tensors.values():
        parameter.register_post_accumulate_grad_hook(look)
    with packing(edit.model, True):
        list(loop(work, iter(windows(case))))
    return most, len(sharing.buckets)


def test_stage_two_drops_gradients_within_the_backward_pass(pool: Pool) -> None:
    whole = sum(p.nbytes for p in edited(Case("full")).trainable().values())
    for most, messages in pool.run(2, most_at_once, 2**16):
        assert messages > 3
        assert most < whole / 2
    # The control: one message for all can go only when all are there.
    for most, messages in pool.run(2, most_at_once, 2**30):
        assert (most, messages) == (whole, 1)
