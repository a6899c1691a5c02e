from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kit.answers import first_field, score
from bench.kit.jobs import write_job, write_json
from bench.kit.meter import (
    Notes,
    last_tenth_loss,
    peak_memory_bytes,
    read_notes,
    tokens_per_second,
)
from bench.kit.quality import Quality, verdicts
from bench.kit.report import Figure, table, write_figures
from bench.kit.rows import Rows
from bench.kit.side import SideBySide
from bench.kit.training import parse
from bench.kit.variants import quality_variants, variants

CALLS = ['{"intent": "Play", "slots": {"year": "1959"}}', '{"intent": "Rate", "slots": {}}']


def figure(metric: str, ours: float | None, theirs: float | None) -> Figure:
    return Figure(
        "train", "snips", "usual, seed 0", metric, "share", ours, "Trainer + PEFT", theirs
    )


def test_a_row_has_the_agreed_keys_and_the_ratio(tmp_path: Path) -> None:
    write_figures(tmp_path / "f.json", [figure("speed", 300.0, 200.0), figure("x", 1.0, None)])
    first, second = json.loads((tmp_path / "f.json").read_text("utf-8"))
    keys = "bench work setting metric unit value peer peer_value ratio"
    assert list(first) == keys.split()
    assert first["ratio"] == 1.5
    assert second["peer_value"] is None
    assert second["ratio"] is None
    assert figure("x", 1.0, 0.0).ratio is None


def test_the_table_shows_gaps_as_dashes() -> None:
    lines = table([figure("speed", 1234.5, 200.0), figure("x", 0.5, None)]).splitlines()
    assert lines[1].split()[-3:] == ["1,234", "200", "6.173"]
    assert lines[2].split()[-3:] == ["0.5", "-", "-"]


def test_speed_counts_the_time_between_steps_and_no_warm_step(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path))
    for step, end_s in ((1, 100.0), (2, 102.0), (3, 103.0), (4, 106.0)):
        notes.write(step, 1.0, 100 * step, 10, end_s)
    found = read_notes(tmp_path)
    assert tokens_per_second(found, warm=2) == 700 / 4
    for warm in (0, 4):
        with pytest.raises(ValueError, match="nothing to measure"):
            tokens_per_second(found, warm=warm)


def test_a_repeated_step_counts_once_as_last_written(tmp_path: Path) -> None:
    notes = Notes(str(tmp_path))
    for step, loss in ((1, 3.0), (2, 2.5), (3, 9.9), (3, 2.0)):
        notes.write(step, loss, 100, 10, 0.0)
    assert [note["loss"] for note in read_notes(tmp_path)] == [3.0, 2.5, 2.0]


def test_the_last_tenth_is_weighted_by_trained_tokens() -> None:
    notes = [{"loss": 5.0, "trained": 1000}] * 18
    notes += [{"loss": 1.0, "trained": 30}, {"loss": 2.0, "trained": 10}]
    assert last_tenth_loss(notes) == 50 / 40
    assert last_tenth_loss(notes[-2:]) == 2.0


def test_peak_memory_is_that_of_this_process() -> None:
    before = peak_memory_bytes()
    block = b"\1" * (64 * 2**20)
    after = peak_memory_bytes()
    assert after >= before
    assert len(block) < after < 2**40


def test_scores_by_value() -> None:
    answers = [
        CALLS[0] + "\n",
        '{"intent": "Rate", "slots": {"x": 1}}',
        '{"intent": "Play"',
        "Play",
    ]
    found = score(answers, [CALLS[0], CALLS[1], CALLS[0], CALLS[0]])
    assert found["exact_match"] == (0.25, pytest.approx((0.25 * 0.75 / 4) ** 0.5))
    assert found["intent_accuracy"] == (0.5, pytest.approx(0.25))


def test_the_field_is_the_first_key_that_all_references_share() -> None:
    assert first_field(CALLS) == "intent"
    assert first_field([*CALLS, '{"call": "x"}']) is None
    assert first_field([*CALLS, "no JSON"]) is None
    assert set(score(["a"], ["a"])) == {"exact_match"}


def test_verdicts_say_when_a_promise_fails() -> None:
    def judged(loss: float, share: float) -> list[str]:
        rows = [
            figure("loss, last tenth", loss, 0.1),
            figure("exact_match", share, 0.5),
            figure("exact_match, standard error", 0.03, 0.04),
        ]
        return [line.rsplit(" ", 1)[1] for line in verdicts(rows)]

    assert judged(0.1029, 0.401) == ["holds", "holds"]
    assert judged(0.1031, 0.399) == ["FAILS", "FAILS"]
    assert list(verdicts([figure("loss, last tenth", 0.1, None)])) == []


def test_weights_are_bf16_only_where_that_is_fast() -> None:
    assert {each.knobs["dtype"] for each in variants(fast_bf16=False)} == {"float32"}
    assert {each.knobs["dtype"] for each in variants(fast_bf16=True)} == {"bfloat16"}
    assert [each.setting for each in quality_variants(fast_bf16=False)] == ["usual", "default"]
    assert [each.setting for each in quality_variants(fast_bf16=True)][2:] == ["expert"]
    assert not any(each.knobs.get("group_by_length") for each in quality_variants(fast_bf16=True))


def test_figures_come_from_finished_pieces_and_a_missing_side_stays_empty(tmp_path: Path) -> None:
    rows = Rows("tiny", [([1, 2], [-100, 2])], [{"ids": [1], "reference": CALLS[0]}])
    options = parse("", ["--work", str(tmp_path), "--cached", "--seed", "0", "--only", "quality"])
    side = SideBySide(options, rows, str(tmp_path), fast_bf16=False)
    ours = next(each for each in quality_variants(fast_bf16=False) if each.tool == "afina")
    run, answers = (
        tmp_path / f"tiny-{kind}-afina-default-0-key" for kind in ("quality", "answers")
    )
    write_job(replace(side.job(ours, 0, 120, 0, 16), save=True, folder=str(run)))
    for step in range(1, 21):
        Notes(str(run)).write(step, 2.0 / step, 20, 10, 0.0)
    (run / "adapter").mkdir()
    (run / "result.json").write_text('{"peak_bytes": 1}')
    write_json(answers / "job.json", Quality(side).answers_job(ours, run))
    (answers / "result.json").write_text(json.dumps({"answers": [CALLS[0]]}))
    found = {f.metric: (f.setting, f.value, f.peer_value) for f in Quality(side).figures()}
    assert found["loss, first step"] == ("usual, seed 0", 2.0, None)
    assert found["loss, last tenth"][1] == pytest.approx((2 / 19 + 2 / 20) / 2)
    assert found["intent_accuracy"] == ("usual, seed 0", 1.0, None)
    assert side.failures == []
