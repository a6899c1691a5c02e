"""Whether blocks are compiled is decided by what it saves; compiled runs learn the same, and go on the same."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from afina.config import TrainSettings
from afina.data.settings import DataSettings
from afina.errors import RunError
from afina.models.blocks import Blocks
from afina.models.forward import packing
from afina.techniques.lora import LoRA
from afina.train.metrics import read_metrics
from afina.train.passes import passes_of
from afina.train.plan import Plan
from afina.train.state import Machine, State
from afina.train.tuning import COST_S, GAIN, Tuning
from afina.types import Row
from tests.tiny import tiny_llama
from tests.train.kit import Stop, edited, ragged_rows, run, same, stop_after, weights


class Said:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class NotCompiled(Blocks):
    """Compiles nothing; counts how often that was asked."""

    def compile(self, wanted: bool) -> None:
        self.compiled = wanted
        asked.append(wanted)


asked: list[bool] = []


def tuning(seconds: Sequence[float], **settings: Any) -> tuple[Tuning, Said]:
    """Whose passes take so many seconds each, one after the other."""
    edit, rows = edited(), ragged_rows(8)
    blocks, said = NotCompiled(edit.model), Said()
    passes, _ = passes_of(edit.model, edit, DataSettings())
    ends = itertools.chain.from_iterable((0.0, s) for s in seconds)
    made = Tuning(
        edit,
        Plan(TrainSettings(**{"rows_per_step": 4, "micro_rows": 4, **settings}), rows, 1),
        passes,
        blocks,
        said,  # type: ignore[arg-type]
        clock=lambda: next(ends),
    )
    asked.clear()
    return made, said


def found(made: Tuning, steps: int, compiled: bool | None = None) -> bool | None:
    state = State(0, total_steps=steps, machine=Machine("cpu", "float32", 1, compiled, "", "", ""))
    with packing(made.edit.model, True):
        machine = made.decide(state)[0].machine
    assert machine is not None
    return machine.compiled


PAYS = int(COST_S / GAIN)
"""Steps of a second each from which on compiling pays."""


def test_a_run_is_compiled_from_the_length_on_at_which_it_pays() -> None:
    made, said = tuning([1.0, 0.7])
    assert found(made, PAYS + 1) is True
    assert asked == [True, True]
    assert "compiled: a pass then takes 70% of its time, in a run of about 4 min" in said.lines[-1]
    made, said = tuning([1.0])
    assert found(made, PAYS - 1) is False
    assert asked == []
    assert said.lines == [
        "not compiled: a run of about 3 min 59 s is over before compiling pays "
        "(train.compile=true does it all the same)"
    ]
    made, said = tuning([0.1])
    assert found(made, PAYS) is False
    assert said.lines == []  # nobody waits for compiling in a short run


def test_what_is_slower_for_it_is_not_kept() -> None:
    made, said = tuning([1.0, 1.2])
    assert found(made, PAYS + 1) is False
    assert asked == [True, False]
    assert "not compiled: a pass then takes 120% of its time" in said.lines[-1]


def test_what_was_decided_or_set_is_not_asked_again() -> None:
    made, _ = tuning([])
    assert found(made, 5, compiled=True) is True
    assert asked == [True]
    made, _ = tuning([])
    assert found(made, 10**6, compiled=False) is False
    assert asked == []


def test_a_model_that_a_search_has_warmed_needs_no_pass_to_warm_it() -> None:
    """The passes that come after the search for micro-batches: one that is timed."""

    class Counted(Tuning):
        def _pass(self, rows: Sequence[Row]) -> None:
            passes.append(len(said.lines))
            super()._pass(rows)

    for tokens, after in ((None, 1), (200, 2)):
        passes: list[int] = []
        made, said = tuning([1.0], micro_rows="auto")
        made = Counted(**vars(made))
        machine = Machine("cpu", "float32", 1, None, "", "", "")
        with packing(made.edit.model, True):
            made.decide(State(0, total_steps=5, micro_tokens=tokens, machine=machine))
        told = len(said.lines)
        assert told == (1 if tokens is None else 0)  # of micro-batches, when they were searched
        assert passes.count(told) == after


class Failing(NotCompiled):
    """As where there is no C++ compiler."""

    def compile(self, wanted: bool) -> None:
        super().compile(wanted)
        for handle in handles:
            handle.remove()
        handles.clear()
        if wanted:
            handles.append(self.blocks[0].register_forward_pre_hook(fail))


handles: list[Any] = []


def fail(*args: Any) -> None:
    raise TorchDynamoException("no C++ compiler")


def test_without_a_compiler_a_run_goes_on_without_unless_it_was_asked_for() -> None:
    made, said = tuning([1.0])
    made = replace(made, blocks=Failing(made.edit.model))
    assert found(made, PAYS + 1) is False
    assert asked == [True, False]
    assert said.lines[-1] == "not compiled: no C++ compiler; the run goes on without"
    with pytest.raises(RunError, match=r"train\.compile=false"):
        found(made, 5, compiled=True)


# --- for real ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_run_learns_the_same_and_goes_on_bit_for_bit(
    tmp_path: Path, recompute: bool
) -> None:
    model = tiny_llama().float()
    more = {"val": ragged_rows(4, seed=1), "eval_every": 2, "save_every": 3, "recompute": recompute}
    plain = run(tmp_path / "plain", model=copy.deepcopy(model), steps=6, compile=False, **more)
    whole = run(tmp_path / "whole", model=copy.deepcopy(model), steps=6, compile=True, **more)
    with pytest.raises(Stop):
        parts(tmp_path / "parts", copy.deepcopy(model), options={"seams": stop_after(4)}, **more)
    torch._dynamo.reset()
    again = parts(tmp_path / "parts", copy.deepcopy(model), options={"resume": True}, **more)
    assert same(weights(whole), weights(again))
    assert [x["loss"] for x in read_metrics(tmp_path / "whole")] == [
        x["loss"] for x in read_metrics(tmp_path / "parts")
    ]
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(whole)[name], value, rtol=1e-3, atol=1e-5)
    begun = json.loads((tmp_path / "whole" / "start.json").read_text())
    assert begun["machine"]["compiled"] is True


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["0", "1"])
def test_a_block_without_an_adapter_does_not_stand_for_one_with(
    layers: str, tmp_path: Path
) -> None:
    """Blocks share their graphs; where one alone has an adapter, that must act and learn."""
    for way in (True, False):
        torch._dynamo.reset()
        model = tiny_llama(dtype=torch.float32)
        run(tmp_path / str(way), LoRA(rank=2, layers=layers), model=model, steps=4, compile=way)
    compiled, plain = (read_metrics(tmp_path / str(way)) for way in (True, False))
    for one, other in zip(compiled, plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


def parts(out: Path, model: Any, **more: Any) -> Any:
    return run(out, model=model, steps=6, compile=True, **more)
