"""Prompts are read by the readers of training data, with the columns of the run."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from afina.cli.prompts import Asked, columns_of, read_prompts
from afina.errors import ConfigError, DataError

ROWS = [
    ("hello", [("user", "hello")]),
    ({"prompt": "p", "completion": "c"}, [("user", "p")]),
    ({"prompt": "p", "system": "s"}, [("system", "s"), ("user", "p")]),
    ({"instruction": "do", "input": "this", "output": "o"}, [("user", "do\n\nthis")]),
    ({"instruction": "do", "input": ""}, [("user", "do")]),
    ({"text": "t"}, [("user", "t")]),
    (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                      {"role": "assistant", "content": "a"}]},
        [("system", "s"), ("user", "u")],
    ),
    (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
                      {"role": "user", "content": "v"}]},
        [("user", "u"), ("assistant", "a"), ("user", "v")],
    ),
    ({"prompt": [{"role": "user", "content": "u"}]}, [("user", "u")]),
]  # fmt: skip


def turns(prompts: list[Asked]) -> list[list[tuple[str, str]]]:
    return [[(turn["role"], turn["content"]) for turn in prompt.messages] for prompt in prompts]


def test_prompts_of_json_and_jsonl(tmp_path: Path) -> None:
    lines, whole = tmp_path / "p.jsonl", tmp_path / "p.json"
    lines.write_text("\n\n".join(json.dumps(row) for row, _ in ROWS), encoding="utf-8")
    whole.write_text(json.dumps([row for row, _ in ROWS]), encoding="utf-8")
    wanted = [prompt for _, prompt in ROWS]
    assert turns(read_prompts(str(lines))) == wanted
    assert turns(read_prompts(str(whole))) == wanted


@pytest.mark.parametrize("name", ["p.txt", "prompts", "p.list"])
def test_prompts_of_text_are_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = "\ufeff  first\u2028still \r\n\nOlá, {não} é JSON\n"
    (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    wanted = [[("user", "first\u2028still")], [("user", "Olá, {não} é JSON")]]
    assert turns(read_prompts(str(tmp_path / name))) == wanted
    assert turns(read_prompts("-")) == wanted


ONE = '{"prompt": "a\u2028b", "completion": "c"}\n'
FILES = {
    "p.jsonl": ONE.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + ONE.encode(),
    "utf16.jsonl": ONE.encode("utf-16"),
    "p.jsonl.gz": gzip.compress(ONE.encode()),
    "p.csv": "prompt,completion\n\"a\u2028b\",c\n".encode(),
    "sharegpt.jsonl": json.dumps(
        {"conversations": [{"from": "human", "value": "a\u2028b"}, {"from": "gpt", "value": "c"}]}
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_train_reads_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert turns(read_prompts(str(tmp_path / name))) == [[("user", "a\u2028b")]]


def test_the_runs_columns_are_mapped_and_the_answers_are_not_needed(tmp_path: Path) -> None:
    columns = {"prompt": "ask", "completion": "reply"}
    path = tmp_path / "p.csv"
    for text in ("ask,reply\na,b\n", "ask,more\na,b\n", "prompt,more\na,b\n"):
        path.write_text(text, encoding="utf-8")
        assert turns(read_prompts(str(path), columns)) == [[("user", "a")]]
    path.write_text("ask,reply\na,b\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"p\.csv:2: no prompt in this row\n  got:    columns ask, r"
    ):
        read_prompts(str(path))


def test_columns_of_a_run() -> None:
    assert columns_of({"data": {"columns": {"prompt": "q"}}}) == {"prompt": "q"}
    assert columns_of({"data": "a.jsonl"}) == columns_of({}) == {}
    with pytest.raises(ConfigError, match=r"data\.columns"):
        columns_of({"data": {"columns": ["q"]}})


def test_the_text_of_a_prompt_is_the_one_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"instruction": "do", "output": "o"}, {"prompt": "p", "system": "s"}, {"text": "t"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    plain = [one.as_prompt(plain=True) for one in read_prompts(str(path))]
    assert plain == ["### Instruction:\ndo\n\n### Response:\n", "s\n\np", "t"]


def test_a_conversation_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    turn = {"role": "user", "content": "a"}
    path.write_text(json.dumps({"messages": [{**turn, "role": "system"}, turn]}), encoding="utf-8")
    (asked,) = read_prompts(str(path))
    assert len(asked.as_prompt(plain=False)) == 2
    with pytest.raises(
        DataError, match=r"p\.jsonl:1: without a chat template a prompt is one text"
    ):
        asked.as_prompt(plain=True)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.jsonl", b'"a"\n{"question": 1}\n', r"p\.jsonl:2: no prompt in this row\n.*question"),
        ("p.jsonl", b'\n{"a"\n', r"p\.jsonl:2: not a line of JSON"),
        ("p.jsonl", b'{"messages": [{"role": "assistant", "content": "a"}]}', r":1: no prompt"),
        ("p.jsonl", b'{"prompt": NaN}', r"p\.jsonl:1: no prompt in this row\n.*prompt"),
        ("p.json", b'{"prompt": "a"}', "no single list of rows"),
        ("p.json", b'["a", 7]', "a row must be an object of columns\n  got:    int"),
        ("p.txt", b"\n \n", "there are no prompts"),
        ("p.txt", b"ok\n\x89PNG\xff", r"p\.txt:2: not UTF-8\n  got:    byte 0x89"),
        ("p.bin", b"\x89PNG\xff", r"p\.bin: this is an image, not text\n(.*\n)+  cure: "),
        ("p.bin", b"caf\xe9", r"p\.bin:1: not UTF-8\n(.*\n)+  cure: "),
        ("p.jsonl", b'{"q": 1}\n{"q": 2}\n{"text": "a"}\n{"text": 1, "text": 2}\n{"q": 3}',
         r"4 of 5 rows cannot be used\n  - \S+:4: a key occurs twice(.*\n)+  - \S+:1: no prompt"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_named(
    tmp_path: Path, name: str, text: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=said):
        read_prompts(str(tmp_path / name))


def test_prompts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt: no such file\n(.*\n)+  cure: "):
        read_prompts(str(tmp_path / "none.txt"))


def test_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG"), encoding="utf-8"))
    with pytest.raises(DataError, match="the standard input is not text\n  got:    byte 0x89"):
        read_prompts("-")
