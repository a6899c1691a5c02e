"""Every message of a real step, its kind, bytes and who takes part, is what is stated beforehand, under any layout."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from afina.config import ParallelSettings
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.parallel.plan import Plan, plan_of
from afina.parallel.portion import Portion
from afina.parallel.processes import Processes
from afina.parallel.step_traffic import step_traffic
from afina.parallel.tensor_traffic import Pass
from afina.techniques.full import Full
from afina.techniques.lora import LoRA
from afina.train.loop import loop
from tests.parallel import (
    parity,
    tensor_kit,  # noqa: F401 - families
)
from tests.parallel.heard import Heard, Words, stated
from tests.parallel.parity import Case, edited, windows, work_of
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist

parity.TECHNIQUES["head"] = Full(target=("lm_head",))
parity.TECHNIQUES["upper"] = LoRA(rank=3, target=("lm_head", "model.layers.3.mlp.*"))

FOUR = (("num_hidden_layers", 4),)
TIED = (*FOUR, ("tie_word_embeddings", True))
PLAIN = [Case("lora", 2, rows=8, steps=3, model=FOUR), Case("full", 1, rows=8, steps=3, model=TIED)]
AGAIN = [
    Case("lora", 2, rows=8, steps=3, model=FOUR, recompute=True),
    Case("full", 2, rows=8, steps=3, model=TIED, recompute=True),
]
OTHERS = [
    Case("lora", None, rows=8, steps=3, family="phi3"),
    Case("full", None, rows=8, steps=3, family="mixtral"),
]
UPPER = [Case(kind, 2, rows=8, steps=3, model=FOUR) for kind in ("head", "upper")]
WINDOWED = [
    Case("full", 2, rows=8, steps=3, model=FOUR, family="gemma2"),
    Case("lora", 2, rows=8, steps=3, model=FOUR, family="qwen2"),
]

Job = tuple[dict[str, Any], list[Case]]
JOBS: dict[str, tuple[int, list[Job]]] = {
    "zero": (2, [({"zero": zero}, PLAIN) for zero in range(4)] + [({"zero": 3}, AGAIN)]),
    "copies": (4, [({"zero": zero, "replicate": 2}, PLAIN) for zero in (1, 2, 3)]),
    "tensor": (2, [({"tensor": 2}, [*PLAIN, *AGAIN, *OTHERS])]),
    "pipeline": (
        2,
        [
            *(({"pipeline": 2, "schedule": s}, PLAIN) for s in ("gpipe", "1f1b", "zero_bubble")),
            ({"pipeline": 2, "schedule": "interleaved"}, [*PLAIN, *UPPER]),
            ({"pipeline": 2}, [*UPPER, *WINDOWED]),
            ({"pipeline": 2, "split": (1, 3)}, PLAIN[:1]),
        ],
    ),
    "two of three": (
        4,
        [
            *(({"pipeline": 2, "zero": zero}, PLAIN) for zero in range(4)),
            *(({"tensor": 2, "zero": zero}, PLAIN) for zero in range(4)),
            *(({"tensor": 2, "pipeline": 2, "schedule": s}, PLAIN) for s in ("1f1b", "interleaved", "zero_bubble")),
            ({"tensor": 2, "pipeline": 2}, [*AGAIN, *OTHERS]),
        ],
    ),
    "all": (8, [({"tensor": 2, "pipeline": 2, "zero": zero}, PLAIN[:1]) for zero in (1, 2, 3)]),
}  # fmt: skip


def heard(jobs: list[Job]) -> list[list[Words]]:
    """What this process says in the third step of each case, when the audit is over."""
    return [[_heard(case, ParallelSettings(**layout)) for case in cases] for layout, cases in jobs]


def _heard(case: Case, settings: ParallelSettings) -> Words:
    mesh = Processes(settings)
    edit = edited(case)
    work = work_of(case, mesh, edit)
    with packing(edit.model, True), Blocks(edit.model, case.recompute).running():
        steps = loop(work, iter(windows(case)))
        list(islice(steps, 2))
        with Heard() as listening:
            next(steps)
    return listening.words


def passes(case: Case, plan: Plan, rank: int, step: int) -> list[Pass]:
    """The micro-batches of a process in a step."""
    mine = windows(case)[step][plan.data_rank(rank) :: plan.data]
    each = case.rows_each or len(mine)
    parts = [mine[i : i + each] for i in range(0, len(mine), each)]
    return [
        Pass(sum(len(r.tokens) for r in rows), sum(r.trained_tokens for r in rows))
        for rows in parts
    ]


def foretold(case: Case, settings: ParallelSettings, processes: int, rank: int) -> Words:
    """The same, from shapes alone."""
    plan, edit = plan_of(settings, processes), edited(case)
    before, now = (passes(case, plan, rank, step) for step in (1, 2))
    widest = [max(one.tokens for one in each) for each in (before, now)]
    portion = Portion(plan, rank, edit.model, edit.trainable())
    anew = widest[0] != widest[1]
    return stated(step_traffic(portion, now, recompute=case.recompute, anew=anew))


@pytest.mark.parametrize("name", JOBS)
def test_what_is_said_is_what_was_stated(pool: Pool, name: str) -> None:
    processes, jobs = JOBS[name]
    found = pool.run(processes, heard, jobs)
    for rank, mine in enumerate(found):
        for (layout, cases), said in zip(jobs, mine, strict=True):
            for case, words in zip(cases, said, strict=True):
                wanted = foretold(case, ParallelSettings(**layout), processes, rank)
                assert words == wanted, (layout, case, rank)


def test_a_message_too_many_would_be_seen(pool: Pool) -> None:
    """The control: of another number of labels, or of blocks that run again, other messages are stated."""
    case, settings = PLAIN[0], ParallelSettings(tensor=2)
    plan, edit = plan_of(settings, 2), edited(case)
    portion, now = Portion(plan, 0, edit.model, edit.trainable()), passes(case, plan, 0, 2)
    (words,) = pool.run(2, heard, [({"tensor": 2}, [case])])[0][0]
    assert words == stated(step_traffic(portion, now))
    assert words != stated(step_traffic(portion, now, recompute=True))
    fewer = [Pass(one.tokens, one.labels - 1) for one in now]
    assert words != stated(step_traffic(portion, fewer))
