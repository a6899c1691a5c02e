"""Formats are decided over all rows; what does not fit is named with what to type."""

from __future__ import annotations

from typing import Any

import pytest

from afina.data.example import Example
from afina.data.formats import Format, convert, recognise, rename
from afina.data.settings import DataSettings
from afina.data.sources import RawRow
from afina.errors import DataError

USER = {"role": "user", "content": "Hi"}
BOT = {"role": "assistant", "content": "Hello"}


def raw(*rows: dict[str, Any]) -> list[RawRow]:
    return [RawRow(i, f"f.jsonl:{i + 1}", row) for i, row in enumerate(rows)]


def examples(*rows: dict[str, Any], **settings: Any) -> tuple[Format, list[Example]]:
    chosen = DataSettings(**settings)
    renamed = rename(raw(*rows), chosen.columns)
    format, fitting = recognise(renamed, chosen)
    return format, convert(fitting, format)


FORMATS = {
    "messages": ({"messages": [USER, BOT]}, [USER, BOT]),
    "messages, other column": ({"conversations": [USER, BOT]}, [USER, BOT]),
    "messages, as JSON text": (
        {
            "messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
        },
        [USER, BOT],
    ),
    "messages, parts": (
        {
            "messages": [
                {**USER, "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                BOT,
            ]
        },
        [USER, BOT],
    ),
    "messages, empty keys of a table": (
        {"messages": [{**USER, "tool_calls": None}, {**BOT, "name": None}], "tools": None},
        [USER, BOT],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        [USER, BOT],
    ),
    "prompt_completion": ({"prompt": "Hi", "completion": "Hello"}, [USER, BOT]),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, BOT]),
    "alpaca, history": (
        {"instruction": "And", "input": "you?", "output": "Fine", "history": [["Hi", "Hello"]]},
        [
            USER,
            BOT,
            {"role": "user", "content": "And\n\nyou?"},
            {"role": "assistant", "content": "Fine"},
        ],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_becomes_messages(name: str) -> None:
    row, messages = FORMATS[name]
    format, [example] = examples(row)
    assert format.name == name.partition(",")[0]
    assert list(example.messages) == messages


@pytest.mark.parametrize("name", FORMATS)
def test_a_system_column_opens_the_conversation(name: str) -> None:
    row, messages = FORMATS[name]
    _, [example] = examples({**row, "system": "Be brief."})
    assert list(example.messages) == [{"role": "system", "content": "Be brief."}, *messages]


def test_a_system_turn_in_the_conversation_goes_before_the_column() -> None:
    own = {"role": "system", "content": "Mine."}
    _, [example] = examples({"messages": [own, USER, BOT], "system": "Other."})
    assert list(example.messages) == [own, USER, BOT]


def test_text_and_classes() -> None:
    assert examples({"text": "a"})[1][0].text == "a"
    format, [example] = examples({"text": "a", "label": 3})
    assert (format.name, example.text, example.label) == ("text_label", "a", 3)


def test_plain_forms_and_choices() -> None:
    _, [example] = examples(
        {"prompt": "Hi", "completion": "yes", "choices": ["yes", "no"], "system": "S"}
    )
    assert example.plain == ("S\n\nHi", "yes")
    assert example.choices == ("yes", "no")
    _, [number] = examples({"prompt": 2, "completion": 4.5})
    assert number.plain == ("2", "4.5")


def test_why_is_said() -> None:
    format, _ = examples({"prompt": "a", "completion": "b", "text": "c"})
    assert format == Format(
        "prompt_completion", "the one row has prompt and completion (they would also fit text)"
    )


def test_the_format_every_row_fits_wins_over_the_first_rows_best() -> None:
    format, _ = examples({"text": "a", "label": "x"}, {"text": "b"})
    assert format.name == "text"


def test_the_first_row_that_differs_is_named() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:3: this row is not like the others") as caught:
        examples(
            {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}, {"text": "c"}
        )
    assert "prompt_completion (prompt and completion), as f.jsonl:1 has" in str(caught.value)


def test_an_empty_cell_makes_a_row_differ() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:2") as caught:
        examples({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None})
    assert "of which empty ['completion']" in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "cure"),
    [
        ({"question": "a", "answer": "b"}, "{prompt: question, completion: answer}"),
        ({"input": "a", "output": "b"}, "{prompt: input, completion: output}"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'data.columns={completion: chosen}'"),
        ({"Sentence": "a", "Class": 1}, "{text: Sentence, label: Class}"),
        ({"en": "a", "pt": "b", "n": 1}, "{prompt: en, completion: pt}"),
        ({"Body": "a"}, "{text: Body}"),
        ({"x": 1}, "map your columns"),
    ],
)
def test_other_columns_are_not_guessed_but_the_cure_is_typed_out(
    columns: dict[str, Any], cure: str
) -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:1: no known format") as caught:
        examples(columns)
    assert f"columns {list(columns)}" in str(caught.value)
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "cure"),
    [
        ([{"prompt": "a", "completion": None}], "fill completion in f.jsonl:1, or remove that row"),
        ([{"text": None}], "fill text in f.jsonl:1"),
        ([{"prompt": "a", "completion": "b"}] * 2 + [{"prompt": None, "completion": None}],
         "fill prompt and completion in f.jsonl:3"),
        ([{"question": "a", "answer": None, "reply": "b"}], "{prompt: question, completion: reply}"),
    ],
)  # fmt: skip
def test_an_empty_column_is_named_and_never_proposed(rows: list[dict[str, Any]], cure: str) -> None:
    with pytest.raises(DataError, match="of which empty ") as caught:
        examples(*rows)
    assert f"cure:   {cure}" in str(caught.value).replace("--set 'data.columns=", "")


def test_a_mapping_overrides() -> None:
    row = {"messages": [USER, BOT], "question": "a", "answer": "b"}
    columns = {"prompt": "question", "completion": "answer"}
    format, [example] = examples(row, columns=columns)
    assert format.name == "prompt_completion"
    assert example.plain == ("a", "b")
    assert examples(row)[0].name == "messages"


def test_a_mapping_may_swap_columns() -> None:
    _, [example] = examples(
        {"prompt": "a", "completion": "b"}, columns={"prompt": "completion", "completion": "prompt"}
    )
    assert example.plain == ("b", "a")


def test_a_mapping_that_misses_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:1: no column 'qestion'") as caught:
        examples({"question": "a", "answer": "b"}, columns={"prompt": "qestion"})
    assert "did you mean 'question'?" in str(caught.value)
    with pytest.raises(DataError, match="'promt' is no column that afina knows") as caught:
        examples({"question": "a"}, columns={"promt": "question"})
    assert "did you mean 'prompt'?" in str(caught.value)


def test_a_stated_format_is_held_to() -> None:
    row = {"prompt": "a", "completion": "b", "text": "c"}
    assert examples(row, format="text")[0] == Format("text", "stated by data.format")
    with pytest.raises(DataError, match=r"f\.jsonl:1: not a row of format alpaca"):
        examples(row, format="alpaca")


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another format": (
        {"prompt": "a", "completion": "b"}, {"format": "alpaca"},
        "data.format=prompt_completion, or leave data.format out"),
    "another format of chats": (
        {"conversations": [{"from": "human", "value": "Hi"}]}, {"format": "messages"},
        "data.format=sharegpt, or leave data.format out"),
    "columns for it": (
        {"text": "a", "class": "b"}, {"format": "text_label"}, "--set 'data.columns={label: class}'"),
    "no columns for it": ({"question": "a", "answer": "b"}, {"format": "alpaca"}, "leave data.format out"),
    "mapped beside what is there": (
        {"prompt": "a", "completion": "b", "x": "c"}, {"columns": {"label": "x"}}, "leave data.columns out"),
    "mapped in part": (
        {"question": "a", "answer": "b"}, {"columns": {"prompt": "question"}},
        "--set 'data.columns={prompt: question, completion: answer}'"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_cure_of_what_was_stated_is_one_that_works(name: str) -> None:
    row, given, cure = OTHERWISE[name]
    with pytest.raises(DataError) as caught:
        examples(row, **given)
    assert str(caught.value.cure) == cure


def test_one_row_that_is_not_as_stated_is_to_be_completed() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl:2: not a row of format text") as caught:
        examples({"text": "a"}, {"txt": "b"}, format="text")
    assert caught.value.cure == "complete that row as f.jsonl:1 is, or remove it"


BAD = {
    "no role": ({"messages": [{"content": "x"}]}, "message 0 has no role"),
    "unknown role": (
        {"messages": [{"role": "assistent", "content": "x"}]},
        "did you mean 'assistant'",
    ),
    "no content": (
        {"messages": [USER, {"role": "assistant"}]},
        r"message 1 \(assistant\) has no content",
    ),
    "media": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "content that is not text",
    ),
    "no messages": (
        {"messages": []},
        "an empty conversation\n  got:    no turn in column 'messages'",
    ),
    "speaker": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "message 0 has an unknown role",
    ),
    "completion": ({"prompt": "a", "completion": {"x": 1}}, "'completion' has the wrong type"),
    "history": (
        {"instruction": "a", "output": "b", "history": ["x"]},
        "'history' has the wrong type",
    ),
    "label": ({"text": "a", "label": 1.5}, "'label' has the wrong type"),
    "tools": ({"messages": [USER, BOT], "tools": "{"}, "'tools' has the wrong type"),
    "surrogate": ({"prompt": "a\ud83d", "completion": "b"}, "prompt holds a broken character"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named_by_row_and_column(name: str) -> None:
    row, message = BAD[name]
    with pytest.raises(DataError, match=message) as caught:
        examples(row)
    assert "f.jsonl:1: " in str(caught.value)


def test_duplicates_have_one_digest_whatever_their_format() -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [USER, BOT]},
        {"prompt": "Hi", "completion": "Hello", "id": 7},
        {"instruction": "Hi", "output": "Hello"},
    ]
    digests = {examples(row)[1][0].digest for row in rows}
    assert len(digests) == 1
    assert examples({"prompt": "Hi", "completion": "Hello."})[1][0].digest not in digests
