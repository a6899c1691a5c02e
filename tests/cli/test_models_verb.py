"""`afina models`: what it prints, and its exit statuses."""

from __future__ import annotations

import json

import pytest

from afina.cli import main
from afina.cli.models import megabytes
from afina.models import cache, hub
from afina.models.demo import DEMOS


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(name, source, size):
    cache.build(name, {"source": source}, lambda folder: (folder / "w").write_bytes(bytes(size)))


def test_list_shows_what_is_there_and_what_could_be(capsys, place):
    fill("minilm-l6-v2", "pypi:x==1", 3_000_000)
    fill("mine-0a1b", "/data/mine.gguf", 2_000_000)
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["mine-0a1b", "2", "MB", "from", "/data/mine.gguf"]
    assert lines[1].split()[:3] == ["minilm-l6-v2", "3", "MB"]
    assert lines[2].split()[:3] == ["smollm2-135m", "not", "fetched"]
    assert str(place) in lines[-1]


def test_list_as_json(capsys, place):
    fill("mine", "/data/mine.gguf", 5)
    assert main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert sorted(rows) == ["mine", *sorted(DEMOS)]
    assert rows["mine"]["cached"] is True
    assert rows["mine"]["folder"] == str(place / "models" / "mine")
    assert rows["smollm2-135m"]["cached"] is False
    assert rows["smollm2-135m"]["size_bytes"] == DEMOS["smollm2-135m"].download_bytes


def test_get_prints_the_folder_alone_and_passes_its_options(capsys, monkeypatch, tmp_path):
    asked = []

    def resolve(source, **options):
        asked.append((source, options))
        return tmp_path / "folder"

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    line = ["models", "get", "o/n", "--revision", "v1", "--token", "t", "--offline"]
    assert main(line) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'folder'}\n"
    assert main(["models", "get", "o/n"]) == 0
    assert asked == [
        ("o/n", {"revision": "v1", "token": "t", "offline": True}),
        ("o/n", {"revision": None, "token": None, "offline": None}),
    ]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["get", "/no/such/model"], 4, "no such file or folder"),
        (["get", "smollm-135m"], 4, "did you mean smollm2-135m"),
        (["rm", "nothing"], 4, "the cache is empty"),
        (["rm"], 2, "Missing argument"),
        (["put", "x"], 2, "No such command"),
    ],
)
def test_what_fails_says_why_and_has_its_status(words, status, said, capsys):
    assert main(["models", *words]) == status
    assert said in capsys.readouterr().err


def test_rm_removes_what_it_names_and_nothing_else(capsys):
    for name in ("one", "two", "three"):
        fill(name, "s", 1_000_000)
    assert main(["models", "rm", "one", "two"]) == 0
    out = capsys.readouterr().out
    assert "removed one: 1 MB free again" in out
    assert "removed two" in out
    assert [entry.name for entry in cache.entries()] == ["three"]


@pytest.mark.parametrize("verb", ["list", "get", "rm"])
def test_every_help_has_examples_on_lines_of_their_own(verb, capsys):
    assert main(["models", verb, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"afina models {verb}" in "\n".join(lines[lines.index("examples:") :])
    assert all(line.count("afina models") <= 1 for line in lines)


def test_the_help_lists_the_statuses(capsys):
    assert main(["models", "--help"]) == 0
    assert "4 the model cannot be found" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MB"), (541_615_235, "542 MB"), (1_500_000_000, "1.5 GB")]
)
def test_sizes_in_words(size, text):
    assert megabytes(size) == text
