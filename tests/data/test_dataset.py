"""`prepare` accounts for every row, keeps a cut row's loss right, and gives evaluation what it needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from afina.data.dataset import Prepared, prepare
from afina.data.settings import DataSettings
from afina.data.split import split
from afina.errors import DataError
from tests.data import kit
from tests.data.kit import marked, tokenizer_of, turns

SHORT, LONG = turns("Hi", "Hello!"), turns("Hi", "one two three four five six seven eight nine ten")


def ready(*rows: dict[str, Any], chat: str | None = kit.MISTRAL, **arguments: Any) -> Prepared:
    names = ("role", "max_tokens", "labels", "stop_ids")
    passed = {name: arguments.pop(name) for name in names if name in arguments}
    return prepare(rows, tokenizer_of(chat), DataSettings(**arguments), **passed)


def lengths(*rows: dict[str, Any]) -> list[int]:
    return [len(row.tokens) for row in ready(*rows).rows]


def test_over_long_rows_are_dropped_and_counted() -> None:
    short, long = lengths(SHORT, LONG)
    report = ready(SHORT, LONG, SHORT, max_tokens=short).report
    assert (report.read, report.kept, report.dropped) == (3, 2, {"longer than max_tokens": 1})
    assert report.places == {"longer than max_tokens": ("row:2",)}
    assert (report.lost_tokens, report.max_tokens) == (long, short)
    assert report.lengths == {"min": short, "p50": short, "p90": short, "p99": short, "max": long}
    assert "2 of 3 kept; 1 dropped: longer than max_tokens" in "\n".join(report.lines())


def test_a_row_of_exactly_the_limit_stays() -> None:
    [_, long] = lengths(SHORT, LONG)
    assert ready(SHORT, LONG, max_tokens=long).report.kept == 2
    assert ready(SHORT, LONG, max_tokens=long - 1).report.kept == 1


def test_over_long_error_names_the_row() -> None:
    short, long = lengths(SHORT, LONG)
    with pytest.raises(DataError, match="row:2: row longer than max_tokens") as caught:
        ready(SHORT, LONG, max_tokens=short, over_long="error")
    assert caught.value.cure == f"data.over_long=drop or truncate: the model reads {short} tokens"
    for readable in (long, None):
        with pytest.raises(DataError, match="row:2: row longer than max_tokens") as caught:
            prepare(
                [SHORT, LONG],
                tokenizer_of(kit.MISTRAL),
                DataSettings(max_tokens=short, over_long="error"),
                max_tokens=readable,
            )
        assert caught.value.cure == f"data.max_tokens={long}, or data.over_long=drop or truncate"


def test_a_truncated_row_keeps_the_labels_it_has_left() -> None:
    whole = ready(LONG).rows[0]
    limit = len(whole.tokens) - 4
    prepared = ready(LONG, max_tokens=limit, over_long="truncate")
    [row] = prepared.rows
    assert (row.tokens, row.trained) == (whole.tokens[:limit], whole.trained[:limit])
    assert (
        row.tokens[-1] != tokenizer_of(kit.MISTRAL).eos_token_id
    )  # no stop is invented at the cut
    assert (prepared.report.truncated, prepared.report.lost_tokens) == (1, 4)
    assert prepared.report.places == {"truncated": ("row:1",)}
    assert prepared.report.trained_tokens == whole.trained_tokens - 4


def test_the_prompt_of_a_truncated_row_is_that_of_its_last_turn_left() -> None:
    row = turns("Hi", "Hello!", "Paris?", "Bom dia")
    whole = ready(row).rows[0]
    first = whole.trained.index(True)
    cut = ready(row, max_tokens=whole.prompt_tokens, over_long="truncate").rows[0]
    assert (cut.prompt_tokens, cut.meta["reference"]) == (first, "Hello!")
    assert (whole.meta["reference"], cut.meta["prompt"]) == (
        "Bom dia",
        [{"role": "user", "content": "Hi"}],
    )


def test_rows_left_without_a_label_are_dropped_and_counted() -> None:
    alone = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = ready(LONG).rows[0].prompt_tokens
    prepared = ready(alone, SHORT, LONG, max_tokens=prompt + 1, over_long="truncate")
    assert prepared.report.dropped == {"no trained token": 1}
    cut = ready(SHORT, turns("a " * 40, "Hello!"), max_tokens=prompt + 3, over_long="truncate")
    assert cut.report.dropped == {"no trained token left after truncation": 1}
    assert [row.id for row in cut.rows] == [0]


def test_a_label_that_nothing_predicts_is_none() -> None:
    """An empty text is its end token alone, and the first token of a row has nothing before it."""
    prepared = ready({"text": ""}, {"text": "Paris"}, chat=None)
    assert prepared.report.dropped == {"no trained token": 1}
    assert prepared.report.trained_tokens == prepared.rows[0].trained_tokens


def test_the_report_names_the_first_rows_of_a_fate_and_counts_all() -> None:
    alone = {"messages": [{"role": "user", "content": "Hi"}]}
    report = ready(SHORT, *[alone] * 8).report
    assert report.dropped == {"no trained token": 8}
    assert report.places == {"no trained token": tuple(f"row:{n}" for n in range(2, 7))}


def test_none_left_is_an_error_with_the_counts() -> None:
    alone = {"messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(DataError, match="no row is left to train on") as caught:
        ready(alone, alone)
    assert "2 of 2 rows dropped: no trained token" in str(caught.value)
    with pytest.raises(DataError, match="no row is left") as caught:
        ready({"text": ""}, chat=None)
    assert caught.value.cure == "give the rows a text"


def test_none_left_for_their_length_says_what_the_model_reads() -> None:
    def cure(readable: int | None, **settings: Any) -> str | None:
        with pytest.raises(DataError, match="no row is left") as caught:
            prepare(
                [SHORT], tokenizer_of(kit.MISTRAL), DataSettings(**settings), max_tokens=readable
            )
        return caught.value.cure

    [short] = lengths(SHORT)
    longest = f"(the longest row has {short}), or shorten the rows"
    assert cure(None, max_tokens=3) == f"data.max_tokens={short} {longest}"
    assert cure(99, max_tokens=3) == f"data.max_tokens={short} {longest}"
    assert cure(5, max_tokens=3) == f"data.max_tokens=5 {longest}"
    assert cure(3) == (
        "shorten the rows: the model reads 3 tokens, or cut them: data.over_long=truncate"
    )
    assert cure(2, over_long="truncate") == "shorten their prompts: the model reads 2 tokens"


def test_the_limit_is_the_smaller_and_must_fit_the_model() -> None:
    assert ready(SHORT, max_tokens=99).report.max_tokens == 99
    assert ready(SHORT).report.max_tokens is None
    tokenizer = tokenizer_of(kit.MISTRAL)
    tokenizer.model_max_length = 50
    assert prepare([SHORT], tokenizer, DataSettings()).report.max_tokens == 50
    assert prepare([SHORT], tokenizer, DataSettings(max_tokens=40)).report.max_tokens == 40
    with pytest.raises(DataError, match="more than the model can read"):
        prepare([SHORT], tokenizer, DataSettings(max_tokens=40), max_tokens=30)


def test_what_evaluation_needs_of_a_chat() -> None:
    messages = turns("Hi", "Hello!", "yes or no?", "yes", system="S")["messages"]
    rows = ready({"messages": messages, "choices": ["yes", "no"]}, chat=kit.CHATML).rows
    meta = {key: value for key, value in rows[0].meta.items() if key != "digest"}
    assert meta == {"prompt": messages[:-1], "reference": "yes", "choices": ["yes", "no"]}
    prompt = tokenizer_of(kit.CHATML).apply_chat_template(messages[:-1], add_generation_prompt=True)
    assert list(rows[0].tokens[: rows[0].prompt_tokens]) == prompt["input_ids"]


def test_what_evaluation_needs_without_a_template() -> None:
    [row] = ready({"prompt": "Question:", "completion": " Paris"}, chat=None).rows
    assert (row.meta["prompt"], row.meta["reference"]) == ("Question:", " Paris")
    tokenizer = tokenizer_of(None)
    assert tokenizer.decode(row.tokens[: row.prompt_tokens]) == "Question:"


def test_conversations_need_a_template() -> None:
    with pytest.raises(DataError, match="row:1: a conversation needs a chat template"):
        ready(SHORT, chat=None)
    with pytest.raises(DataError, match="needs a chat template") as caught:
        ready(SHORT, template="none")
    assert "data.template=auto" in str(caught.value)
    with pytest.raises(DataError, match="needs a chat template"):
        ready({"prompt": "a", "completion": "b"}, chat=None, template="chat")
    history = {"instruction": "a", "output": "b", "history": [["c", "d"]]}
    with pytest.raises(DataError, match="row:2: a conversation needs"):
        ready({"instruction": "a", "output": "b"}, history, chat=None)


def test_a_begin_token_is_put_where_the_tokenizer_puts_it() -> None:
    tokenizer = tokenizer_of(None)
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    rows: list[dict[str, Any]] = [{"prompt": "Question:", "completion": " Paris"}]
    [row] = prepare(rows, tokenizer, DataSettings()).rows
    assert marked(row, tokenizer) == "<s>Question:« Paris</s>»"
    assert row.prompt_tokens == row.trained.index(True)
    [text] = prepare([{"text": "Paris"}], tokenizer, DataSettings()).rows
    assert marked(text, tokenizer) == "<s>«Paris</s>»"


def test_no_end_token_is_an_error() -> None:
    tokenizer = tokenizer_of(None)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-text token"):
        prepare([{"text": "Paris"}], tokenizer, DataSettings())


def test_classes_are_numbered_by_sorted_names() -> None:
    prepared = ready(
        {"text": "a", "label": "no"}, {"text": "b", "label": "maybe"}, {"text": "c", "label": "no"}
    )
    assert prepared.report.labels == ("maybe", "no")
    assert [row.label for row in prepared.rows] == [1, 0, 1]
    assert not any(any(row.trained) for row in prepared.rows)
    assert prepared.rows[0].meta["label"] == "no"
    numbers = ready(*({"text": "a", "label": n} for n in (10, 2, 0)))
    assert numbers.report.labels == ("0", "2", "10")


def test_validation_takes_the_numbers_of_training() -> None:
    row = {"text": "a", "label": "no"}
    val = ready(row, labels=["maybe", "no"], role="val")
    assert (val.rows[0].label, val.report.labels) == (1, ("maybe", "no"))
    with pytest.raises(DataError, match="row:1: a class that the training rows do not have"):
        ready(row, labels=["maybe"])


def test_a_cut_class_row_keeps_its_closing_token() -> None:
    tokenizer = tokenizer_of(None)
    ids = {"<s>": tokenizer.bos_token_id, "</s>": tokenizer.eos_token_id}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(ids.items())
    )
    rows = [{"text": "one two three four five six", "label": 0}]
    settings = DataSettings(max_tokens=5, over_long="truncate")
    prepared = prepare(rows, tokenizer, settings)
    [row] = prepared.rows
    assert len(row.tokens) == len(row.trained) == 5
    assert (row.tokens[0], row.tokens[-1]) == (ids["<s>"], ids["</s>"])
    assert prepared.report.truncated == 1


def test_duplicates_empty_answers_and_dates_are_said() -> None:
    report = ready(SHORT, SHORT, turns("Hi", "")).report
    assert report.duplicates == 1
    text = "\n".join(report.lines())
    assert "1 row with the content of an earlier row" in text
    assert "1 row with an empty answer; first: row:3" in text
    tokenizer = tokenizer_of(kit.CHATML)
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + kit.CHATML
    notes = prepare([SHORT], tokenizer, DataSettings()).report.notes
    assert any("today's date" in note for note in notes)


def test_the_report_is_plain_data_and_the_fingerprint_is_of_the_rows() -> None:
    first, again, other = ready(SHORT, LONG), ready(SHORT, LONG), ready(LONG, SHORT)
    assert first.report == again.report
    assert first.report.fingerprint != other.report.fingerprint
    assert first.report.fingerprint != ready(SHORT, LONG, train_on="text").report.fingerprint
    assert json.loads(json.dumps(asdict(first.report)))["kept"] == 2
    assert first.report.tokens == sum(len(row.tokens) for row in first.rows)
    assert first.report.stop == "</s>"


def test_rows_keep_their_place_in_the_source(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    rows = [LONG, SHORT, SHORT]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    limit = lengths(SHORT)[0]
    prepared = prepare(path, tokenizer_of(kit.MISTRAL), DataSettings(), max_tokens=limit)
    assert [(row.id, row.source) for row in prepared.rows] == [(1, f"{path}:2"), (2, f"{path}:3")]


def test_a_duplicate_never_straddles_the_split() -> None:
    rows = [turns("Hi", f"answer {n % 7}") for n in range(40)]
    train, held = split(ready(*rows).rows, 0.3)
    answers = [{row.meta["reference"] for row in part} for part in (train, held)]
    assert answers[0]
    assert answers[1]
    assert answers[0].isdisjoint(answers[1])
