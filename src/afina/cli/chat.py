"""`afina chat`: talk with a run or a model, also beside its base."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from afina.cli.common import Messages
from afina.cli.loading import (
    AllowPartial,
    Device,
    Dtype,
    Loaded,
    Name,
    Offline,
    Plain,
    Revision,
    Source,
    Token,
    is_plain,
    load_source,
)
from afina.cli.several import Further
from afina.errors import AfinaError, ModelError

EXAMPLES = (
    "afina chat runs/calls-001",
    "afina chat runs/calls-001 --beside-base",
    "afina chat runs/calls-001:0.7 --adapter runs/chat-001:0.3",
    'afina chat smollm2-135m --system "Answer in Portuguese." --temperature 0.7 --seed 1',
    "echo 'book a table for two' | afina chat runs/calls-001",
)

HELP = "/reset forgets the conversation · /system TEXT sets the system prompt · /exit leaves"


def command(
    name: Name,
    system: Annotated[str | None, typer.Option(help="system prompt")] = None,
    beside_base: Annotated[
        bool, typer.Option("--beside-base", help="show the base's answer too")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 512,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token, always")] = 0.0,
    top_p: Annotated[float, typer.Option(help="sample within this much probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="sample among this many tokens; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="a text that ends an answer")] = None,
    plain: Plain = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    token: Token = None,
    offline: Offline = False,
    allow_partial: AllowPartial = False,
    adapter: Further = None,
) -> None:
    """Talk with a run or a model.

    The whole conversation is sent each time. Ctrl-C stops an answer and keeps the chat; /exit or Ctrl-D ends it. When
    the input is a file or a pipe, each of its lines is one message.
    """
    from afina.config import GenerateSettings, build

    settings = build(
        GenerateSettings,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "system": system,
            "stop": tuple(stop or ()),
        },
    )
    source = Source(
        name, dtype, device, revision, token, offline, allow_partial, tuple(adapter or ())
    )
    loaded = load_source(source, with_base=beside_base)
    without = is_plain(loaded, plain)
    chat = Chat(loaded, settings, plain=without, beside_base=beside_base)
    talk(chat, sys.stdout.write)


@dataclass
class Chat:
    """A conversation, or two that are asked the same: with the tuned model and with its base.

    Attributes:
        loaded: who answers.
        settings: how; `settings.system` is the system prompt.
        plain: each message is sent as it is, without what was said before.
        beside_base: the base answers too, in a conversation of its own.
        turns: what was said, by who answered ("tuned", and "base").
        asked: messages answered.
    """

    loaded: Loaded
    settings: Any
    plain: bool = False
    beside_base: bool = False
    turns: dict[str, Messages] = field(default_factory=dict)
    asked: int = 0

    def reset(self, system: str | None = None) -> None:
        """Forgets what was said; with `system`, under a new system prompt."""
        self.turns.clear()
        self.asked = 0
        if system is not None:
            self.settings = self.settings.model_copy(update={"system": system})

    def ask(self, text: str, write: Callable[[str], Any]) -> None:
        """Asks everyone, writes the answers as they come, and remembers them.

        An interrupt stops the answer that is being given; what was said of it is remembered.

        Raises:
            AfinaError: the message cannot be answered; the conversation is then as before.
        """
        before = dict(self.turns)
        try:
            if self.beside_base:
                with self.loaded.base() as base:
                    write("base:  ")
                    self._answer("base", base, text, write)
                write("tuned: ")
            self._answer("tuned", self.loaded.model, text, write)
        except AfinaError:
            self.turns = before
            raise
        self.asked += 1

    def _answer(self, speaker: str, model: Any, text: str, write: Callable[[str], Any]) -> None:
        from afina.models.answerable import ContextFull
        from afina.models.generate import stream

        messages = [*self.turns.get(speaker, []), {"role": "user", "content": text}]
        # Each message draws anew, and the same conversation draws the same.
        settings = self.settings.model_copy(update={"seed": self.settings.seed + self.asked})
        prompt = text if self.plain else messages
        pieces = stream(model, self.loaded.tokenizer, prompt, settings)
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            write(" [stopped]")
        except ContextFull as error:
            if self.plain or len(messages) == 1:
                raise
            raise ModelError(
                "the conversation fills the model's whole context",
                got=error.got,
                wanted=error.wanted,
                cure="/reset forgets the conversation",
            ) from error
        finally:
            pieces.close()
        write("\n")
        self.turns[speaker] = [*messages, {"role": "assistant", "content": answer}]


def talk(chat: Chat, write: Callable[[str], Any]) -> None:
    """Reads messages and commands until the input ends or /exit.

    In a terminal an error ends a message and not the chat; in a pipe it ends the verb, whose status then tells.
    """
    live = sys.stdin.isatty()
    if live:
        write(f"{HELP}\n")
    for line in _lines(live, write):
        if not line:
            continue
        if _is_command(line):
            if not _obey(chat, line, write):
                return
            continue
        try:
            chat.ask(line, write)
        except AfinaError as error:
            if not live:
                raise
            write(f"{error}\n")


def _lines(live: bool, write: Callable[[str], Any]) -> Iterator[str]:
    """Messages, stripped: typed at a prompt, or the lines of the input."""
    if not live:
        yield from (line.strip() for line in sys.stdin)
        return
    _enable_editing()
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n/exit or Ctrl-D leaves\n")


def _enable_editing() -> None:
    """Arrow keys and history at the prompt, on systems that have them."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it is what enables it)


def _is_command(line: str) -> bool:
    """A slash and one word made of letters; a path such as /etc/hosts is a message."""
    word = line.split(maxsplit=1)[0]
    return word[0] == "/" and word[1:].isalpha()


def _obey(chat: Chat, line: str, write: Callable[[str], Any]) -> bool:
    """Does what a command says; False to leave."""
    word, _, rest = line.partition(" ")
    if word == "/exit":
        return False
    if word == "/reset":
        chat.reset()
        write("(forgotten)\n")
    elif word == "/system" and rest.strip():
        chat.reset(rest.strip())
        write("(new system prompt, new conversation)\n")
    elif word == "/system":
        write(f"{chat.settings.system or '(no system prompt)'}\n")
    else:
        write(f"{HELP}\n")
    return True
