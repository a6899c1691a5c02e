"""Each thing that is wrong with data in the wild gives the right rows, or an error with place, reason and cure."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from afina.data.dataset import Prepared, prepare
from afina.data.settings import DataSettings
from afina.errors import DataError, ModelError
from afina.models.prompts import encode
from afina.models.stops import end_of_turn
from tests.data import kit
from tests.data.kit import marked, tokenizer_of

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "S"}


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def talk(*messages: Any) -> str:
    return lines({"messages": messages})


JSONL = lines(*ROWS)


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, JSONL)
    return out.getvalue()


def parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), out)
    return out.getvalue()


def parquet_of_twice() -> bytes:
    out = io.BytesIO()
    names, column = ["prompt", "prompt"], pyarrow.array(["a"])
    pyarrow.parquet.write_table(pyarrow.table([column, column], names=names), out)
    return out.getvalue()


def prepared(path: Any, chat: str | None = kit.CHATML, **settings: Any) -> Prepared:
    limit = settings.pop("limit", 200)
    return prepare(path, tokenizer_of(chat), DataSettings(**settings), max_tokens=limit)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


READ = {
    "byte-order mark": ("a.jsonl", b"\xef\xbb\xbf" + JSONL.encode()),
    "a mark between joined files": ("a.jsonl", lines(ROWS[0]) + "\ufeff" + lines(ROWS[1])),
    "CRLF": ("a.jsonl", JSONL.replace("\n", "\r\n")),
    "lone CR": ("a.jsonl", JSONL.replace("\n", "\r")),
    "lone CR, csv": ("a.csv", "prompt,completion\ra,b\rc,d\r"),
    "UTF-16 with its mark": ("a.jsonl", JSONL.encode("utf-16")),
    "UTF-16BE with its mark": ("a.csv", "\ufeffprompt,completion\na,b\nc,d".encode("utf-16-be")),
    "UTF-32 with its mark": ("a.jsonl", JSONL.encode("utf-32")),
    "gzip under another name": ("a.jsonl", gzip.compress(JSONL.encode())),
    "not gzip under its name": ("a.jsonl.gz", JSONL),
    "bars": ("a.csv", "prompt|completion\na|b\nc|d\n"),
    "what Excel writes first": ("a.csv", "sep=^\r\nprompt^completion\r\na^b\r\nc^d\r\n"),
    "spaces after commas": ("a.csv", 'prompt, completion\na, b\n"c", "d"\n'),
    "spaces around names": ("a.csv", " prompt ;completion\na;b\nc;d\n"),
    "blank lines before the header": ("a.csv", "\r\n\nprompt;completion\na;b\nc;d\n"),
    "blank lines and spaces": ("a.jsonl", "\n \t\n  " + JSONL.replace("\n", "  \n\n")),
    "one document as lines": ("a.json", JSONL),
    "parquet": ("a.parquet", parquet()),
    "no end of line": ("a.jsonl", JSONL.rstrip("\n")),
}


@pytest.mark.parametrize("name", READ)
def test_these_are_read_as_they_are_meant(name: str, tmp_path: Path) -> None:
    file, content = READ[name]
    rows = prepared(write(tmp_path, file, content)).rows
    assert [(r.meta["prompt"][-1]["content"], r.meta["reference"]) for r in rows] == [
        ("a", "b"),
        ("c", "d"),
    ]


NOT_A_FILE_OF_ROWS = {
    "empty": ("a.jsonl", b"", "a.jsonl: no rows"),
    "empty json": ("a.json", b"", "a.json: no rows"),
    "empty list": ("a.json", b"[]", "a.json: no rows"),
    "empty parquet": ("a.parquet", b"", "a.parquet: the file is empty"),
    "empty text": ("a.txt", b"", "a.txt: no rows"),
    "white space": ("a.jsonl", b" \n\t\r\n  ", "a.jsonl: no rows"),
    "white space, json": ("a.json", b" \n\t\r\n  ", "a.json: no rows"),
    "a header alone": ("a.csv", b"prompt,completion\n", "a.csv: no rows"),
    "binary": ("a.jsonl", bytes(range(256)) * 4 + b"\0" * 100, "a.jsonl: this is binary, not text"),
    "nothing but NUL": ("a.jsonl", b"\0" * 99, "when the machine stopped can be all NULs"),
    "an image": ("a.jsonl", b"\x89PNG\r\n\x1a\n", "a.jsonl: this is an image, not text"),
    "a pickle": ("a.json", b"\x80\x04\x95", "a pickle, which can run code and is never read"),
    "parquet as jsonl": ("a.jsonl", parquet(), "this is Parquet, not text.*cure:   name it .parquet"),
    "jsonl as parquet": ("a.parquet", JSONL.encode(), "not a readable Parquet file"),
    "cut parquet": ("a.parquet", parquet()[:-9], "is cut short or damaged: write or download it again"),
    "cut parquet, early": ("a.parquet", parquet()[:20], "is cut short or damaged"),
    "parquet, a column twice": ("a.parquet", parquet_of_twice(), "occurs twice.*got:    'prompt'"),
    "a zip": ("a.jsonl", zipped("x.jsonl"), "this is a zip archive of x.jsonl, not text.*unpack it"),
    "a zip by name": ("a.zip", zipped("x.jsonl"), "suffix '.zip', and it holds a zip archive of x.jso"),
    "a workbook": ("a.csv", zipped("xl/workbook.xml"), "an Excel workbook.*save the sheet as CSV"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(JSONL.encode())[:-9], "damaged gzip: Compressed file ended"),
    "zstd": ("a.jsonl", b"\x28\xb5\x2f\xfd123", "compressed with zstd.*zstd -d"),
    "UTF-16 without its mark": ("a.jsonl", JSONL.encode("utf-16-le"), "looks like UTF-16LE without.*iconv"),
    "UTF-16BE without": ("a.csv", JSONL.encode("utf-16-be"), "looks like UTF-16BE without.*iconv -f UTF-16BE"),
    "cut UTF-16": ("a.jsonl", JSONL.encode("utf-16")[:-1], "a.jsonl:2: not UTF-16.*cut short"),
    "Latin-1": ("a.jsonl", b'{"a": 1}\n{"text": "caf\xe9"}', "a.jsonl:2: not UTF-8\n.*byte 0xe9 at.*iconv"),
    "a trailing comma": (
        "a.json", b'[{"text": "a"},\n {"text": "b"},\n]', "a.json:2: not valid JSON\n.*a comma before ']'\n.*"
        "cure:   remove the last comma of line 2"),
    "a trailing comma inside": ("a.json", b'[{"text": "a",}]', "a.json:1: not.*a comma before '}'"),
    "a trailing comma, held": ("a.json", b'{"rows": [{"text": "a"},]}', "a.json:1: not.*a comma before ']'"),
    "a cut document": ("a.json", b'[{"text": "a"},\n{"text": "b"}', "a.json:2: not valid.*cut short"),
    "a cut document, in a text": ("a.json", b'[{"text": "a"},\n{"text": "b', "a.json:2: not valid.*cut short"),
    "nested without end": ("a.json", b"[" * 100_000, "a.json:1: nested too deeply"),
    "a column twice": (
        "a.csv", b"prompt,prompt,completion\n1,2,3\n", "a.csv:1: a column name occurs twice\n.*'prompt' in"),
    "an open quote": (
        "a.csv", b'prompt,completion\na,b\n"c,d\ne,f\n', 'a.csv:3: a quote opens in this row and never closes'),
    "another separator": (
        "a.csv", b"prompt^completion\na^b\n", "columns .'prompt.completion'..*is '.' what separates the columns"),
    "a model": ("a.gguf", b"GGUF" + b"\0" * 40, "it holds a GGUF model.*afina train MODEL DATA"),
    "weights": (
        "a.safetensors", b'\x40' + b"\0" * 7 + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        "it holds safetensors weights.*afina train MODEL DATA"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_A_FILE_OF_ROWS)
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_file_that_holds_no_rows_says_what_it_is(name: str, policy: str, tmp_path: Path) -> None:
    file, content, said = NOT_A_FILE_OF_ROWS[name]
    with pytest.raises(DataError, match=f"(?s){said}"):
        prepared(write(tmp_path, file, content), on_bad_row=policy)


BAD_ROWS = {
    "half-written": ('{"prompt": "e", "comp', ":3: not a line of JSON.*the last line has no end"),
    "NUL": ('{"prompt": "a\0b", "completion": "c"}\n', ":3: not a line of JSON.*Invalid control"),
    "a key twice": (
        '{"prompt": "a", "prompt": "x", "completion": "b"}\n', ":3: a key occurs twice.*got:    'prompt'"),
    "nested": (lines({**ROWS[0], "x": json.loads("[" * 70 + "]" * 70)}), ":3: column 'x' is nested more than 64"),
    "nested without end": (
        '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}\n", ":3: nested too deeply"),
    "a long number": ('{"prompt": ' + "1" * 5000 + ', "completion": "b"}\n', ":3: a number cannot be read"),
    "NaN": ('{"prompt": NaN, "completion": "b"}\n', ":3: this row is not like.*of which empty .'prompt'."),
    "infinity": ('{"prompt": "a", "completion": -Infinity}\n', ":3: .*of which empty .'completion'."),
    "too large": ('{"prompt": 1e999, "completion": "b"}\n', ":3: .*of which empty .'prompt'."),
    "null": (
        lines({"prompt": "a", "completion": None}), ":3: this row is not like the others.*columns .'prompt', "
        "'completion'., of which empty .'completion'.*wanted: prompt_completion .prompt and completion., as "
        "\\S+:1 has.*cure:   fill completion in"),
    "another format": (talk(USER, BOT), ":3: this row is not like the others.*columns .'messages'.: messages"),
    "true": (lines({"prompt": True, "completion": "b"}), ":3: column 'prompt' has the wrong type.*bool.*in quotes"),
    "a list": (lines([ROWS[0]]), ":3: a row must be an object of columns.*name the file a.json"),
    "python": ("{'prompt': 'a', 'completion': 'b'}\n", ":3: not a line of JSON.*write rows with json.dumps"),
    "a huge line": ('{"prompt": "' + "x" * 2_000_000 + '"', ":3: not a line of JSON.*no end"),
    "half a character": (r'{"prompt": "\ud83d", "completion": "b"}', ":3: prompt holds a broken character"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_and_can_be_skipped(name: str, tmp_path: Path) -> None:
    content, said = BAD_ROWS[name]
    path = write(tmp_path, "a.jsonl", JSONL + content)
    with pytest.raises(DataError, match=f"(?s)^{path}{said}.*--on-bad-row skip") as caught:
        prepared(path)
    assert len(str(caught.value)) < 1500  # a line of megabytes is not shown whole
    found = prepared(path, on_bad_row="skip")
    assert [row.meta["reference"] for row in found.rows] == ["b", "d"]
    assert [row.id for row in found.rows] == [0, 1]
    assert (found.report.read, found.report.kept) == (3, 2)
    assert found.report.dropped == {"cannot be used (data.on_bad_row=skip)": 1}
    [listed] = found.report.bad
    assert listed.startswith(f"{path}:3: ")
    assert f"  skipped  {listed}" in found.report.lines()


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("count", [1, 3])
def test_where_no_row_is_good_skipping_is_no_way_out(
    policy: str, count: int, tmp_path: Path
) -> None:
    path = write(tmp_path, "a.jsonl", lines({"prompt": True, "completion": "b"}) * count)
    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'prompt'") as caught:
        prepared(path, on_bad_row=policy)
    assert "on-bad-row" not in str(caught.value)


def test_skipped_rows_of_a_table_are_counted_too(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'prompt,completion\na,b\n"c"x,d\ne\nf,g\nh\0,i\n')
    with pytest.raises(DataError, match=r"3 of 5 rows cannot be used") as caught:
        prepared(path)
    for said in (":3: broken CSV", ":4: 1 field under a header of 2", ":6: NUL bytes in a field"):
        assert f"  - {path}{said}" in str(caught.value)
    found = prepared(path, on_bad_row="skip")
    assert [row.source for row in found.rows] == [f"{path}:2", f"{path}:5"]
    assert [row.id for row in found.rows] == [0, 3]  # places in the source, not among the kept


CONVERSATIONS = {
    "empty": (talk(), "an empty conversation"),
    "no turn but the system's": (talk(SYSTEM), "no row is left to train on.*dropped: no trained token"),
    "no answer": (talk(USER), "no row is left to train on.*give every row an assistant's answer"),
    "an image": (
        talk({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, BOT),
        "message 0 has content that is not text.*images and other media are not supported"),
    "a number": (talk({"role": "user", "content": 5}, BOT), "message 0 has content that is not text.*in quotes"),
    "a role of two meanings": (talk({"role": "agent", "content": "x"}), "unknown role.*'agent'.*who speaks"),
    "a misspelt role": (talk({"role": "usr", "content": "x"}), "unknown role.*did you mean 'user'"),
    "another key": (talk({"speaker": "user", "content": "x"}), "has no role.*rename the key 'speaker' to 'role'"),
    "a misspelt key": (talk({"rol": "user", "content": "x"}), "has no role.*did you mean 'role' by 'rol'"),
    "a role of no text": (talk({"role": 1, "content": "x"}), "message 0 has no role.*role '1'"),
    "texts alone": (talk("Hi", "Yo"), "message 0 has no role.*str 'Hi'"),
    "no text": (talk({"role": "user", "text": "Hi"}), "no content.*rename the key 'text' to 'content'"),
    "no list": (lines({"messages": "Hi"}), "column 'messages' has the wrong type"),
    "a number for turns": (lines({"messages": 5}), "column 'messages' has the wrong type"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_that_cannot_be_learnt_from_says_why(name: str, tmp_path: Path) -> None:
    content, said = CONVERSATIONS[name]
    with pytest.raises(DataError, match=f"(?s)^{tmp_path}/a.jsonl.*{said}"):
        prepared(write(tmp_path, "a.jsonl", content))


ANSWERS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
OPENED = "<|im_start|>system\nYou help.<|im_end|>\n"

MEANT = {
    "other names of roles": (talk({**USER, "role": "Human"}, {**BOT, "role": "bot"}), OPENED + ANSWERS),
    "from and value": (
        lines({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}),
        OPENED + ANSWERS),
    "both ways in one": (
        lines({"messages": [{"role": "user", "value": "Hi"}, {"from": "model", "content": "Yo"}]}),
        OPENED + ANSWERS),
    "parts": (talk({**USER, "content": [{"type": "text", "text": "H"}, {"type": "input_text", "text": "i"}]}, BOT),
              OPENED + ANSWERS),
    "a system's turn": (talk(SYSTEM, USER, BOT), "<|im_start|>system\nS<|im_end|>\n" + ANSWERS),
    "the assistant first": (
        talk(BOT, USER, BOT), OPENED + "<|im_start|>assistant\n«Yo<|im_end|>»\n" + ANSWERS),
    "numbers": (lines({"prompt": 1, "completion": 2.5}), OPENED + "<|im_start|>user\n1<|im_end|>\n"
                "<|im_start|>assistant\n«2.5<|im_end|>»\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_a_conversation_of_one_meaning_is_read_by_it(name: str, tmp_path: Path) -> None:
    content, wanted = MEANT[name]
    [row] = prepared(write(tmp_path, "a.jsonl", content)).rows
    assert marked(row, tokenizer_of(kit.CHATML)) == wanted


def test_a_template_that_refuses_some_rows_spoils_no_others(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", talk(USER, BOT) + talk(BOT) + talk(USER, BOT) + talk(BOT))
    with pytest.raises(DataError, match="2 of 4 rows cannot be used") as caught:
        prepared(path, kit.MISTRAL)
    assert f"  - {path}:2: the chat template refuses this conversation" in str(caught.value)
    assert "roles must alternate" in str(caught.value)
    assert f"(also {path}:4)" in str(caught.value)
    found = prepared(path, kit.MISTRAL, on_bad_row="skip")
    assert [row.source for row in found.rows] == [f"{path}:1", f"{path}:3"]


def test_all_bad_rows_are_said_at_once_by_kind(tmp_path: Path) -> None:
    faults = ["broken\n", lines({"x": 1}), lines({"text": 1, "y": {}}), '{"text": true}\n'] * 9
    path = write(tmp_path, "a.jsonl", lines({"text": "a"}) + "".join(faults) + lines({"text": "b"}))
    with pytest.raises(DataError) as caught:
        prepared(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: 27 of 38 rows cannot be used\n")  # 1 is a text, as in a table
    assert [line for line in said.split("\n") if line.startswith("  - ")] == [
        f"  - {path}:2: not a line of JSON",
        f"  - {path}:3: this row is not like the others",
        f"  - {path}:5: column 'text' has the wrong type",
    ]
    assert f"(also {path}:6, {path}:10, {path}:14, {path}:18 and 4 more rows)" in said
    assert said.endswith("--on-bad-row skip (data.on_bad_row=skip)")
    report = prepared(path, on_bad_row="skip").report
    assert (report.read, report.kept, len(report.bad)) == (38, 11, 5)
    assert sum(report.dropped.values()) == 27


def test_the_format_is_that_of_most_rows_wherever_the_odd_one_is(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "a"}) + JSONL)
    with pytest.raises(DataError, match=r"a\.jsonl:1: this row is not like the others"):
        prepared(path)
    report = prepared(path, on_bad_row="skip").report
    assert (report.format, report.why) == (
        "prompt_completion",
        "2 of 3 rows have prompt and completion",
    )


def test_when_no_row_is_left_to_skip_to_that_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "broken\nworse\n")
    with pytest.raises(DataError, match="2 of 2 rows cannot be used") as caught:
        prepared(path, on_bad_row="skip")
    assert "--on-bad-row" not in str(caught.value)
    stated = write(tmp_path, "b.jsonl", JSONL)
    with pytest.raises(DataError, match=r"not a row of format text, which data\.format"):
        prepared(stated, on_bad_row="skip", format="text")


def test_a_mapping_to_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"question": "a", "answer": "b"}) * 3)
    with pytest.raises(DataError, match="3 of 3 rows cannot be used") as caught:
        prepared(path, columns={"prompt": "qestion", "completion": "answer"})
    assert "no column 'qestion' (mapped to 'prompt' by data.columns)" in str(caught.value)
    assert "did you mean 'question'?" in str(caught.value)
    assert f"(also {path}:2, {path}:3)" in str(caught.value)


def test_one_column_is_mapped_by_the_cure_that_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "story\nonce\nupon\n")
    with pytest.raises(
        DataError, match=r"a\.csv:2: no known format.*'data\.columns=\{text: story\}'|"
    ) as caught:
        prepared(path)
    assert "--set 'data.columns={text: story}'" in str(caught.value)
    assert len(prepared(path, columns={"text": "story"}).rows) == 2


def test_too_long_rows_are_said_together(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.jsonl", JSONL + lines({"prompt": "a", "completion": "word " * 90}) * 3
    )
    with pytest.raises(DataError, match=r"a\.jsonl:3: row longer than max_tokens") as caught:
        prepared(path, over_long="error", max_tokens=100, limit=9999)
    longest = max(len(row.tokens) for row in prepared(path, limit=9999).rows)
    assert f"got:    {longest} tokens, and 2 more rows, the longest of {longest}" in str(
        caught.value
    )
    assert f"cure:   data.max_tokens={longest}" in str(caught.value)
    alone = write(tmp_path, "b.jsonl", lines({"prompt": "a", "completion": "word " * 90}))
    with pytest.raises(
        DataError, match=r"no row is left.*\n.*longer than max_tokens(.*\n)*.*shorten the rows"
    ):
        prepared(alone, limit=100)


def test_no_end_of_text_token_and_no_template(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", talk(USER, BOT))
    with pytest.raises(DataError, match="a conversation needs a chat template"):
        prepared(path, None)


# --- places -----------------------------------------------------------------------------------------------------


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "calls.jsonl", JSONL)
    with pytest.raises(DataError, match="no such file") as caught:
        prepared(tmp_path / "cals.jsonl")
    assert f"did you mean {tmp_path / 'calls.jsonl'}?" in str(caught.value)
    with pytest.raises(DataError, match="does not exist either"):
        prepared(tmp_path / "nowhere" / "calls.jsonl")


def test_an_address_is_no_path() -> None:
    with pytest.raises(DataError, match=r"no such file\n  got:    an address") as caught:
        prepared("https://example.org/rows.jsonl")
    assert "download it first" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".jsonl", "a\0b.jsonl", "~nobody-here/a.jsonl", "", "."]
)
def test_names_that_no_file_can_have(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        prepared(name)


@pytest.mark.parametrize(
    "name", ["with space.jsonl", "ação 漢字.jsonl", "-dash.jsonl", "a:b.jsonl", "[x]*.jsonl"]
)
def test_odd_names_are_names(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, name, JSONL)
    monkeypatch.chdir(tmp_path)
    assert [row.source for row in prepared(name).rows] == [f"{name}:1", f"{name}:2"]
    assert len(prepared(tmp_path).rows) == 2


def test_links_are_followed_and_dead_ones_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "linked.jsonl").symlink_to(write(tmp_path, "real.jsonl", JSONL))
    (folder / "dead.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    assert [row.source for row in prepared(folder).rows] == [
        f"{folder}/linked.jsonl:{n}" for n in (1, 2)
    ]
    with pytest.raises(DataError, match="no such file"):
        prepared(folder / "dead.jsonl")
    with pytest.raises(DataError, match="no such file"):
        prepared(folder / "loop.jsonl")


def test_a_folder_of_mixed_files_names_the_odd_ones(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", JSONL)
    write(tmp_path, "b.jsonl", talk(USER, BOT))
    write(tmp_path, "notes.docx", b"PK\x03\x04")
    with pytest.raises(DataError, match=r"b\.jsonl:1: this row is not like the others"):
        prepared(tmp_path)
    found = prepared(tmp_path, on_bad_row="skip").report
    assert (found.read, found.kept) == (3, 2)
    assert any("read 2 of 2 data files" in note for note in found.notes)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("config.json", "model.safetensors", "tokenizer.json"), "a model"),
        (("adapter_config.json", "adapter_model.safetensors"), "an adapter"),
        (("config.yaml", "adapter"), "a run"),
    ],
)
def test_a_model_in_the_place_of_data_is_said(
    files: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    for name in files:
        write(tmp_path, name, "{}")
    with pytest.raises(DataError, match=f"this folder holds {what}, not data") as caught:
        prepared(tmp_path)
    assert "cure:   the model comes first, then the data: afina train MODEL DATA" in str(
        caught.value
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", JSONL)
    path.chmod(0)
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read\n  got:    Permission denied"):
        prepared(path)


def test_a_saved_data_set_that_is_damaged_says_so(tmp_path: Path) -> None:
    write(tmp_path, "state.json", "{")
    with pytest.raises(DataError, match="looks like a saved data set, and cannot be loaded"):
        prepared(tmp_path)


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "one row": (lambda: ROWS[0], "put the one row in a list"),
    "bytes": (lambda: b"abc", "no source of rows"),
    "a number": (lambda: 7, "no source of rows\n  got:    int 7"),
    "nothing": (lambda: None, "no source of rows"),
    "no mapping": (lambda: [ROWS[0], 7], "row 2 of the given list is no mapping of columns"),
    "a key of no text": (lambda: [{1: "a"}], "row:1: a column's name is no text"),
    "a nested key of no text": (
        lambda: [{"messages": [{"role": "user", 1: 2}]}],
        "'messages' is an object with a key that is no text",
    ),
    "an empty list": (lambda: [], "no rows"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_rows_given_in_python(name: str) -> None:
    make, said = GIVEN[name]
    with pytest.raises(DataError, match=said):
        prepared(make())


def test_a_value_that_holds_itself() -> None:
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(DataError, match="row:1: column 'x' is nested more than 64 levels deep"):
        prepared([{"text": "a", "x": inside}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('not like this') }}", "got:    not like this; roles"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_is_the_templates_fault(template: str, said: str) -> None:
    tokenizer = tokenizer_of(kit.CHATML)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="the chat template refuses this conversation") as caught:
        prepare([ROWS[0]], tokenizer, DataSettings())
    assert said in str(caught.value)
    assert end_of_turn(tokenizer) is None
    with pytest.raises(ModelError, match="the chat template refuses these messages"):
        encode(tokenizer, [USER])
