"""Readers, formats, templates and masks: whatever there is, an error of ours or an account of every row."""

from __future__ import annotations

import gzip
import io
import json
from functools import cache
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data import convert
from afina.data.dataset import Prepared, prepare
from afina.data.formats import REQUIRED
from afina.data.readers import READERS
from afina.data.settings import DataSettings
from afina.evaluate import scores
from afina.models.prompts import encode
from afina.models.stops import end_of_turn
from tests.data import kit as data
from tests.fuzz.kit import SCALARS, VALUES, fuzz, mutated, result_or_error, texts

TURNS = [{"role": "user", "content": "Hi 漢"}, {"role": "assistant", "content": "Yo"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "b"},
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "", "output": "b", "history": [["x", "y"]]},
    {"text": "é\u2028", "label": 3},
    {"text": "a"},
]


def table(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


SEEDS = [
    *("\n".join(json.dumps(row) for row in [one, one, *ROWS[:2]]).encode() for one in ROWS),
    json.dumps(ROWS[:1] * 3, indent=1).encode(),
    json.dumps({"version": 1, "data": ROWS[:2]}).encode("utf-16"),
    b'prompt,completion\na,"b ""c""\nd"\n\xc3\xa9;,2\n',
    b"sep=^\nprompt^ completion\na^ b\n",
    b'sep="\r\na"b\r\n1"2',
    b"text;label\na;1\nb;2\n",
    "one\r\n\r\ntwo\rthree\u2028".encode(),
    gzip.compress(json.dumps(ROWS[0]).encode()),
    b"",
]

TABLES = [table(ROWS[:1] * 3), table([{"text": "a", "label": 1.5}])]


@cache
def tokenizer(template: str | None) -> Any:
    return data.tokenizer_of(template)


def accounted(made: Prepared | None) -> None:
    """Every row read was kept or dropped for a reason; what is kept can be trained on."""
    if made is None:
        return
    report = made.report
    assert report.kept == len(made.rows) > 0
    assert report.read == report.kept + sum(report.dropped.values())
    assert "\n".join(report.lines())
    for row in made.rows:
        assert len(row.tokens) == len(row.trained)
        assert row.label is not None or row.trained_tokens > 0


@pytest.mark.parametrize("suffix", [*READERS, ".jsonl.gz", ".unknown"])
@fuzz(60)
@given(content=mutated(SEEDS), policy=st.sampled_from(["error", "skip"]), chat=st.booleans())
def test_files(tmp_path_factory: Any, suffix: str, content: bytes, policy: Any, chat: bool) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    path.write_bytes(content)
    template = data.CHATML if chat else None
    settings = DataSettings(on_bad_row=policy, txt="paragraph" if chat else "line")
    accounted(result_or_error(lambda: prepare(path, tokenizer(template), settings)))


@fuzz(60)
@given(content=mutated(TABLES, most=2))
def test_tables(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.parquet"
    path.write_bytes(content)
    accounted(result_or_error(lambda: prepare(path, tokenizer(None), DataSettings())))


COLUMNS = sorted({*convert.CHAT_COLUMNS, *(c for names in REQUIRED.values() for c in names), "system", "tools",
                  "choices", "input", "history", "question"})  # fmt: skip
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "Human", "bot", "x"])
        | SCALARS,
        "content": texts(30) | VALUES | st.just([{"type": "text", "text": "a"}]),
        "from": st.sampled_from(["human", "gpt"]) | SCALARS,
        "value": texts(10) | SCALARS,
        "tool_calls": VALUES,
        "name": SCALARS,
    },
)
CONVERSATION = st.lists(TURN | SCALARS, max_size=4) | st.lists(TURN, min_size=2, max_size=5)
FIELDS: dict[str, Any] = {
    name: CONVERSATION | VALUES
    if name in convert.CHAT_COLUMNS
    else texts(20) | VALUES | CONVERSATION
    for name in COLUMNS
}
ROW = st.fixed_dictionaries({}, optional=FIELDS) | st.sampled_from(ROWS)
ROW |= VALUES.filter(lambda value: not isinstance(value, str))  # a list of texts is one of paths
MAPPING = st.dictionaries(st.sampled_from(COLUMNS), st.sampled_from(COLUMNS), max_size=2)
TEMPLATES = [
    None,
    data.CHATML,
    data.LLAMA3,
    data.MISTRAL,
    data.GEMMA,
    data.REWRITES,
    data.TOOLS,
    data.ENDLESS,
]


@fuzz(200)
@given(
    rows=st.lists(ROW, max_size=4),
    template=st.sampled_from(TEMPLATES),
    policy=st.sampled_from(["error", "skip"]),
    train_on=st.sampled_from(["all", "last", "text"]),
    columns=st.just({}) | MAPPING,
    limit=st.none() | st.integers(2, 60),
    over_long=st.sampled_from(["error", "drop", "truncate"]),
)
def test_rows(
    rows: Any, template: Any, policy: Any, train_on: Any, columns: Any, limit: Any, over_long: Any
) -> None:
    settings = DataSettings(
        on_bad_row=policy, train_on=train_on, columns=columns, max_tokens=limit, over_long=over_long
    )
    accounted(result_or_error(lambda: prepare(rows, tokenizer(template), settings)))


@fuzz(80)
@given(
    contents=st.lists(texts(60), min_size=2, max_size=6), template=st.sampled_from(TEMPLATES[1:])
)
def test_conversations(contents: list[str], template: str) -> None:
    made = result_or_error(
        lambda: prepare([data.turns(*contents)], tokenizer(template), DataSettings())
    )
    accounted(made)
    if made is None or template == data.ENDLESS:
        return
    stops = {"<|im_end|>", "<|eot|>", "<end_of_turn>", "</s>"}
    (row,) = made.rows
    for at, trained in enumerate(row.trained):
        ends = trained and (at + 1 == len(row.trained) or not row.trained[at + 1])
        assert not ends or tokenizer(template).convert_ids_to_tokens(row.tokens[at]) in stops


@fuzz(200)
@given(
    answer=texts(60) | VALUES.map(json.dumps),
    wanted=VALUES.map(json.dumps) | texts(30),
    field=texts(10),
)
def test_scores_of_answers(answer: str, wanted: str, field: str) -> None:
    assert scores.json_match(answer, wanted) in (True, False, None)
    assert scores.json_field_match(answer, wanted, field) in (True, False, None)
    assert scores.json_match(wanted, wanted) in (True, None) or "NaN" in wanted


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{{ m['role'] }}", "{{ m.content }}", "{{ messages[0].content }}",
    "{% if add_generation_prompt %}", "{% endif %}", "<|im_start|>", "<|im_end|>", "{{ eos_token }}", "{{ x.y }}",
    "{% set ns = namespace(a=1) %}", "{{ tools | tojson }}", "{% if loop.last %}", "{{ m.content | trim }}", "\n",
    "{{ 1 / 0 }}", "{{ m.content.split('a')[3] }}", "{% break %}", "{{ range(10 ** 9) }}", "{{ m.content[:2] }}",
]  # fmt: skip


@fuzz(150)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=9),
    more=texts(10),
    train_on=st.sampled_from(["all", "text"]),
)
def test_templates(pieces: list[str], more: str, train_on: Any) -> None:
    made = data.tokenizer_of(data.CHATML)
    made.chat_template = "".join(pieces) + more or "x"
    settings = DataSettings(train_on=train_on, on_bad_row="skip")
    accounted(
        result_or_error(lambda: prepare([data.turns("Hi a", "Yo", "b", "c")], made, settings))
    )
    result_or_error(lambda: encode(made, data.turns("Hi", "Yo")["messages"]))
    end_of_turn(made)
