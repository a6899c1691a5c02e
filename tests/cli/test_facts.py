"""`afina techniques` and `afina env`: what they say is what is there."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field

from afina.cli import main
from afina.cli.techniques import describe
from afina.config import Settings
from afina.table import TECHNIQUES


class Shrink(Settings):
    """Make it smaller,
    in one sentence.

    And a second paragraph.
    """

    keep: float = Field(gt=0, description="the share that stays")
    where: tuple[str, ...] = ("all",)
    how: int | str | None = None


def test_a_technique_is_described_by_its_class() -> None:
    assert describe({"shrink": Shrink}) == [
        {
            "key": "shrink",
            "class": "Shrink",
            "summary": "Make it smaller, in one sentence.",
            "settings": [
                {"name": "keep", "type": "number", "description": "the share that stays"},
                {"name": "where", "type": "list of string", "default": ["all"], "description": ""},
                {"name": "how", "type": "integer | string | null", "default": None, "description": ""},
            ],
        }
    ]  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line prints, when all is well."""
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_whole_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed: list[dict[str, Any]] = json.loads(answer(capsys, "techniques", "--json"))
    assert [one["key"] for one in listed] == list(TECHNIQUES)
    assert [one["class"] for one in listed] == [kind.__name__ for kind in TECHNIQUES.values()]
    for one, kind in zip(listed, TECHNIQUES.values(), strict=True):
        assert [setting["name"] for setting in one["settings"]] == list(kind.model_fields)
        assert one["summary"].endswith(".")
        assert "\n" not in one["summary"]
    plain = answer(capsys, "techniques").splitlines()
    assert [line.split()[0] for line in plain] == list(TECHNIQUES)


def test_one_technique_is_shown_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in answer(capsys, "techniques", "lora").splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["rank"], ["alpha"], ["dropout"])] == [
        ["rank", "16"],
        ["alpha", "32.0"],
        ["dropout", "0.0"],
    ]


def test_an_unknown_technique_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["techniques", "lorra"]) == 2
    assert "did you mean lora or dora or adalora?" in capsys.readouterr().err


def test_env_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AFINA_CACHE", str(tmp_path))
    found: dict[str, Any] = json.loads(answer(capsys, "env", "--json"))
    assert found["versions"]["torch"] == version("torch")
    assert found["python"] == platform.python_version()
    assert found["devices"][0] == "cpu"
    assert found["threads"] == torch.get_num_threads()
    assert found["cache"] == str(tmp_path)
    assert found["variables"]["AFINA_CACHE"] == str(tmp_path)
    assert set(found["precision"]) == {"base", "compute", "reason"}


def test_env_as_text_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(answer(capsys, "env", "--json"))
    lines = dict(line.split(maxsplit=1) for line in answer(capsys, "env").splitlines())
    assert lines["torch"] == found["versions"]["torch"]
    assert lines["precision"].endswith(found["precision"]["reason"])
    assert lines["cache"] == found["cache"]


def test_a_package_that_is_missing_is_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afina.cli.env.PACKAGES", ("no-such-package-at-all",))
    assert "no-such-package-at-all  not installed" in answer(capsys, "env")
