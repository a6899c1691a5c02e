"""The command line as a whole: what is imported when, exit statuses, and how errors look."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent
from types import ModuleType
from typing import Annotated

import pytest
import typer

from afina import cli
from afina.errors import (
    AdapterError,
    ConfigError,
    DataError,
    ModelError,
    RunError,
    TechniqueError,
)

HEAVY = ("torch", "transformers", "datasets", "pydantic", "typer", "rich", "yaml")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, in which nothing is imported yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def imported_by(words: list[str], modules: tuple[str, ...]) -> list[str]:
    """Which of the modules a command line imports; the last line of what it prints."""
    done = python(
        f"import sys; from afina.cli import main; main({words!r}); "
        f"print(*[m for m in {modules!r} if m in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["--version"]])
def test_the_overview_imports_nothing_heavy(words: list[str]) -> None:
    assert imported_by(words, HEAVY) == []


def test_a_verb_imports_what_it_needs() -> None:
    """The control: the same question sees torch where a verb reads the table."""
    assert {"torch", "pydantic", "typer"} <= set(imported_by(["techniques"], HEAVY))


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [
        line.split()[0]
        for line in lines[lines.index("verbs:") + 1 : lines.index("options:")]
        if line
    ]
    assert listed == list(cli.VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"afina {version('afina')}\n"


def test_an_unknown_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evl"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: there is no verb 'evl'\n")
    assert said.err.endswith("  cure:   afina eval …\n")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb of our own, `probe`, in a module to be filled."""
    module = ModuleType("afina_probe_verb")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "probe", (module.__name__, "probe the command line"))
    return module


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (DataError, 3), (ModelError, 4), (TechniqueError, 5), (AdapterError, 6), (RunError, 7)],
)  # fmt: skip
def test_an_error_of_ours_is_text_and_a_status(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], kind: type[Exception], code: int
) -> None:
    def command() -> None:
        raise kind("it will not do", got=1, wanted=2, cure="try 2")  # type: ignore[call-arg]

    verb.command = command  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "error: it will not do",
        "  got:    1",
        "  wanted: 2",
        "  cure:   try 2",
    ]


def test_an_error_that_is_not_ours_keeps_its_traceback(verb: ModuleType) -> None:
    def command() -> None:
        raise ZeroDivisionError("a defect")

    verb.command = command  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError, match="a defect"):
        cli.main(["probe"])


def test_an_interrupt_is_130(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise KeyboardInterrupt

    verb.command = command  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_interrupt_while_importing_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> ModuleType:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert cli.main(["techniques"]) == 130


def test_a_verb_may_choose_its_status(verb: ModuleType) -> None:
    def command(code: int) -> None:
        raise typer.Exit(code)

    verb.command = command  # type: ignore[attr-defined]
    assert [cli.main(["probe", str(code)]) for code in (0, 1, 9)] == [0, 1, 9]


@pytest.mark.parametrize("words", [["--nope"], ["1", "2"], ["x"], []])
def test_wrong_usage_is_2(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def command(number: int) -> None:
        raise AssertionError("must not be called")

    verb.command = command  # type: ignore[attr-defined]
    assert cli.main(["probe", *words]) == 2
    assert "Usage: afina probe" in capsys.readouterr().err


def test_help_shows_text_examples_and_brackets(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(at: Annotated[str, typer.Option(help="like [low: {rank: 8}]")] = "") -> None:
        """Probe it."""

    verb.command = command  # type: ignore[attr-defined]
    verb.EXAMPLES = ("afina probe --at a", "afina probe --at b")  # type: ignore[attr-defined]
    assert cli.main(["probe", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:7] == [
        "Usage: afina probe [OPTIONS]",
        "",
        "Probe it.",
        "",
        "examples:",
        "afina probe --at a",
        "afina probe --at b",
    ]
    assert any("like [low: {rank: 8}]" in line for line in lines)


def test_a_verb_may_have_verbs(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command("get")
    def _get(name: str) -> None:
        """Fetch one."""
        print(f"got {name}")

    @app.command("rm")
    def _rm() -> None:
        """Remove one."""
        raise ModelError("nothing there")

    verb.app = app  # type: ignore[attr-defined]
    assert cli.main(["probe", "get", "x"]) == 0
    assert cli.main(["probe", "rm"]) == 4
    assert cli.main(["probe", "-h"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("got x\nUsage: afina probe [OPTIONS] COMMAND [ARGS]...")
    assert "probe the command line" in said.out
    assert said.err == "error: nothing there\n"


@pytest.mark.parametrize("verb_name", list(cli.VERBS))
def test_every_verb_has_help_with_examples(
    verb_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb_name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: afina {verb_name}" in shown
    assert f"afina {verb_name} " in shown.split("\n", 1)[1], "an example is a line to copy"


@pytest.mark.parametrize("words", [["--help"], ["techniques"], ["models", "list", "--json"]])
def test_a_closed_pipe_ends_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `afina … | head` when head has read enough
    done = subprocess.run(
        [sys.executable, "-m", "afina.cli", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["no-such-verb"], 2)])
@pytest.mark.parametrize("processes", ["", "1", "2"])
def test_one_of_several_processes_does_not_take_the_interpreter_down(
    processes: str, words: list[str], status: int
) -> None:
    """What is to be done at exit is done, all is said, and the status is that of `main`."""
    lines = """
    import atexit, runpy, sys
    class Last:
        def __del__(self, write=sys.__stderr__.write): write("taken down")
    last = Last()
    atexit.register(print, "at exit")
    runpy.run_module("afina.cli", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(lines), *words],
        env={**os.environ, "WORLD_SIZE": processes},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert done.stdout.endswith("at exit\n")
    assert ("afina" in done.stdout) == (status == 0)
    assert ("taken down" in done.stderr) == (processes != "2")
