"""A data setting without an effect is refused by name; one that any source has a use for is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from afina.data.idle import FOR, heeded_by, refuse_idle_data
from afina.data.settings import DataSettings
from afina.errors import ConfigError
from afina.types import Row

ROW = {"prompt": "a", "completion": "b"}
PREPARED = [Row((1, 2), (False, True), 0)]
HUB = "owner/name-that-is-not-here"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one source of each kind."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "plain.txt.gz").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "texts/deep").mkdir(parents=True)
    (tmp_path / "texts/deep/a.txt").write_text("a")
    table = datasets.Dataset.from_list([{"text": "a"}])
    table.save_to_disk(str(tmp_path / "table"))
    parts: dict[Any, Any] = {"train": table}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


IDLE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "split of a file": (["rows.jsonl"], {"split": "test"}),
    "split of files": ([["rows.jsonl", Path("rows.jsonl")]], {"split": "test"}),
    "split of one table": (["table"], {"split": "test"}),
    "split of rows": ([[ROW]], {"split": "test"}),
    "subset of a file": (["rows.jsonl"], {"subset": "en"}),
    "subset of a folder": (["folder"], {"subset": "en"}),
    "revision of saved parts": (["parts"], {"revision": "main"}),
    "txt of lines": (["rows.jsonl", "rows.jsonl"], {"txt": "paragraph"}),
    "txt of a folder without texts": (["folder"], {"txt": "paragraph"}),
    "txt of the hub": ([HUB], {"txt": "paragraph"}),
    "columns of prepared rows": ([PREPARED], {"columns": {"prompt": "q"}}),
    "format of prepared rows": ([PREPARED], {"format": "text"}),
    "max_rows of prepared rows": ([PREPARED], {"max_rows": 3}),
    "on_bad_row of prepared rows": ([PREPARED], {"on_bad_row": "skip"}),
    "seed of nothing held out": (["rows.jsonl"], {"seed": 3}),
}

HEEDED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "split of the hub": ([HUB], {"split": "test", "subset": "en", "revision": "main"}),
    "split of one source of two": (["rows.jsonl", HUB], {"split": "test", "subset": "en"}),
    "split of a folder": (["folder"], {"split": "train"}),
    "split of saved parts": (["parts"], {"split": "train"}),
    "txt": (["plain.txt.gz"], {"txt": "paragraph"}),
    "txt of a folder": (["texts"], {"txt": "paragraph"}),
    "the same value as the default": (["rows.jsonl"], {"txt": "line", "split": None, "seed": 0}),
    "what rows given in Python have": ([[ROW]], {"columns": {"prompt": "q"}, "format": "text"}),
    "validation rows to read": ([PREPARED, "rows.jsonl"], {"on_bad_row": "skip", "max_rows": 2}),
    "seed": (["rows.jsonl"], {"seed": 3, "val_fraction": 0.5}),
    "what is not there": (["none.jsonl"], {"split": "test", "txt": "paragraph"}),
    "how long rows were cut": ([PREPARED], {"max_tokens": 9, "over_long": "truncate"}),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_without_effect_is_refused(name: str, place: Path) -> None:
    sources, given = IDLE[name]
    [setting] = given
    with pytest.raises(ConfigError, match=rf"^data\.{setting} would do nothing: it ") as caught:
        refuse_idle_data(sources, DataSettings(**given))
    assert caught.value.got == f"data.{setting}={given[setting]}"
    refuse_idle_data(sources, DataSettings())


@pytest.mark.parametrize("name", HEEDED)
def test_a_setting_with_an_effect_is_not(name: str, place: Path) -> None:
    sources, given = HEEDED[name]
    refuse_idle_data(sources, DataSettings(**given))


def test_texts_have_no_turns() -> None:
    last, chat = DataSettings(train_on="last"), DataSettings(template="chat")
    for settings, said in (
        (last, "train_on would do nothing"),
        (chat, "template would do nothing"),
    ):
        with pytest.raises(ConfigError, match=said):
            refuse_idle_data(["rows.jsonl"], settings, ["text", "text_label"])
        refuse_idle_data(["rows.jsonl"], settings, ["text", "messages"])
        refuse_idle_data(["rows.jsonl"], settings)
    refuse_idle_data(["rows.jsonl"], DataSettings(train_on="text", template="none"), ["text"])


def test_all_are_said_at_once(place: Path) -> None:
    with pytest.raises(ConfigError, match="3 settings cannot be used") as caught:
        refuse_idle_data(["rows.jsonl"], DataSettings(split="a", subset="b", seed=1))
    for name in ("split", "subset", "seed"):
        assert f"data.{name} would do nothing" in str(caught.value)


def test_what_can_be_read_once_is_not_asked() -> None:
    once = iter([ROW])
    assert heeded_by(once) == set(FOR)
    assert next(once) == ROW
