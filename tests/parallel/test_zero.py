"""ZeRO: whatever processes share out, a step is that of one process with all rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afina.config import ParallelSettings
from afina.optim.optimisers import Optimiser
from afina.parallel.copies import Copies, Groups
from afina.parallel.processes import Processes
from afina.parallel.shares import span
from afina.parallel.zero import Shards
from afina.tree.pieces import gathered, piece_of
from tests.parallel.parity import Case, Found, joined, placed, run
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist

CASES = tuple(
    Case(technique, rows_each, optimizer=optimizer)
    for technique in ("lora", "full")
    for rows_each, optimizer in ((None, "sgd"), (1, "adamw"))
)


@functools.cache
def alone(case: Case) -> Found:
    """The same in this process."""
    return run(case, None)


def every(cases: Sequence[Case], settings: ParallelSettings) -> list[Found]:
    """One after the other in this process, which is one of several."""
    return [run(case, settings, more=True) for case in cases]


@pytest.mark.parametrize(("processes", "replicate"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_are_those_of_one_process(
    pool: Pool, zero: int, processes: int, replicate: int
) -> None:
    settings = ParallelSettings.model_validate({"zero": zero, "replicate": replicate})
    found = pool.run(processes, every, CASES, settings)
    for case, ones in zip(CASES, zip(*found, strict=True), strict=True):
        same(case, ones)


def same(case: Case, found: Sequence[Found]) -> None:
    """Asserts that what processes found is what one finds."""
    expected = alone(case)
    for name in ("gradients", "values"):
        wholes = joined([getattr(one, name) for one in found])
        wanted: dict[str, torch.Tensor] = getattr(expected, name)
        assert wholes.keys() == wanted.keys()
        for key, whole in wholes.items():
            torch.testing.assert_close(whole, wanted[key], rtol=0, atol=1e-9)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, abs=1e-9)
        assert one.norm == pytest.approx(expected.norm, rel=1e-9)
        assert one.losses == pytest.approx(expected.losses, abs=1e-9)


def test_processes_without_rows_take_part(pool: Pool) -> None:
    case = Case(rows=2, rows_each=1)
    settings = [ParallelSettings.model_validate({"zero": zero}) for zero in (1, 2, 3)]
    for ones in zip(*pool.run(3, each_of, case, settings), strict=True):
        same(case, ones)


def each_of(case: Case, settings: Sequence[ParallelSettings]) -> list[Found]:
    """Under one plan after the other."""
    return [run(case, one, more=True) for one in settings]


# --- controls that must fail -----------------------------------------------------------------------------------


def mean_of_means(case: Case) -> Found:
    """Each process divides by its own tokens, and gradients are averaged: what many trainers do."""

    class Wrong(Processes):
        def sum(self, value: float) -> float:
            return value * self.plan.data

    return run(case, ParallelSettings(zero=1), make=Wrong)


def unsynchronised(case: Case) -> Found:
    """Nobody tells the others of its gradients."""

    class Alone(Copies):
        def reduce(self, tensors: Mapping[str, nn.Parameter]) -> None:
            return

    class Wrong(Processes):
        def hold(self, model: nn.Module, tensors: Mapping[str, nn.Parameter]) -> None:
            super().hold(model, tensors)
            self._held = Alone()

    return run(case, ParallelSettings(), make=Wrong)


def test_a_mean_of_means_is_seen(pool: Pool) -> None:
    case = CASES[0]
    with pytest.raises(AssertionError, match="not close"):
        same(case, pool.run(2, mean_of_means, case))


def test_adapters_that_nobody_brings_together_are_seen(pool: Pool) -> None:
    case = CASES[0]
    with pytest.raises(AssertionError, match="lora"):
        same(case, pool.run(2, unsynchronised, case))


# --- pieces ----------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1, 4),
    "uneven": (5, 2),
    "number": (),
    "vector": (7,),
    "deep": (3, 2, 2),
    "even": (6, 3),
    "silent": (4, 2),
}


def gradients(rank: int, passes: int) -> dict[str, Tensor]:
    """Of a process in all its passes; "silent" has none, and the last process alone has one of "deep"."""
    draw = torch.Generator().manual_seed(10 * passes + rank)
    found = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}
    return {n: g for n, g in found.items() if n != "silent" and (n != "deep" or rank == 2)}


def moved(zero: int, early: bool) -> dict[str, Any]:
    """Two steps of AdamW on tensors of all shapes, each of two passes, the second of which reaches tensors twice."""
    mesh = Processes(ParallelSettings())
    mesh.begin()
    tensors = {n: nn.Parameter(torch.full(s, 0.5, dtype=torch.float64)) for n, s in SHAPES.items()}
    tensors["half"] = nn.Parameter(torch.full((5, 3), 0.5, dtype=torch.bfloat16))
    held = Shards(
        tensors,
        Groups(*(mesh.group(name) for name in Groups._fields)),
        every_round=zero == 2,
        early=early,
        most_bytes=64,
    )
    own = held.own(tensors)
    optimiser = Optimiser(own, {}, "adamw", {"lr": 0.1})
    seen: dict[str, Any] = {"shapes": {n: tuple(p.shape) for n, p in own.items()}}
    for step in range(2):
        held.begin()
        for number in range(2):
            mine = gradients(mesh.rank, 2 * step + number)
            mine["half"] = torch.full((5, 3), 0.25 * (mesh.rank + 1), dtype=torch.bfloat16)
            for _ in range(1 + number):
                loss = sum((tensors[n] * g).sum() for n, g in mine.items())
                loss.backward()
            held.passed(tensors)
        held.reduce(tensors)
        seen[f"gradients {step}"] = {
            n: placed(p, p.grad) for n, p in own.items() if p.grad is not None
        }
        seen["left"] = [n for n, p in tensors.items() if p.grad is not None]
        norms = {n: (piece_of(p), p.grad.square()) for n, p in own.items() if p.grad is not None}
        seen["gathered"] = gathered(norms)
        optimiser.step()
        held.publish(tensors)
        optimiser.clear_gradients()
    return {**seen, "values": {n: p.detach().clone() for n, p in tensors.items()}}


@pytest.mark.parametrize(("zero", "early"), [(1, False), (2, True), (2, False)])
def test_tensors_of_any_shape(pool: Pool, zero: int, early: bool) -> None:
    found = pool.run(3, moved, zero, early)
    tensors = {n: nn.Parameter(torch.full(s, 0.5, dtype=torch.float64)) for n, s in SHAPES.items()}
    tensors["half"] = nn.Parameter(torch.full((5, 3), 0.5, dtype=torch.bfloat16))
    optimiser = Optimiser(tensors, {}, "adamw", {"lr": 0.1})
    for step in range(2):
        for name, tensor in tensors.items():
            passes = [(2 * step, 1), (2 * step + 1, 2)]
            parts = [
                t * g[name] for k, t in passes for r in range(3) if name in (g := gradients(r, k))
            ]
            tensor.grad = sum(parts) if parts else None
        tensors["half"].grad = torch.full((5, 3), 3 * 1.5, dtype=torch.bfloat16)
        wholes = joined([one[f"gradients {step}"] for one in found])
        assert wholes.keys() == tensors.keys() - {"silent"}
        for name, whole in wholes.items():
            torch.testing.assert_close(whole, tensors[name].grad, rtol=0, atol=1e-12)
        optimiser.step()
    for rank, one in enumerate(found):
        assert one["left"] == []
        for name, tensor in tensors.items():
            torch.testing.assert_close(one["values"][name], tensor.detach(), rtol=0, atol=1e-12)
            first, end = span(tensor.shape[0], 3, rank) if tensor.dim() else (0, 0)
            wanted = (end - first, *tensor.shape[1:]) if tensor.dim() else ()
            assert one["shapes"][name] == wanted
        for name, whole in one["gathered"].items():
            torch.testing.assert_close(whole, tensors[name].grad.square(), rtol=0, atol=1e-10)


def test_pieces_are_those_of_chunk() -> None:
    for length in range(9):
        for parts in range(1, 6):
            sizes = [end - first for first, end in (span(length, parts, n) for n in range(parts))]
            theirs = [len(part) for part in torch.zeros(length, 2).chunk(parts)]
            assert sizes == theirs + [0] * (parts - len(theirs))
