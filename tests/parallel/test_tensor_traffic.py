"""What processes that share each matrix say in a step, and what each holds, are what the formulas say."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist  # noqa: TID251 - what is said is counted
from torch.profiler import ProfilerActivity, profile

from afina.config import ParallelSettings
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.parallel.plan import plan_of
from afina.parallel.predict import predicted
from afina.parallel.processes import Processes
from afina.parallel.tensor_traffic import tensor_traffic
from afina.parallel.traffic import counts, traffic
from afina.train.loop import loop
from tests.parallel import tensor_kit  # noqa: F401 - families
from tests.parallel.parity import Case, edited, windows, work_of
from tests.parallel.pool import Pool
from tests.parallel.test_traffic import KEYS, WIDE, ledger

pytestmark = pytest.mark.dist

CASES = (
    Case("lora", None, rows=8, steps=3),
    Case("lora", 2, rows=8, steps=3),
    Case("full", 2, rows=8, steps=3),
    Case("lora", None, rows=8, steps=3, recompute=True),
    Case("lora", None, rows=8, steps=3, family="phi3"),
    Case("full", None, rows=8, steps=3, family="mixtral"),
)
ALONE = 3
"""Sums of tokens, labels and loss over the processes with other rows: of one alone they are no messages."""


def counted(case: Case, settings: ParallelSettings) -> tuple[dict[str, int], list[int]]:
    """The collectives of the third step, and the bytes of each sum."""
    mesh = Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    sizes: list[int] = []
    said = dist.all_reduce

    def listen(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return said(tensor, *args, **kwargs)

    with packing(edit.model, True), Blocks(edit.model, case.recompute).running():
        steps = loop(work, iter(windows(case)))
        for _ in range(2):
            next(steps)
        with (
            mock.patch.object(dist, "all_reduce", listen),
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            next(steps)
    found = Counter[str]()
    for event in seen.key_averages():
        if event.key.startswith("c10d::"):
            found[KEYS[event.key]] += event.count
    return dict(found), sizes


def all_counted(settings: ParallelSettings) -> list[Any]:
    return [counted(case, settings) for case in CASES]


@pytest.mark.parametrize(("processes", "zero"), [(2, 0), (4, 0), (4, 1)])
def test_collectives_are_those_of_the_table(pool: Pool, processes: int, zero: int) -> None:
    settings = ParallelSettings(tensor=2, zero=zero)
    for rank, found in enumerate(pool.run(processes, all_counted, settings)):
        for case, (kinds, sizes) in zip(CASES, found, strict=True):
            plan, edit = plan_of(settings, processes), edited(case)
            model, trains = edit.model, edit.trainable()
            mine = windows(case)[-1][plan.data_rank(rank) :: plan.data]
            each = case.rows_each or len(mine)
            passes = [mine[i : i + each] for i in range(0, len(mine), each)]
            tokens = {sum(len(row.tokens) for row in rows) for rows in passes}
            wanted = Counter[str]()
            told = Counter[int]()
            for number, rows in enumerate(passes):
                line = sum(len(row.tokens) for row in rows)
                labels = sum(row.trained_tokens for row in rows)
                how = {"labels": labels, "recompute": case.recompute}
                stated = tensor_traffic(plan, model, trains, line, 1, **how)
                # What is said once a step is not said again.
                once = [m for m in stated if m.of not in ONCE or not number]
                for message in once:
                    wanted[message.kind] += message.times
                    if message.kind == "all_reduce":
                        told[message.bytes] += message.times
            # The whole step's is that of its passes, where all are of one length.
            if len(tokens) == 1:
                whole = tensor_traffic(
                    plan, model, trains, tokens.pop(), len(passes), recompute=case.recompute
                )
                assert counts(whole) == dict(wanted)
            beside = traffic(plan, model, trains, len(passes))
            for kind, many in counts(beside).items():
                wanted[kind] += many
            wanted["all_reduce"] += ALONE if plan.data == 1 else 0
            assert kinds == dict(wanted), (case, rank)
            if zero == 0:
                assert not told - Counter(sizes), (case, rank)


ONCE = ("who has gradients", "gradients in parts", "norm")


def held(case: Case, settings: ParallelSettings) -> dict[str, int]:
    """The ledger after a backward pass and a step of the optimiser."""
    mesh = Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    found: dict[str, int] = {}
    move = work.optimiser.step

    def look() -> None:
        move()
        found.update(ledger(work))

    work.optimiser.step = look  # type: ignore[method-assign]
    with packing(edit.model, True):
        list(loop(work, iter(windows(case))))
    return found


def all_held(cases: list[Case], settings: ParallelSettings) -> list[dict[str, int]]:
    return [held(case, settings) for case in cases]


def by_formula(case: Case) -> dict[str, int]:
    """Matrices, and what of adapters lies along their cut side, are halved; norms and the rest are whole."""
    edit = edited(case)
    ends = ("embed_tokens", "lm_head")
    cut = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *ends), ("o_proj", "down_proj")
    sizes: dict[str, int] = {}
    for name, parameter in edit.model.named_parameters():
        halves = [f"{o}.{own}" for o in cut[0] for own in ("weight", "lora.b")]
        halves += [f"{i}.{own}" for i in cut[1] for own in ("weight", "lora.a")]
        sizes[name] = parameter.numel() // (2 if name.endswith(tuple(halves)) else 1)
    trained = sum(sizes[name] for name in edit.trainable())
    return {
        "parameters": WIDE * sum(sizes.values()),
        "gradients": WIDE * trained,
        "state": 2 * WIDE * trained,
    }


def test_bytes_of_each_process_are_those_of_the_formula(pool: Pool) -> None:
    cases = [Case(technique, None, optimizer="adamw", steps=1) for technique in ("lora", "full")]
    settings = ParallelSettings(tensor=2)
    for rank, found in enumerate(pool.run(2, all_held, cases, settings)):
        for case, bytes_ in zip(cases, found, strict=True):
            assert bytes_ == by_formula(case)
            edit = edited(case)
            stated = predicted(plan_of(settings, 2), edit.model, edit.trainable(), 2, rank)
            assert stated[:3] == (bytes_["parameters"], bytes_["gradients"], bytes_["state"])
