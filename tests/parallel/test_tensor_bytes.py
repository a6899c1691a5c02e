"""What each process holds where matrices are shared is what the formulas say."""

from __future__ import annotations

import pytest

from afina.config import ParallelSettings
from afina.models.forward import packing
from afina.parallel.plan import plan_of
from afina.parallel.predict import predicted
from afina.parallel.processes import Processes
from afina.train.loop import loop
from tests.parallel import tensor_kit  # noqa: F401 - families
from tests.parallel.parity import Case, edited, windows, work_of
from tests.parallel.pool import Pool
from tests.parallel.test_bytes import WIDE, ledger

pytestmark = pytest.mark.dist


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
