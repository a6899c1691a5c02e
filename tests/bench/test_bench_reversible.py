"""The bench of reversible blocks, on a tiny model: the figures of its parts, and what is counted as saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import reversible
from bench.kit.beside import Taken
from bench.kit.reversing import saved_bytes, start_losses
from tests.tiny import tiny_llama
from tests.train.kit import ragged_rows


def test_the_start_is_that_of_plain_blocks_and_the_nearer_the_more_bits() -> None:
    model = tiny_llama(num_hidden_layers=4, dtype=torch.float32)
    settings = [{"bits": 2, "plain": 1}, {"bits": 8, "plain": 1}]
    from afina.models.forward import packing

    with packing(model, True):
        losses = start_losses(model, ragged_rows(4), settings)
    found = reversible.starts(losses, settings, "rows")
    assert [figure.setting for figure in found] == ["bits 2, plain 1", "bits 8, plain 1"]
    gaps = [abs(figure.value - figure.peer_value) for figure in found]  # type: ignore[operator]
    assert 0 < gaps[1] < gaps[0] / 8
    assert len({figure.peer_value for figure in found}) == 1


def test_what_is_saved_is_counted_by_way() -> None:
    model = tiny_llama(num_hidden_layers=8, dtype=torch.float32)
    from afina.models.forward import packing

    with packing(model, True):
        counts = {
            name: saved_bytes(model, ragged_rows(4), *way) for name, way in reversible.SAVED.items()
        }
    found = {
        (figure.setting, figure.peer): figure.ratio for figure in reversible.saved(counts, "rows")
    }
    plain, again = reversible.PLAIN, reversible.RECOMPUTED
    assert set(found) == {(again, plain)} | {
        (name, peer) for name in reversible.SAVED for peer in (plain, again) if "rev" in name
    }
    few, many = found["reversible", plain], found["reversible, plain blocks kept", plain]
    assert few is not None
    assert many is not None
    assert few < many < 1
    fewer = found["reversible, 4 bits", again]
    assert fewer is not None
    assert fewer < (found["reversible", again] or 0)


def test_time_and_memory_are_told_beside_both() -> None:
    taken = {
        name: Taken([3.0, 1.0, 2.0], 10 * number, [1.0])
        for number, name in enumerate(reversible.WAYS, 1)
    }
    found = reversible.steps(taken, "rows")
    assert {(f.setting, f.peer) for f in found if f.setting == "reversible"} == {
        ("reversible", reversible.PLAIN),
        ("reversible", reversible.RECOMPUTED),
    }
    assert {f.ratio for f in found if f.metric == "processor time"} == {1.0}
    (memory,) = (
        f.ratio
        for f in found
        if (f.setting, f.peer, f.metric) == ("reversible", "plain", "peak memory")
    )
    assert memory == 3.0


def test_a_way_is_asked_for_with_what_it_is_measured_by() -> None:
    options = reversible.parse(["--only", "reversible"])
    assert reversible.ways(options) == ["plain", "recompute", "reversible"]
    assert reversible.ways(reversible.parse([])) == list(reversible.WAYS)


def test_what_is_finished_is_kept_and_found_by_its_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    losses = {"loss as trained, first step": 2.0}

    def run(*call: object, **size: object) -> dict[str, float]:
        ran.append(call[2])
        return losses

    monkeypatch.setattr(reversible, "run", run)
    monkeypatch.setattr(reversible, "made_rows", lambda *_: ("model", tmp_path, "rows"))
    monkeypatch.setattr(reversible, "model_hash", lambda folder: "hash")
    asked = ["--results", str(tmp_path), "--part", "learnt", "--only", "reversible"]
    size = reversible.Size(learnt=3)
    first = reversible.Bench(reversible.parse(asked), size).figures()
    again = reversible.Bench(reversible.parse(asked), size).figures()
    assert ran == [{}, {"reversible": {}}]
    assert first == again
    assert [(f.setting, f.metric, f.ratio) for f in first] == [("reversible", *losses, 1.0)]
    cached = reversible.parse([*asked, "--cached"])
    assert reversible.Bench(cached, size).figures() == first
    assert reversible.Bench(cached, reversible.Size(learnt=4)).figures() == []
