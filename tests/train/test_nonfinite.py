"""NaN and infinity: the run stops, or leaves the step out; the batch is kept, the rows and tensors are named."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afina.errors import RunError
from afina.train.metrics import read_metrics
from afina.train.nonfinite import MOST_IN_A_ROW, Fault
from afina.train.report import Silent
from afina.tree import Seams
from afina.types import Batch
from tests.tiny import tiny_llama
from tests.train import kit
from tests.train.kit import Stop, ragged_rows, same, weights

# What weighs losses keeps rows apart; a run without it that must equal one with it does so too.
run = partial(kit.run, share=False)


def spoils(*rows: int, value: float = float("nan")) -> Seams:
    """A loss that is not finite for any batch with one of these rows."""

    def spoil(losses: Tensor, batch: Batch, step: int) -> Tensor:
        return losses * value if set(rows) & set(batch.rows) else losses

    return Seams(loss=(spoil,))


def rows_of_steps(steps: int) -> list[list[int]]:
    """Which rows each step of the runs here has (ten rows, four a step, seed 0)."""
    from afina.data.order import windows

    found = windows([1] * 10, 0, rows_per_step=4)
    return [list(next(found).rows) for _ in range(steps)]


def test_a_loss_that_is_not_finite_stops_the_run_saves_it_and_names_the_rows(
    tmp_path: Path,
) -> None:
    """The row is in the third step, the micro-batches have two rows each; the two steps before are saved."""
    bad = rows_of_steps(3)[2][0]
    part = rows_of_steps(3)[2][:2]
    with pytest.raises(RunError, match="step 3: the loss or the gradient is not finite") as caught:
        run(tmp_path / "run", steps=5, options={"seams": spoils(bad)})
    got, cure = str(caught.value.got), str(caught.value.cure)
    assert f"rows {part}" in got
    assert "not finite: the loss of micro-batch 1 of 1" in got
    assert f"rows.jsonl:{bad + 1}" in got
    assert str(tmp_path / "run/nan/step-000003.json") in got
    assert "--on-nan skip" in cure
    assert (
        "2 steps before it saved, go on with what is changed: afina train --resume --allow-ch"
        in cure
    )
    kept = json.loads((tmp_path / "run/nan/step-000003.json").read_text())
    assert [row["id"] for row in kept["rows"]] == rows_of_steps(3)[2]
    assert kept["suspects"] == part
    assert kept["micro_batches"] == [{"rows": part, "loss": "nan"}]
    row = next(row for row in ragged_rows(10) if row.id == bad)
    assert kept["rows"][0]["tokens"] == list(row.tokens)
    assert kept["rows"][0]["source"] == row.source
    assert [bool(flag) for flag in kept["rows"][0]["trained"]] == list(row.trained)
    # The weights are those of a run of these two steps, whatever the length of the schedule.
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]
    # It goes on: with the row mended, or with what cannot be learnt left out.
    allow = {"resume": True, "allow_changes": True, "seams": spoils(bad)}
    rest = run(tmp_path / "run", steps=5, on_nan="skip", options=allow)
    losses = [line["loss"] is None for line in read_metrics(rest.folder)]
    assert losses[:3] == [False, False, True]
    with pytest.raises(RunError):
        run(tmp_path / "mended", steps=5, options={"seams": spoils(bad)})
    again = run(tmp_path / "mended", steps=5, options={"resume": True})
    assert same(weights(again), weights(run(tmp_path / "whole", steps=5)))


def test_a_gradient_that_is_not_finite_names_its_tensors(tmp_path: Path) -> None:
    """Every loss is finite, and the backward pass is not: a square root at zero."""

    def spoil(losses: Tensor, batch: Batch, step: int) -> Tensor:
        return losses + torch.sqrt(losses * 0) if step == 1 else losses

    with pytest.raises(RunError) as caught:
        run(tmp_path / "run", steps=3, options={"seams": Seams(loss=(spoil,))})
    got = str(caught.value.got)
    assert "the gradient of 14 of 14 lora.a, 14 of 14 lora.b, though every loss is finite" in got
    kept = json.loads((tmp_path / "run/nan/step-000002.json").read_text())
    assert len(kept["tensors"]) == 28
    assert kept["gradient_norm"] == "nan"
    assert kept["suspects"] == rows_of_steps(2)[1]


def test_skipped_steps_move_nothing_and_are_counted(tmp_path: Path) -> None:
    """The step after it starts from the weights that the step before it left."""
    said: list[str] = []

    class Listen(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    bad = rows_of_steps(3)[1][0]
    options = {"seams": spoils(bad), "reporter": Listen()}
    found = run(tmp_path / "run", steps=3, on_nan="skip", options=options)
    lines = read_metrics(found.folder)
    assert [line["loss"] is None for line in lines] == [False, True, False]
    assert lines[1]["skipped"].startswith("the loss of micro-batch")
    assert "NaN" not in (found.folder / "metrics.jsonl").read_text()
    assert math.isfinite(found.loss)
    (warning,) = [text for text in said if "skipped" in text]
    assert warning.startswith("warning: step 2 skipped, the loss of micro-batch")
    state = json.loads((found.folder / "checkpoints/step-000003/state.json").read_text())
    assert state["skipped"] == 1

    def starts(name: str, at: int, seams: Seams) -> dict[str, Tensor]:
        """The weights that the optimiser's step `at` (counted from 0) starts from."""
        seen: dict[str, Tensor] = {}

        def look(step: int, tensors: dict[str, Any]) -> None:
            if step == at:
                seen.update({n: t.detach().clone() for n, t in tensors.items()})

        both = Seams(loss=seams.loss, before_step=(look,))
        run(tmp_path / name, steps=3, on_nan="skip", options={"seams": both})
        return seen

    third = starts("skipping", 2, spoils(bad))
    plain = [starts(f"plain-{at}", at, Seams()) for at in (1, 2)]
    assert same(third, plain[0])
    assert not same(third, plain[1])


def test_the_first_step_may_be_skipped_without_an_alarm_of_the_audit(tmp_path: Path) -> None:
    """A's gradient is silent at the first step that moves B, whichever that is; also when the run goes on there."""

    def spoil(losses: Tensor, batch: Batch, step: int) -> Tensor:
        return losses * float("inf") if step < 2 else losses

    def die(step: int) -> None:
        if step == 2:
            raise Stop

    bad = Seams(loss=(spoil,))
    whole = run(tmp_path / "run", steps=5, on_nan="skip", save_every=1, options={"seams": bad})
    assert [line["loss"] is None for line in read_metrics(whole.folder)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(Stop):
        run(
            tmp_path / "parts",
            steps=5,
            on_nan="skip",
            save_every=1,
            options={"seams": Seams(loss=(spoil,), after_step=(die,))},
        )
    rest = run(
        tmp_path / "parts",
        steps=5,
        on_nan="skip",
        save_every=1,
        options={"seams": bad, "resume": True},
    )
    assert same(weights(whole), weights(rest))


def test_so_many_skipped_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"step {MOST_IN_A_ROW}:") as caught:
        run(
            tmp_path / "run",
            steps=30,
            on_nan="skip",
            options={"seams": spoils(*range(10), value=float("inf"))},
        )
    assert f"{MOST_IN_A_ROW} steps in a row" in str(caught.value.cure)
    assert len(list((tmp_path / "run/nan").iterdir())) == MOST_IN_A_ROW


def test_a_run_in_which_no_step_moved_is_not_done(tmp_path: Path) -> None:
    """Fewer steps than stop it by themselves; the control is a run with one good step among them."""
    bad = [i for ids in rows_of_steps(3) for i in ids]
    settings = {"steps": 3, "on_nan": "skip"}
    with pytest.raises(RunError, match="no step of this run moved the weights") as caught:
        run(tmp_path / "run", options={"seams": spoils(*bad)}, **settings)
    assert caught.value.got == "3 of 3 steps skipped"
    assert str(tmp_path / "run/nan") in str(caught.value.cure)
    assert not (tmp_path / "run/adapter").exists()
    assert not (tmp_path / "run/result.json").exists()
    with pytest.raises(RunError, match="no step of this run"):
        run(tmp_path / "run", options={"resume": True}, **settings)
    # The third step has the two rows that are left of the epoch, and neither of the spoilt ones.
    few = [i for ids in rows_of_steps(2) for i in ids]
    assert run(tmp_path / "most", options={"seams": spoils(*few)}, **settings).steps == 3


def ruins(step: int) -> Seams:
    """A step that throws the weights far out, as one of too high a rate does: finite still, and of no use."""

    def throw(done: int, tensors: dict[str, Any]) -> None:
        if done == step - 1:
            for tensor in tensors.values():
                tensor.grad.mul_(1e25)

    return Seams(before_step=(throw,))


def test_weights_that_a_step_ruined_are_not_gone_on_from(tmp_path: Path) -> None:
    """What is advised helps: from the checkpoint before that step; from the newest, and by skipping, nothing does."""
    wild = {"steps": 5, "optimizer": "sgd", "clip": None, "save_every": 1}
    out = tmp_path / "run"

    def again(**options: Any) -> Any:
        settings = {**wild, **options.pop("settings", {})}
        return run(out, model=tiny_llama(dtype=torch.float32), options=options, **settings)

    with pytest.raises(RunError, match="step 4: the loss or the gradient") as caught:
        again(seams=ruins(3))
    got, cure = str(caught.value.got), str(caught.value.cure)
    assert "the step before ruined the weights: its rows had loss" in got
    assert cure.startswith("lower train.lr: with it these weights cannot be mended")
    assert "skip" not in cure
    way = f"afina train --resume-from step-000002 --allow-changes --lr 0.001 -o {out}"
    assert way in cure
    # The same is known, and advised, where a run goes on from such weights.
    for on_nan in ("stop", "skip"):
        with pytest.raises(RunError, match="step 4: the loss") as caught:
            again(resume=True, allow_changes=True, settings={"on_nan": on_nan})
        assert way in str(caught.value.cure)
    rest = again(resume_from="step-000002", allow_changes=True, settings={"lr": 1e-3})
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5]
    assert math.isfinite(rest.loss)


def test_weights_that_were_ruined_push_no_good_ones_out(tmp_path: Path) -> None:
    """Where the ruined ones are not saved already; and without any earlier ones the run begins anew, more slowly."""
    wild = {"steps": 9, "optimizer": "sgd", "clip": None, "keep_last": 1}
    single = {"model": tiny_llama(dtype=torch.float32)}
    with pytest.raises(RunError, match="step 6") as caught:
        run(tmp_path / "run", options={"seams": ruins(5)}, save_every=3, **single, **wild)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert names == ["step-000003"]
    assert "--resume-from step-000003 --allow-changes --lr 0.001" in str(caught.value.cure)
    single = {"model": tiny_llama(dtype=torch.float32)}
    with pytest.raises(RunError, match="step 2") as caught:
        run(tmp_path / "other", options={"seams": ruins(1)}, save_every=1, **single, **wild)
    assert "nothing earlier is saved: begin anew with --lr 0.001 and --overwrite" in str(
        caught.value.cure
    )


def test_a_loss_that_only_rose_a_little_shows_no_ruin() -> None:
    def fault(relapse: tuple[float, float] | None) -> Fault:
        rows = tuple(ragged_rows(2))
        return Fault(3, math.nan, 1.0, (((1, 2), math.nan),), (), {}, rows, relapse)

    for relapse in (None, (5.0, 4.9), (5.0, 7.0), (0.01, 0.5)):
        assert not fault(relapse).ruined
    for relapse in ((5.0, math.nan), (5.0, math.inf), (5.0, 80.0)):
        assert fault(relapse).ruined


def test_a_norm_that_overflows_though_all_is_finite_is_told_apart() -> None:
    fault = Fault(3, 1.0, math.inf, (((1, 2), 1.0),), (), {}, tuple(ragged_rows(2)))
    assert fault.cause().startswith("the sum over the micro-batches or over the gradient")
    assert [row.id for row in fault.suspects()] == [0, 1]


def test_rows_without_a_label_are_no_fault(tmp_path: Path) -> None:
    """The control: a step whose rows train nothing moves nothing, and is not called bad."""
    rows = ragged_rows(8, untrained=rows_without(8, 0))
    found = run(tmp_path / "run", steps=4, data=rows)
    assert not (found.folder / "nan").exists()
    first = read_metrics(found.folder)[0]
    assert first["trained_tokens"] == 0
    assert "skipped" not in first


def rows_without(count: int, step: int) -> list[int]:
    from afina.data.order import windows

    found = windows([1] * count, 0, rows_per_step=4)
    return list([next(found) for _ in range(step + 1)][step].rows)
