"""Every kind of source gives the same rows with their own lines, and broken ones are named by file and line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.badrows import BadRows
from afina.data.readers import read_json, read_jsonl
from afina.data.settings import DataSettings
from afina.data.sources import read
from afina.errors import DataError

ROWS = [{"prompt": "a", "completion": "é漢"}, {"prompt": 'b,"c"', "completion": "two\nlines"}]


def found(source: Any, role: Any = "train", **settings: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(row.source, row.columns) for row in read(source, DataSettings(**settings), role).rows]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


CSV = 'prompt,completion\na,é漢\n"b,""c""","two\nlines"\n'

FILES = {
    "a.jsonl": (jsonl(ROWS).encode(), (1, 2)),
    "bom.jsonl": (b"\xef\xbb\xbf" + jsonl(ROWS).encode(), (1, 2)),
    "crlf.jsonl": (jsonl(ROWS).replace("\n", "\r\n").encode(), (1, 2)),
    "blank.jsonl": (("\n\n" + jsonl(ROWS).replace("\n", "\n\n")).encode(), (3, 5)),
    "utf16.jsonl": (jsonl(ROWS).encode("utf-16"), (1, 2)),
    "a.jsonl.gz": (gzip.compress(jsonl(ROWS).encode()), (1, 2)),
    "lines.json": (jsonl(ROWS).encode(), (1, 2)),
    "flat.json": (json.dumps(ROWS).encode(), ("1[0]", "1[1]")),
    "flat inside.json": (json.dumps({"data": ROWS}).encode(), ("1[0]", "1[1]")),
    "tall.json": (json.dumps(ROWS, indent=2).encode(), (2, 6)),
    "inside.json": (json.dumps({"v": [1, 2][0], "data": ROWS}, indent=1).encode(), (4, 8)),
    "a.csv": (CSV.encode(), (2, 3)),
    "bom.csv": (b"\xef\xbb\xbf" + CSV.encode(), (2, 3)),
    "semicolon.csv": (
        CSV.replace("prompt,completion", "prompt;completion")
        .replace("a,é", "a;é")
        .replace('","', '";"')
        .encode(),
        (2, 3),
    ),
    "a.tsv": (
        CSV.replace("prompt,completion", "prompt\tcompletion")
        .replace("a,é", "a\té")
        .replace('","', '"\t"')
        .encode(),
        (2, 3),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_rows_from_every_kind_of_file(name: str, tmp_path: Path) -> None:
    content, lines = FILES[name]
    path = write(tmp_path, name, content)
    assert found(path) == [(f"{path}:{line}", row) for line, row in zip(lines, ROWS, strict=True)]


def test_items_that_begin_on_one_line_are_told_by_their_number(tmp_path: Path) -> None:
    one = '{"text": "a"}'
    path = write(tmp_path, "a.json", f'[{one},\n{one}, {{"text":\n"b"}}, {one},\n\n{one}]\n')
    places = [place.removeprefix(f"{path}:") for place, _ in found(path)]
    assert places == ["1", "2[1]", "2[2]", "3", "5"]
    path = write(tmp_path, "b.json", f"[{one}, 7, {one}, [], 8]")
    bad = BadRows()
    rows = read(path, DataSettings(), bad=bad).rows
    assert [row.source for row in rows] == [f"{path}:1[0]", f"{path}:1[2]"]
    assert [place for place, _ in bad.found] == [f"{path}:1[{at}]" for at in (1, 3, 4)]
    with pytest.raises(DataError, match=r"(?s)b\.json:1\[1\]: a row must.*also \S+\[3\], \S+\[4\]"):
        bad.refuse("b.json", 5)
    path = write(tmp_path, "c.json", f"[{one}]")
    assert [place for place, _ in found(path)] == [f"{path}:1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": "b\0"}', "(Invalid control character at column 9)"),
        ('{"a": "b', "(Unterminated string starting at column 7)"),
        (r'{"a": "\x"}', r"(Invalid \escape at column 8)"),
        ('{"a": }', "(Expecting value at column 7)"),
    ],
)
def test_the_place_in_a_broken_line_is_said_once(line: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a line of JSON") as caught:
        found(path)
    assert said in str(caught.value.got)


def test_crlf_inside_a_quoted_field_stays_and_lines_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,n\r\n"x\r\ny",1\r\n\r\nz,2\r\n')
    assert found(path) == [
        (f"{path}:2", {"text": "x\r\ny", "n": "1"}),
        (f"{path}:5", {"text": "z", "n": "2"}),
    ]


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert found(path) == [(f"{path}:1", ROWS[0]), (f"{path}:2", ROWS[1])]
    parts: dict[Any, Any] = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in found(tmp_path / "saved")] == ROWS
    assert [row for _, row in found(tmp_path / "saved", "val")] == ROWS[:1]


def test_text_by_line_or_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\r\ntwo\r\n\r\n\r\nthree\u2028still\n")
    assert found(path) == [
        (f"{path}:1", {"text": "one"}),
        (f"{path}:2", {"text": "two"}),
        (f"{path}:5", {"text": "three\u2028still"}),
    ]
    assert found(path, txt="paragraph") == [
        (f"{path}:1", {"text": "one\ntwo"}),
        (f"{path}:5", {"text": "three\u2028still"}),
    ]


def test_a_line_separator_inside_json_cuts_no_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a\u2028b\u0085c\x0bd"}\n'.replace("\x0b", ""))
    assert found(path) == [(f"{path}:1", {"text": "a\u2028b\u0085cd"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_not_a_number_is_nothing_and_a_bare_text_is_a_row(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, '[{"a": NaN, "b": [-Infinity]}, "c"]')
    if name == "a.jsonl":
        write(tmp_path, name, '{"a": NaN, "b": [-Infinity]}\n"c"')
    assert [row for _, row in found(path)] == [{"a": None, "b": [None]}, {"text": "c"}]
    assert [row for _, row in found([{"a": float("nan"), "b": 1.5}])] == [{"a": None, "b": 1.5}]


def test_lists_of_paths_and_of_rows(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.jsonl", jsonl(ROWS[:1])), write(tmp_path, "b.json", json.dumps(ROWS))
    assert [at for at, _ in found([a, str(b)])] == [f"{a}:1", f"{b}:1[0]", f"{b}:1[1]"]
    assert found(iter(ROWS)) == [("row:1", ROWS[0]), ("row:2", ROWS[1])]
    assert [at for at, _ in found(datasets.Dataset.from_list(ROWS))] == ["row:1", "row:2"]
    with pytest.raises(DataError, match="row 2 of the given list"):
        read([ROWS[0], 7], DataSettings())  # type: ignore[list-item]


def test_max_rows_reads_no_further_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", jsonl(ROWS[:1]) + "broken\n")
    result = read(path, DataSettings(max_rows=1))
    assert len(result.rows) == 1
    assert result.notes == ("only the first row was read (data.max_rows)",)


def test_a_folder_gives_each_role_its_part(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "train-01.jsonl", "valid.jsonl", "test.jsonl"):
        write(tmp_path, name, jsonl([{"text": name}]))
    write(tmp_path, "trainer.jsonl", jsonl([{"text": "not a split"}]))
    write(tmp_path, "README.txt", "not data")
    assert [row["text"] for _, row in found(tmp_path)] == ["train-00.jsonl", "train-01.jsonl"]
    assert [row["text"] for _, row in found(tmp_path, "val")] == ["valid.jsonl"]
    assert [row["text"] for _, row in found(tmp_path, "eval")] == ["test.jsonl"]
    assert [row["text"] for _, row in found(tmp_path, split="test")] == ["test.jsonl"]
    with pytest.raises(DataError, match="no file of split 'other'"):
        found(tmp_path, split="other")
    [note] = read(tmp_path, DataSettings()).notes
    assert note.endswith("read 2 of 6 data files: train-00.jsonl, train-01.jsonl")


def test_a_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    write(tmp_path, "b/two.txt", "two")
    write(tmp_path, "a.txt", "one")
    write(tmp_path, "SOURCE.txt", "where it came from")
    assert [row["text"] for _, row in found(tmp_path)] == ["one", "two"]


def test_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(
        datasets, "get_dataset_split_names", lambda name, subset, revision: ["train", "test"]
    )
    result = read("owner/name", DataSettings(subset="en", revision="v1"), "val")
    assert asked == [("owner/name", "en", "test", "v1")]
    assert [row.source for row in result.rows] == ["owner/name[test]:1", "owner/name[test]:2"]
    with pytest.raises(DataError, match="no split for train") as caught:
        read("owner/name", DataSettings(split="dev"))
    assert "['train', 'test']" in str(caught.value)


def test_numbers_of_classes_become_their_names(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": -1}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert [row["label"] for _, row in found(tmp_path / "saved")] == ["good", "bad", None]


def test_a_hub_that_does_not_answer_is_an_error_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(DataError, match="neither a file here nor a data set of the hub"):
        read("owner/name", DataSettings())


def test_a_misspelt_path_names_its_neighbour_and_never_asks_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "calls.jsonl", jsonl(ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(datasets, "load_dataset")
    for name in ("cals.jsonl", "./calls.json", "calls"):
        with pytest.raises(DataError, match="no such file") as caught:
            read(name, DataSettings())
        assert "did you mean calls.jsonl?" in str(caught.value)


BROKEN = {
    "a.jsonl": ('{"a": 1}\n{"a": \n', r"a\.jsonl:2: not a line of JSON"),
    "list.jsonl": ('{"a": 1}\n\n[1]\n', r"list\.jsonl:3: a row must be an object"),
    "tall.jsonl": ('{\n "a": 1}\n', r"tall\.jsonl:1: not a line of JSON"),
    "a.json": ('[{"a": 1},\n {"a": }]', r"a\.json:2: not valid JSON"),
    "open.json": ('[{"a": 1},\n {"a": 2}\n', r"open\.json:3: not valid JSON"),
    "twice.json": ('[{"a": 1}]\n[{"a": 2}]', r"twice\.json:2: not valid JSON"),
    "scalar.json": ("7", r"scalar\.json:1: not valid JSON"),
    "lists.json": ('{"a": [], "b": []}', r"no single list of rows"),
    "wide.csv": ("a,b\n1,2\n1,2,3\n", r"wide\.csv:3: 3 fields under a header of 2"),
    "quote.csv": ('a,b\n"1"x,2\n', r"quote\.csv:2: broken CSV"),
    "open.csv": (
        'a,b\n"1\n2",3\n4,"5\n6,7\n8,9\n',
        r"""open\.csv:4: a quote opens in this row and never closes\n  got:    '4,"5' and every""",
    ),
    "header.csv": ('"a,b\n1,2\n', r"header\.csv:1: a quote opens in this row and never"),
    "same.csv": ("a,a\n1,2\n", r"same\.csv:1: a column name occurs twice"),
    "empty.csv": ("", r"empty\.csv: empty"),
    "empty.jsonl": ("\n", r"empty\.jsonl: no rows"),
    "latin.txt": (b"ok\ncaf\xe9\n", r"latin\.txt:2: not UTF-8"),
    "a.jsonl.gz": (b"\x1f\x8bnonsense", r"a\.jsonl\.gz cannot be read"),
    "a.parquet": (b"nonsense", r"a\.parquet: not a readable Parquet file"),
    "a.xlsx": (b"PK", r"a\.xlsx: unknown kind of file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_by_file_and_line(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=message):
        read(path, DataSettings())


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6)


@given(rows=st.lists(st.fixed_dictionaries({"a": CELLS, "b": CELLS}), min_size=1, max_size=5))
def test_what_json_writes_is_read_back(rows: list[dict[str, str]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    by_line = write(folder, "a.jsonl", jsonl(rows))
    assert [row for _, row in read_jsonl(by_line)] == rows
    assert [line for line, _ in read_jsonl(by_line)] == list(range(1, len(rows) + 1))
    for indent in (None, 1):
        whole = write(folder, f"{indent}.json", json.dumps({"x": 1, "rows": rows}, indent=indent))
        assert [row for _, row in read_json(whole)] == rows


def test_a_long_csv_field_and_the_limit_is_put_back(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    path = write(tmp_path, "a.csv", "text,n\n" + "x" * 200_000 + ",1\n")
    assert [len(row["text"]) for _, row in found(path)] == [200_000]
    assert csv.field_size_limit() == before


def test_reading_text_files_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", jsonl(ROWS))
    code = (
        "import sys; from afina.data.sources import read; from afina.data.settings import DataSettings\n"
        f"assert len(read({str(path)!r}, DataSettings()).rows) == 2\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
