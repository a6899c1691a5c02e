"""The cheap points: what a run asks of its rows before it writes anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.config import TrainSettings
from afina.data.dataset import Prepared, prepare
from afina.data.settings import DataSettings
from afina.errors import DataError
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train import preflight
from afina.train.options import RunOptions
from afina.train.preflight import Finding, Subject
from afina.train.preflight.labels import labels, stop_token, turns
from afina.train.preflight.lengths import histogram, lengths
from afina.train.preflight.template import spread, template
from afina.train.preflight.twice import duplicates, overlap
from afina.train.report import Silent
from afina.train.run import train
from afina.types import Row
from tests.data import kit
from tests.data.kit import tokenizer_of
from tests.tiny import byte_tokenizer, tiny_llama


def row(number: int, tokens: tuple[int, ...], trained: str, **more: Any) -> Row:
    """A row whose labels are the 1s of `trained`."""
    return Row(
        tokens, tuple(mark == "1" for mark in trained), number, f"a.jsonl:{number + 1}", **more
    )


def ready(*rows: dict[str, Any], template: str | None = kit.CHATML, **settings: Any) -> Prepared:
    return prepare(rows, tokenizer_of(template), DataSettings(**settings))


def subject(rows: list[Row], tokenizer: Any, **more: Any) -> Subject:
    """What `stop_token` looks at; the stops are the end of text and that of a turn."""
    named = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    stops = sorted({id for id in named if id is not None})
    given = {"stops": stops, "named_stops": stops, "context": 99, "limit": 99, **more}
    return Subject(rows, [], tokenizer, settings=TrainSettings(), **given)


BYTES = byte_tokenizer()
ASKED = [kit.turns(f"Question {n}?", f"Answer {n}.") for n in range(3)]


# --- labels ------------------------------------------------------------------------------------------------------


def test_turns_are_the_runs_of_labels() -> None:
    assert list(turns(row(0, (1, 2, 3, 4, 5, 6), "011011"))) == [(1, 3), (4, 6)]
    assert list(turns(row(0, (1, 2), "00"))) == []


def test_no_trained_token_at_all_is_an_error() -> None:
    """The first token of a row has nothing before it, so its label does not count."""
    finding = labels([row(0, (1, 2, 3), "000"), row(1, (1, 2), "10")], [9])
    assert (finding.status, finding.values["trained_tokens"]) == ("error", 0)
    assert finding.seen == "not one of 5 tokens would be trained"


def test_rows_that_train_nothing_are_named() -> None:
    rows = [row(0, (1, 2, 3), "011"), *(row(n, (1, 2), "00") for n in range(1, 6))]
    finding = labels(rows, [9])
    assert finding.status == "warning"
    assert (
        "5 rows without a trained token: a.jsonl:2, a.jsonl:3, a.jsonl:4 and 2 more" in finding.seen
    )


def test_an_empty_answer_is_only_its_stop() -> None:
    prepared = ready(*ASKED, kit.turns("Hi", ""))
    stop = tokenizer_of(kit.CHATML).convert_tokens_to_ids("<|im_end|>")
    finding = labels(prepared.rows, [stop])
    assert finding.status == "warning"
    assert "1 row with an empty answer, which teaches to stop at once: row:4" in finding.seen
    assert labels(prepared.rows[:3], [stop]).status == "ok"


def test_the_share_that_trains_is_said() -> None:
    finding = labels([row(0, (1, 2, 3, 9), "0011")], [9])
    assert (finding.status, finding.seen) == ("ok", "2 of 4 tokens are trained (50 %)")


# --- stop token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (kit.CHATML, {}),
        (kit.LLAMA3, {}),
        (kit.MISTRAL, {}),
        (kit.ENDLESS, {"train_on": "last"}),
        (kit.CHATML, {"train_on": "text"}),
        (None, {}),
    ],
)
def test_prepared_rows_train_their_stop(form: str | None, settings: dict[str, Any]) -> None:
    """Whatever the template writes after the stop: SmolLM2's form ends a row with a line end."""
    tokenizer = tokenizer_of(form)
    data = ASKED if form else [{"prompt": f"q {n}", "completion": f"a {n}"} for n in range(3)]
    rows = prepare(data, tokenizer, DataSettings(**settings)).rows
    known = [tokenizer.eos_token_id, *tokenizer.all_special_ids]
    finding = stop_token(subject(rows, tokenizer, stops=known, named_stops=known))
    assert (finding.status, finding.values["turns"]) == ("ok", 3)


@pytest.mark.parametrize(
    ("form", "stop"),
    [
        (kit.CHATML, "<|im_end|>"),
        (kit.LLAMA3, "<|eot|>"),
        (kit.GEMMA, "<end_of_turn>"),
        (kit.MISTRAL, "</s>"),
    ],
)
def test_the_stop_is_the_templates_own_and_not_merely_the_end_of_text(form: str, stop: str) -> None:
    """What `generate` stops on is asked, as a run does: of a model that names the end of text alone."""
    model, tokenizer = tiny_llama(eos_token_id=1), tokenizer_of(form)
    rows = prepare(ASKED, tokenizer, DataSettings()).rows
    asked = preflight.subject_of(
        model, tokenizer, (rows, []), TrainSettings(), DataSettings(), given=False
    )
    finding = stop_token(asked)
    assert finding.values == {"turns": 3, "without_stop": 0, "stop_tokens": [stop]}
    assert finding.status == ("ok" if stop == "</s>" else "note")


def masked_stop(prepared: Prepared, which: list[int]) -> list[Row]:
    """The rows with the label of the stop taken away from some."""
    out: list[Row] = []
    for number, one in enumerate(prepared.rows):
        last = max(at for at, label in enumerate(one.trained) if label)
        trained = tuple(label and at != last for at, label in enumerate(one.trained))
        out.append(replace(one, trained=trained) if number in which else one)
    return out


def test_a_stop_that_is_never_trained_is_an_error_and_one_missing_a_warning() -> None:
    tokenizer, prepared = tokenizer_of(kit.CHATML), ready(*ASKED)
    none = stop_token(subject(masked_stop(prepared, [0, 1, 2]), tokenizer))
    assert none.status == "error"
    assert "3 of 3 trained turns do not end with </s> or <|im_end|>" in none.seen
    one = stop_token(subject(masked_stop(prepared, [1]), tokenizer))
    assert (one.status, one.values["without_stop"]) == ("warning", 1)
    assert one.seen.endswith(": row:2")


def test_labels_that_the_caller_chose_are_only_warned_about() -> None:
    rows = masked_stop(ready(*ASKED), [0, 1, 2])
    finding = stop_token(subject(rows, tokenizer_of(kit.CHATML), given=True))
    assert finding.status == "warning"


def test_a_cut_row_has_no_stop_and_that_is_a_warning() -> None:
    tokenizer = tokenizer_of(None)
    data = [{"text": "one two three four five six seven"}] * 2
    rows = prepare(data, tokenizer, DataSettings(max_tokens=5, over_long="truncate")).rows
    finding = stop_token(subject(rows, tokenizer, limit=5))
    assert finding.status == "warning"
    assert "(cut there)" in finding.seen
    # The control: rows that merely miss their stop are not taken for cut ones.
    assert stop_token(subject(rows, tokenizer, limit=99)).status == "error"


def test_a_stop_that_other_programs_do_not_know_is_noted() -> None:
    tokenizer = tokenizer_of(kit.CHATML)
    rows = ready(*ASKED).rows
    finding = stop_token(subject(rows, tokenizer, named_stops=[tokenizer.eos_token_id]))
    assert finding.status == "note"
    assert "do not name <|im_end|>" in finding.seen
    assert "generation_config.json" in finding.cure


def test_without_a_tokenizer_nothing_is_said_of_texts() -> None:
    rows = [row(0, (1, 2, 3), "011")]
    looked = replace(subject(rows, tokenizer_of(None)), tokenizer=None)
    assert [stop_token(looked).status, template(rows, None).status] == ["skipped", "skipped"]


# --- template ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [kit.CHATML, kit.MISTRAL, kit.GEMMA, kit.TOOLS])
def test_rows_of_common_templates_begin_as_generation_does(form: str) -> None:
    rows = ready(*ASKED, kit.turns("a", "b", "c", "d"), template=form).rows
    finding = template(rows, tokenizer_of(form))
    assert finding.status == "ok", finding
    assert finding.values == {
        "rows": 4,
        "other_ids": 0,
        "other_prompt": 0,
        "rewritten": 0,
        "not_reversible": 0,
    }


def test_a_prompt_that_generation_writes_otherwise_is_a_warning() -> None:
    rows = ready(*ASKED, template=kit.OPENS_THOUGHT).rows
    finding = template(rows, tokenizer_of(kit.OPENS_THOUGHT))
    assert (finding.status, finding.values["other_prompt"]) == ("warning", 3)


def test_an_answer_that_merges_with_its_prompt_is_noted() -> None:
    """Read as a whole, "one two" has a token of a space and the word; generation gets the space with the prompt."""
    pairs = [{"prompt": "one ", "completion": "two"}, {"prompt": "one", "completion": " two"}]
    tokenizer = tokenizer_of(None)
    rows = prepare(pairs, tokenizer, DataSettings()).rows
    finding = template(rows, tokenizer)
    assert (finding.status, finding.values["other_ids"]) == ("note", 1)
    assert finding.seen.startswith("1 row whose prompt and answer are tokenised apart")
    assert template(rows[1:], tokenizer).status == "ok"


def test_earlier_answers_that_generation_reads_otherwise_are_a_warning() -> None:
    """Two line ends before an answer are one token at the end of a prompt, and two inside it."""
    tokenizer = tokenizer_of(kit.LLAMA3)
    one = template(ready(*ASKED, template=kit.LLAMA3).rows, tokenizer)
    assert (one.status, one.values["other_ids"]) == ("note", 3)
    two = template(ready(kit.turns("a", "b", "c", "d"), template=kit.LLAMA3).rows, tokenizer)
    assert (two.status, two.values["other_prompt"]) == ("warning", 1)


def test_rows_of_another_tokenizer_are_a_warning() -> None:
    tokenizer = tokenizer_of(None)
    letters = tuple(tokenizer.convert_tokens_to_ids(list("one")))
    assert tokenizer("one")["input_ids"] != list(letters)
    finding = template([row(0, letters, "111")], tokenizer)
    assert (finding.status, finding.values["other_ids"]) == ("warning", 1)


def test_a_template_that_rewrites_earlier_turns_is_noted() -> None:
    tokenizer = tokenizer_of(kit.REWRITES)
    data = [kit.turns("a", "b", "c", "d"), kit.turns("a", "b")]
    rows = prepare(data, tokenizer, DataSettings(train_on="last")).rows
    finding = template(rows, tokenizer)
    assert (finding.status, finding.values["rewritten"]) == ("note", 1)
    assert "1 row with earlier turns that the template rewrites" in finding.seen
    assert template(rows[1:], tokenizer).status == "ok"


def test_rows_are_looked_at_all_over_the_data() -> None:
    rows = [row(n, (1, 2), "01") for n in range(100)]
    assert [one.id for one in spread(rows, 4)] == [0, 25, 50, 75]
    assert spread(rows[:3], 4) == rows[:3]


# --- lengths -----------------------------------------------------------------------------------------------------


def of_lengths(*numbers: int) -> list[Row]:
    return [row(n, (1,) * length, "1" * length) for n, length in enumerate(numbers)]


def test_a_row_longer_than_the_context_is_an_error() -> None:
    rows = of_lengths(3, 12, 5)
    finding = lengths(rows, [], 11, TrainSettings())
    assert finding.status == "error"
    assert finding.seen == "a.jsonl:2 has 12 tokens, and the model reads 11"
    fits = lengths(rows, [], 12, TrainSettings())
    assert (fits.status, fits.values) == (
        "ok",
        {"min": 3, "max": 12, "mean": 20 / 3, "context": 12},
    )
    assert lengths(rows, [], None, TrainSettings()).status == "ok"
    other = lengths(rows, of_lengths(13), 12, TrainSettings())
    assert (other.status, other.seen) == (
        "error",
        "a.jsonl:1 has 13 tokens, and the model reads 12",
    )


def test_a_row_longer_than_a_micro_batch_or_a_step_is_a_warning() -> None:
    rows = of_lengths(3, 12)
    for settings in ({"micro_tokens": 11}, {"tokens_per_step": 11}):
        finding = lengths(rows, [], 99, TrainSettings(**settings))
        assert finding.status == "warning"
        assert next(iter(settings)) in finding.seen
    assert lengths(rows, [], 99, TrainSettings(tokens_per_step=12, micro_tokens=12)).status == "ok"


def test_the_histogram_counts_every_row_once() -> None:
    bars = histogram([1, 1, 2, 9, 16])
    assert bars[0] == f" 1 to  2  {'█' * 40} 3"
    assert [int(bar.rsplit(" ", 1)[1]) for bar in bars] == [3, 0, 0, 0, 1, 0, 0, 1]
    assert histogram([7, 7, 8]) == (f"7  {'█' * 40} 2", f"8  {'█' * 20} 1")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (labels([Row((1, 2), (False, True), 0)], []), "1 of 2 tokens is trained (50 %)"),
        (labels([Row((1, 2, 3), (False, True, True), 0)], []), "2 of 3 tokens are trained"),
        (labels([Row((1,), (False,), 0)], []), "not one of 1 token would be trained"),
        (lengths(of_lengths(1), [], None, TrainSettings()), "1 token in every row"),
        (lengths(of_lengths(2, 2), [], 9, TrainSettings()), "2 tokens in every row; the model reads 9"),
        (lengths(of_lengths(1, 2), [], None, TrainSettings()), "1 to 2 tokens a row, 2 on average"),
    ],
)  # fmt: skip
def test_one_is_not_spoken_of_as_several(found: Any, said: str) -> None:
    assert found.seen.startswith(said)


# --- twice -------------------------------------------------------------------------------------------------------


def test_duplicates_are_counted_and_the_first_is_named() -> None:
    rows = ready(*ASKED, ASKED[1], ASKED[1]).rows
    finding = duplicates(rows)
    assert finding.status == "warning"
    assert finding.seen == "2 rows with the content of an earlier one; first: row:4 is row:2"
    assert duplicates(rows[:3]).status == "ok"


def test_a_prompt_with_two_answers_is_noted() -> None:
    rows = ready(kit.turns("Hi", "Hello"), kit.turns("Hi", "Bye")).rows
    finding = duplicates(rows)
    assert (finding.status, finding.values["prompts_with_several_answers"]) == ("note", 1)


def test_shared_rows_are_a_warning_and_shared_prompts_a_note() -> None:
    train = ready(*ASKED).rows
    both = overlap(train, ready(ASKED[2], kit.turns("new", "one")).rows)
    assert (both.status, both.values["shared_rows"]) == ("warning", 1)
    assert "(row row:3 is row:1)" in both.seen
    prompt = overlap(train, ready(kit.turns("Question 1?", "Another.")).rows)
    assert (prompt.status, prompt.values) == (
        "note",
        {"shared_rows": 0, "shared_prompts": 1, "rows": 1},
    )
    assert overlap(train, ready(kit.turns("new", "one")).rows).status == "ok"
    assert overlap(train, []).status == "skipped"


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    """Rows as a caller may make them: any tokens, labels anywhere, prompts of any length."""
    made: list[Row] = []
    for number in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 259), min_size=1, max_size=12))
        marks = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        prompt = draw(st.integers(0, len(tokens)))
        meta = draw(
            st.sampled_from([{}, {"prompt": "a"}, {"prompt": [{"role": "x", "content": ""}]}])
        )
        made.append(Row(tuple(tokens), tuple(marks), number, prompt_tokens=prompt, meta=meta))
    return made


@given(any_rows(), any_rows())
def test_whatever_rows_are_given_every_point_is_a_finding(rows: list[Row], val: list[Row]) -> None:
    looked = replace(subject(rows, BYTES), val_rows=val, stops=[256, 259], given=True)
    found = preflight.cheap(looked)
    assert [finding.name for finding in found] == [
        "labels",
        "stop token",
        "template",
        "lengths",
        "duplicates",
        "overlap",
    ]
    trains = any(any(row.trained[1:]) for row in rows)
    assert {f.name for f in found if f.status == "error"} == (set() if trains else {"labels"})
    assert json.loads(json.dumps([finding.values for finding in found], allow_nan=False))


# --- what a run makes of them ------------------------------------------------------------------------------------


def test_a_run_says_warnings_and_notes_and_stops_at_an_error() -> None:
    found = [
        Finding("labels", "ok", "fine"),
        Finding("overlap", "warning", "shared", "take them out"),
        Finding("duplicates", "warning", "twice"),
        Finding("stop token", "note", "unnamed", "add it"),
    ]
    said: list[str] = []
    preflight.say_and_refuse(found, said.append, told=("duplicates",))
    assert said == ["warning: overlap: shared; take them out", "note: stop token: unnamed; add it"]
    with pytest.raises(DataError, match="lengths: too long") as caught:
        preflight.say_and_refuse(
            [*found, Finding("lengths", "error", "too long", "cut")], said.append
        )
    assert caught.value.cure == "cut"


class Listener(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def trained(out: Path, data: Any, **more: Any) -> list[str]:
    """What a run of one step says."""
    listener = Listener()
    model = tiny_llama()
    train(
        model,
        byte_tokenizer(),
        data,
        apply(model, [LoRA(rank=2)]),
        out,
        steps=1,
        micro_rows=4,
        options=RunOptions(reporter=listener),
        **more,
    )
    return listener.said


ROWS = [{"prompt": f"say {n}", "completion": str(n)} for n in range(6)]


def told(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith(("warning:", "note:"))]


def test_a_run_makes_the_cheap_points(tmp_path: Path) -> None:
    said = told(trained(tmp_path / "run", ROWS, val=[ROWS[2]]))
    assert "warning: overlap: 1 validation row also among the training rows" in said[-1]
    # The tiny model's generation settings name no stop at all.
    assert "note: stop token: every trained turn (6) ends with <|im_end|>" in said[0]
    assert len(said) == 2


def test_repetitions_are_said_once(tmp_path: Path) -> None:
    said = trained(tmp_path / "read", [*ROWS, ROWS[0]])
    assert sum("earlier row" in line for line in said) == 1
    assert not any("duplicates" in line for line in said)
    rows = prepare([*ROWS, ROWS[0]], byte_tokenizer(), DataSettings()).rows
    given = told(trained(tmp_path / "given", rows))
    assert sum("warning: duplicates: 1 row with" in line for line in given) == 1


def test_a_worthless_run_is_stopped_before_anything_is_written(tmp_path: Path) -> None:
    good = prepare(ROWS, byte_tokenizer(), DataSettings()).rows
    long = Row((97,) * 300, (True,) * 300, 6, "a.jsonl:7")
    with pytest.raises(DataError, match=r"a\.jsonl:7 has 300 tokens, and the model reads 256"):
        trained(tmp_path / "run", [*good, long])
    with pytest.raises(DataError, match="no embedding for"):
        trained(tmp_path / "run", [*good, replace(good[0], tokens=(*good[0].tokens[:-1], 999))])
    assert not (tmp_path / "run").exists()
