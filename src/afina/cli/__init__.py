"""The command line: `afina VERB …`. A verb's file is imported when the verb is called, and not before.

`afina --help` and `--version` are answered from this file alone, since torch, transformers, pydantic and typer take
seconds to import. A verb is a module with a function `command` (or a typer app `app`, when it has verbs of its own)
and, if it likes, `EXAMPLES`, a tuple of lines that its help shows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar

VERBS: dict[str, tuple[str, str]] = {
    "check": ("afina.cli.check", "look at what would go wrong in a run, before it is made"),
    "plan": ("afina.cli.plan", "say what each of several processes would hold, send and wait for"),
    "train": ("afina.cli.train", "adapt a model to data, into a run folder"),
    "eval": ("afina.cli.eval", "measure a run or a model on data"),
    "chat": ("afina.cli.chat", "talk with a run or a model"),
    "generate": ("afina.cli.generate", "answer a file of prompts"),
    "merge": ("afina.cli.merge", "make one model of an adapter and its base, and check it"),
    "combine": ("afina.cli.combine", "add, subtract and mix adapters of one base into one"),
    "resize": ("afina.cli.resize", "make an adapter smaller, and say what that costs"),
    "extract": ("afina.cli.extract", "make an adapter of the difference of two models"),
    "inspect": ("afina.cli.inspect", "show what is in an adapter, and what is strange about it"),
    "models": ("afina.cli.models", "list, get and remove models of the cache"),
    "techniques": ("afina.cli.techniques", "list the techniques and their settings"),
    "config-schema": (
        "afina.cli.config_schema",
        "write the JSON schema of a run.yaml, for editors",
    ),
    "env": ("afina.cli.env", "show versions, devices and what this machine is good at"),
}
"""Verb -> the module that does it, and what it does."""

EXAMPLES = (
    "afina models get smollm2-135m",
    "afina check smollm2-135m calls.jsonl --show 3",
    "afina train smollm2-135m calls.jsonl -o runs/calls-001",
    "afina eval runs/calls-001 test.jsonl",
    "afina chat runs/calls-001",
)

INTERRUPTED = 130
PIPE_CLOSED = 141
"""What a shell shows of a program that SIGPIPE ended."""

USAGE = 2

WORDS: ContextVar[Sequence[str]] = ContextVar("WORDS")
"""The command line that is being done, for a verb that starts it again in several processes."""


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status.

    Args:
        words: the command line after `afina`; None takes this process's.

    Returns:
        0 done; 2 wrong usage or settings; 3 data, 4 model, 5 technique, 6 adapter, 7 run (the kinds of `AfinaError`);
        130 interrupted; 141 nobody reads the output on. Any other exception is a defect of afina, and passes with its
        traceback.
    """
    words = list(sys.argv[1:] if words is None else words)
    try:
        status = _answer(words)
        sys.stdout.flush()  # what is left in the buffer may meet a closed pipe too
    except BrokenPipeError:
        return _pipe_closed()
    return status


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"afina {_version()}")
        return 0
    if words[0] not in VERBS:
        return _no_such_verb(words[0])
    from afina.errors import AfinaError

    try:
        return _call(words[0], words[1:])
    except AfinaError as error:
        print(f"{_red('error')}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _pipe_closed() -> int:
    """Nobody reads on, as in `afina … | head`: no fault of anyone's, and nothing to say.

    The standard output goes nowhere from here, or Python would complain when it flushes at its end.
    """
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # a test's or a notebook's, which is no file
        pass
    finally:
        os.close(nowhere)
    return PIPE_CLOSED


def overview() -> str:
    """What `afina --help` shows."""
    width = max(map(len, VERBS))
    return "\n".join(
        [
            "usage: afina VERB …        afina VERB --help shows a verb's options",
            "",
            "Adapt Transformer models with a fraction of the cost of full fine-tuning.",
            "",
            "verbs:",
            *(f"  {verb:<{width}}  {what}" for verb, (_, what) in VERBS.items()),
            "",
            "options:",
            "  -h, --help  show this",
            "  --version   show afina's version",
            "",
            "examples:",
            *(f"  {line}" for line in EXAMPLES),
        ]
    )


def _call(verb: str, words: Sequence[str]) -> int:
    import importlib
    import inspect

    import typer

    module = importlib.import_module(VERBS[verb][0])
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich would take [lora: {rank: 8}] for a style, and swallow it
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # so that a single verb keeps its name
    examples = _examples(getattr(module, "EXAMPLES", ()))
    if hasattr(module, "app"):
        text = module.app.info.help or VERBS[verb][1]
        app.add_typer(module.app, name=verb, help=inspect.cleandoc(text) + examples)
    else:
        text = module.command.__doc__ or VERBS[verb][1]
        app.command(name=verb, help=inspect.cleandoc(text) + examples)(module.command)
    shown = sys.stdout
    WORDS.set((verb, *words))
    try:
        app([verb, *words], prog_name="afina")
    except SystemExit as end:
        if (
            sys.stdout is not shown
        ):  # typer met a closed pipe, and put a stream that is silent in its place
            sys.stdout = shown
            return _pipe_closed()
        if end.code == INTERRUPTED:  # typer makes that of a KeyboardInterrupt, and says nothing
            print("interrupted", file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _examples(lines: Sequence[str]) -> str:
    # \b keeps typer from joining the lines into one paragraph.
    return "\n\n\b\nexamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _no_such_verb(word: str) -> int:
    from afina.errors import nearest

    near = nearest(word, list(VERBS), most=1)
    print(f"{_red('error')}: there is no verb {word!r}", file=sys.stderr)
    print(f"  wanted: {', '.join(VERBS)}", file=sys.stderr)
    if near:
        print(f"  cure:   afina {near[0]} …", file=sys.stderr)
    return USAGE


def _red(word: str) -> str:
    import os

    return (
        f"\033[31m{word}\033[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else word
    )


def _version() -> str:
    from importlib.metadata import version

    return version("afina")
