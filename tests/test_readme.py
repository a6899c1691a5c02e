"""What README and documentation tell a reader to type does what they say, or at least exists."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import afina.cli
from afina.adapters import files
from afina.config import load_config
from afina.data.settings import DataSettings
from afina.table import TECHNIQUES
from tests.tiny import byte_tokenizer, save_model, tiny_llama

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str, page: str = "README.md") -> list[str]:
    """A page's code blocks of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every command line of afina in a code block."""
    found: set[str] = set()
    for file in TEXTS:
        code = re.findall(r"^```\w*\n(.*?)^```", file.read_text(encoding="utf-8"), re.M | re.S)
        lines = (line.strip() for block in code for line in block.splitlines())
        found |= {
            re.sub(r"^\.venv/bin/", "", x) for x in lines if re.match(r"(\.venv/bin/)?afina ", x)
        }
    return sorted(found)


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The click command that a command line calls, and its words."""
    module = importlib.import_module(afina.cli.VERBS[words[1]][0])
    if hasattr(module, "app"):
        group: Any = typer.main.get_command(module.app)
        return group.commands[words[2]], words[3:]
    app = typer.Typer()
    app.command()(module.command)
    return typer.main.get_command(app), words[2:]


def unknown_options(command: str) -> list[str]:
    """Options of a command line that its verb does not have; `[a | b]` stands for a choice."""
    words = shlex.split(re.sub(r"[\[\]]", " ", command)) if "[" in command else shlex.split(command)
    if words[1] == "--version":
        return []
    verb, rest = verb_of(words)
    known = {"--help"}.union(
        *(parameter.opts + parameter.secondary_opts for parameter in verb.params)
    )
    return [word for word in rest if word.startswith("-") and word not in known]


@pytest.mark.parametrize("command", commands())
def test_the_options_of_a_command_exist(command: str) -> None:
    assert unknown_options(command) == []


def test_an_option_that_does_not_exist_is_seen() -> None:
    assert unknown_options("afina train MODEL DATA --colour red") == ["--colour"]
    assert unknown_options("afina train MODEL DATA [-o RUN | --colour]") == ["--colour"]


NEEDS = {"train.step_in_backward=true": ("train.clip=null",)}
"""Settings that the text names with others that they need."""


def test_settings_that_are_named_exist() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in TEXTS)
    named = {shlex.split(each)[0] for each in re.findall(r"--set ('[^']+'|[\w.]+=[^\s`\]]+)", text)}
    named |= {
        "=".join(pair)
        for pair in re.findall(r"`((?:data|train|eval|techniques|lora)(?:\.\w+)+)=([^`]+)`", text)
    }
    named = {each for each in named if not each.endswith("NAME=VALUE")}
    assert len(named) > 10
    for each in sorted(named):
        load_config(
            techniques=TECHNIQUES,
            data_settings=DataSettings,
            flags={"model": "MODEL", "data.source": "DATA"},
            sets=[each, *NEEDS.get(each, ())],
        )


def test_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = {
        target
        for file in TEXTS
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", file.read_text(encoding="utf-8"), re.M)
    }
    assert {"demo", "test", "check", "docs", "gpu"} <= named
    assert named <= targets


def test_files_that_are_linked_exist() -> None:
    made = {ROOT / f"docs/techniques/{name}.md" for name in ("index", "pairs", *TECHNIQUES)}
    for file in TEXTS:
        for link in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
            found = (file.parent / link).resolve()
            assert link.startswith("https://") or found in made or found.exists(), f"{file}: {link}"


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    model = save_model(tmp_path / "model", tiny_llama(), byte_tokenizer())
    rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(20)]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    source = source.replace('"smollm2-135m"', repr(str(model))).replace("steps=200", "steps=2")
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["run"].steps == 2
    assert (tmp_path / "runs/calls-001/adapter/adapter_model.safetensors").exists()
    trained, loaded = names["edit"].trainable(), names["tuned"].trainable()
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)


def test_the_examples_of_the_python_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", tiny_llama(), byte_tokenizer())
    monkeypatch.chdir(tmp_path)
    for run in ("calls", "chat"):
        made = afina.apply(tiny_llama(), [afina.LoRA(rank=2)], seed=1)
        files.save(made, tmp_path / "runs" / run / "adapter", base="tiny")
    names: dict[str, Any] = {"chat_prompt": "hello"}
    for source in blocks("python", "docs/python.md"):
        exec(source.replace('"smollm2-135m"', repr(str(model))), names)
        if "runs/chat/adapter" in source:
            names["chat"].undo()  # the page goes on with the base
    assert len(names["answers"]) == 2
    assert names["scores"].n == 1
    assert names["scores"].counts["accuracy"] == 1
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    assert names["edit"].trainable()


def test_the_row_of_the_readme_is_a_row() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = json.loads(re.findall(r"`(\{\"prompt\".*?\})`", text)[0])
    assert json.loads(row["completion"]) == {"call": "lights_off"}
