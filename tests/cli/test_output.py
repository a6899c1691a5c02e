"""Outputs are checked before the work and kept after it, whatever becomes of the disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from afina.cli.output import refuse_over_inputs, refuse_unwritable, write_json, write_text
from afina.errors import ConfigError


def test_a_new_file_in_new_folders_may_be_written(tmp_path: Path) -> None:
    refuse_unwritable(str(tmp_path / "a" / "b" / "c.json"), None, "-", force=False)
    assert list(tmp_path.iterdir()) == []
    write_json(str(tmp_path / "a" / "b" / "c.json"), [1])
    assert (tmp_path / "a" / "b" / "c.json").read_text(encoding="utf-8") == "[\n  1\n]\n"


def test_a_place_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text("{}", encoding="utf-8")
    said = r"(?s)cannot be written\n  got:    .*x\.json \(.*\n  cure:   .*nothing can be made in .*calls"
    with pytest.raises(ConfigError, match=said):
        refuse_unwritable(str(tmp_path / "calls.jsonl" / "x.json"), force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody may write")
def test_a_folder_that_takes_no_files_is_refused() -> None:
    for path in ("/proc/x.jsonl", "/proc/new/x.jsonl"):
        with pytest.raises(ConfigError, match=r"nothing can be made in /proc$"):
            refuse_unwritable(path, force=False)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        refuse_unwritable(str(tmp_path / ("x" * 300)), force=False)


def test_one_file_for_two_outputs_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "x"), "-"):
        with pytest.raises(ConfigError, match="two outputs are one file"):
            refuse_unwritable(path, path, force=True)


def test_a_device_is_written_and_stays_one() -> None:
    refuse_unwritable(os.devnull, force=False)
    write_text(os.devnull, "a")
    assert not Path(os.devnull).is_file()


def test_what_cannot_be_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = str(tmp_path / "file" / "x.json")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        write_text(path, "olá\n")
    kept = re.search(r"mv (\S+-x\.json) ", str(caught.value))
    assert kept is not None
    assert Path(kept[1]).read_text(encoding="utf-8") == "olá\n"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="went to the standard output"):
        write_text(path, "olá\n")
    assert capsys.readouterr().out == "olá\n"


def test_what_is_read_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "model/config.json", "run/config.yaml", "run/adapter/afina.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}", encoding="utf-8")
    Path("run/scores.json").write_text("{}", encoding="utf-8")
    Path("link").symlink_to("rows.jsonl")
    inputs = ("rows.jsonl", "model", "run", None, "owner/name", "-")
    read = (
        "./rows.jsonl",
        "link",
        "model/config.json",
        "run/config.yaml",
        "run/adapter/afina.json",
    )
    for output in read:
        with pytest.raises(ConfigError, match="take the place of something that is read"):
            refuse_over_inputs([None, "-", output], inputs)
    # What is new, or lies in the run and is not of it, or is nobody's input, may be written.
    refuse_over_inputs(["run/scores.json", "model/new.json", os.devnull], inputs)
    refuse_over_inputs(["rows.jsonl"], ["other.jsonl"])


def test_the_way_to_replace_a_file_is_the_verbs_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="or say --overwrite to replace it"):
        refuse_unwritable(str(tmp_path / "x"), force=False, flag="--overwrite")
