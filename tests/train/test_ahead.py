"""The next window is made while this one runs: the same losses, in time, and its errors come out where it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest

from afina.errors import DataError
from afina.models.forward import packing
from afina.train.ahead import Ahead, made
from afina.train.loop import backward, loop
from afina.tree import Seams
from afina.types import Batch, Row
from tests.train.kit import edited, ragged_rows, work_of

PATIENCE_S = 60


def windows() -> Iterator[list[Row]]:
    """Other rows in every step."""
    return (ragged_rows(5, seed=number) for number in range(4))


def watched(batch: Batch, step: int) -> Batch:
    """Changes nothing; refuses to be called by another thread than the one that trains."""
    assert threading.current_thread() is threading.main_thread(), step
    return batch


@pytest.mark.parametrize("rows_each", [2, 5])
def test_steps_are_those_of_windows_made_one_by_one(rows_each: int) -> None:
    seams = Seams(on_batch=(watched,))
    edit = edited()
    with packing(edit.model, True):
        found = list(loop(work_of(edit, rows_each=rows_each, seams=seams), windows()))
    plain = edited()
    work = work_of(plain, rows_each=rows_each)
    with packing(plain.model, True):
        for step, rows in enumerate(windows()):
            work.optimiser.set_lr(found[step].lr)
            assert backward(work, made(work, rows), step).loss == found[step].loss
            assert found[step].rows == tuple(row.id for row in rows)
            work.optimiser.step()
            work.optimiser.clear_gradients()
    assert len({step.loss for step in found}) == 4  # the steps do differ


def test_the_next_window_is_there_before_the_step_ends() -> None:
    """A step that waits for the tensors of the next one ends; nothing is made beyond the last."""
    edit, names = edited(), list[str]()
    several = [threading.Event() for _ in range(4)]
    work = work_of(edit)

    class Told(type(work.passes)):
        def batch(self, rows: Sequence[Row]) -> Batch:
            names.append(threading.current_thread().name)
            found = super().batch(rows)
            several[len(names) - 1].set()
            return found

    def wait(step: int) -> None:
        assert step == 3 or several[step + 1].wait(PATIENCE_S)

    passes = Told(**vars(work.passes))
    work = replace(work, passes=passes, seams=Seams(at_step=(wait,)))
    asked = list[int]()
    with packing(edit.model, True):
        found = loop(work, (asked.append(n) or rows for n, rows in enumerate(windows())))
        for step in found:
            assert asked == list(range(min(step.step + 1, 4)))
    assert len(names) == 4
    assert all(name.startswith("afina-ahead") for name in names)


def test_rows_are_asked_for_by_whoever_takes_them() -> None:
    threads = list[threading.Thread]()
    work = work_of(edited())
    told = (threads.append(threading.current_thread()) or rows for rows in windows())
    with Ahead(work, told, 3) as ahead:
        for rows in islice(windows(), 3):
            window = ahead.take()
            assert window.rows == rows
            assert [row for part in window.parts() for row in part.rows] == rows
    assert set(threads) == {threading.main_thread()}
    assert len(threads) == 3


def test_an_error_of_the_next_window_is_that_of_its_step() -> None:
    edit = edited()
    broken = [Row((), (), 0)]
    steps = list[int]()
    found = loop(work_of(edit), iter([*islice(windows(), 2), broken, broken]))
    with packing(edit.model, True), pytest.raises(DataError, match="every row a token"):
        steps.extend(step.step for step in found)
    assert steps == [1, 2]


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    edit = edited()
    with packing(edit.model, True):
        steps = loop(work_of(edit), windows())
        next(steps)
        assert any(t.name.startswith("afina-ahead") for t in threading.enumerate())
        steps.close()
    assert not any(t.name.startswith("afina-ahead") for t in threading.enumerate())
