"""The cache: complete folders only, built once, whoever else is at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afina.errors import ModelError
from afina.models import cache


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def writes(text):
    return lambda folder: (folder / "file").write_text(text)


def fails(folder):
    (folder / "file").write_text("half")
    raise ModelError("the disk is full")


def test_the_place_follows_the_environment(monkeypatch):
    monkeypatch.setenv("AFINA_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.root() == Path("/a")
    monkeypatch.delenv("AFINA_CACHE")
    assert cache.root() == Path("/x/afina")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ana")
    assert cache.root() == Path("/home/ana/.cache/afina")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("../../etc/passwd", "etc-passwd"),
        ("/", "model"),
        ("..", "model"),
        (".hidden", "hidden"),
        ("a b\x00c\\d", "a-b-c-d"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_name_is_one_plain_file_name(name, safe):
    assert cache.safe_name(name) == safe


def test_an_entry_is_built_once_and_listed(place):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("12345")

    folder = cache.build("one", {"source": "s"}, make)
    assert cache.build("one", {"source": "s"}, make) == folder == place / "models" / "one"
    assert len(made) == 1
    assert (folder / "file").read_text() == "12345"
    (entry,) = cache.entries()
    assert (entry.name, entry.folder, entry.manifest) == ("one", folder, {"source": "s"})
    assert entry.size_bytes == 5 + (folder / cache.MANIFEST).stat().st_size


def test_another_manifest_builds_anew():
    cache.build("one", {"recipe": 1}, writes("old"))
    folder = cache.build("one", {"recipe": 2}, writes("new"))
    assert (folder / "file").read_text() == "new"
    assert [entry.manifest for entry in cache.entries()] == [{"recipe": 2}]


def test_a_failed_build_leaves_nothing_and_keeps_what_was_there(place):
    with pytest.raises(ModelError, match="disk is full"):
        cache.build("one", {}, fails)
    assert list((place / "models").iterdir()) == []
    cache.build("one", {"recipe": 1}, writes("old"))
    with pytest.raises(ModelError, match="disk is full"):
        cache.build("one", {"recipe": 2}, fails)
    assert (place / "models" / "one" / "file").read_text() == "old"


def test_a_folder_without_manifest_is_no_entry_and_is_replaced(place):
    (place / "models" / "one").mkdir(parents=True)
    (place / "models" / "one" / "stray").write_text("half a model")
    assert cache.entries() == []
    folder = cache.build("one", {}, writes("whole"))
    assert sorted(each.name for each in folder.iterdir()) == [cache.MANIFEST, "file"]


def test_what_a_killed_build_left_is_cleared_but_no_other_name_is(place):
    for left in (".building-one-abc", ".building-two-abc"):
        (place / "models" / left).mkdir(parents=True)
    cache.build("one", {}, writes("x"))
    assert sorted(each.name for each in (place / "models").iterdir()) == [
        ".building-two-abc",
        "one",
    ]


CONTENDER = """
import pathlib, sys, time
from afina.models import cache
log, start = map(pathlib.Path, sys.argv[1:])
def make(folder):
    with log.open("a") as out:
        out.write("built\\n")
    time.sleep(0.3)
    (folder / "file").write_text("whole")
(start / str(time.time_ns())).touch()
while len(list(start.iterdir())) < 2:
    time.sleep(0.01)
print((cache.build("one", {"a": 1}, make) / "file").read_text())
"""


def test_of_two_processes_one_builds_and_both_get_the_whole(tmp_path):
    (tmp_path / "start").mkdir()
    command = [sys.executable, "-c", CONTENDER, str(tmp_path / "log"), str(tmp_path / "start")]
    both = [
        subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate(timeout=120)[0] for each in both] == ["whole\n", "whole\n"]
    assert (tmp_path / "log").read_text() == "built\n"


def test_remove_frees_the_entry_and_refuses_what_is_not_there(place):
    cache.build("minilm", {}, writes("x"))
    cache.build("smollm", {}, writes("x"))
    assert cache.remove("smollm").name == "smollm"
    assert [each.name for each in (place / "models").iterdir()] == ["minilm"]
    with pytest.raises(ModelError, match=r"(?s)got:\s+minlm.*wanted:\s+minilm"):
        cache.remove("minlm")
    cache.remove("minilm")
    with pytest.raises(ModelError, match="the cache is empty"):
        cache.remove("minilm")


def test_remove_stays_inside_the_cache(place, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / cache.MANIFEST).write_text("{}")
    with pytest.raises(ModelError):
        cache.remove("../../precious")
    assert outside.is_dir()
