"""`afina chat`: history, commands, both answers side by side, and an interrupt that stops an answer only."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import afina
from afina import cli
from afina.cli.chat import Chat, talk
from afina.cli.common import Target
from afina.cli.loading import Loaded, Source
from afina.config import GenerateSettings
from afina.errors import ModelError
from tests.tiny import byte_tokenizer, save_model, save_run, says, tiny_llama

HERE = ["--device", "cpu", "--dtype", "fp32"]
SHORT = ["--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tiny_llama(), byte_tokenizer())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "run", model)


def said(
    words: list[str], lines: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What a chat writes for piped lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert cli.main(["chat", *words, *HERE]) == 0
    return capsys.readouterr().out.splitlines()


class Asked:
    """Stands for the model: remembers what it was sent, and answers "to " and the last message."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.settings: list[GenerateSettings] = []
        self.interrupt_after: int | None = None

    def __call__(
        self, model: Any, tokenizer: Any, prompt: Any, settings: GenerateSettings
    ) -> Iterator[str]:
        self.prompts.append(prompt)
        self.settings.append(settings)
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        for number, piece in enumerate(["to ", text]):
            if number == self.interrupt_after:
                raise KeyboardInterrupt
            yield piece


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    monkeypatch.setattr("afina.models.generate.stream", stand_in)
    return stand_in


def chat(**changes: Any) -> Chat:
    loaded = Loaded(Source("m"), Target("m"), None, byte_tokenizer())
    return Chat(loaded, GenerateSettings(system="sys"), **changes)


def piped(lines: str, monkeypatch: pytest.MonkeyPatch, one: Chat) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    out = io.StringIO()
    talk(one, out.write)
    return out.getvalue()


def test_a_pipe_is_answered_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()
    base = save_model(tmp_path / "m", says(tokenizer, "oké"), tokenizer)
    assert said([str(base)], "hello\n\nagain\n", monkeypatch, capsys) == ["oké", "oké"]


def test_the_answers_are_those_of_generate_with_the_whole_conversation(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--system", "s", "--temperature", "0.8", "--seed", "3", *SHORT]
    got = said([str(run), *flags], "one\ntwo\n", monkeypatch, capsys)
    loaded, tokenizer = afina.load(model, dtype="fp32", device="cpu")
    afina.load_adapter(loaded, run / "adapter")
    messages: list[dict[str, str]] = []
    expected = ""
    for turn, text in enumerate(["one", "two"]):
        messages.append({"role": "user", "content": text})
        settings = GenerateSettings(system="s", temperature=0.8, seed=3 + turn, max_new_tokens=8)
        answer = afina.generate(loaded, tokenizer, [messages], settings)[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert got == expected.splitlines()


def test_base_and_tuned_stand_side_by_side(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = said([str(run), "--beside-base", *SHORT], "one\n", monkeypatch, capsys)
    of_base = said([str(model), *SHORT], "one\n", monkeypatch, capsys)
    of_run = said([str(run), *SHORT], "one\n", monkeypatch, capsys)
    text = "\n".join(both)
    assert text == "base:  " + "\n".join(of_base) + "\ntuned: " + "\n".join(of_run)
    assert of_base != of_run


def test_a_model_alone_has_no_base(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", str(model), "--beside-base", *HERE]) == 2
    assert "no base to compare with" in capsys.readouterr().err


def test_a_run_of_full_fine_tuning_is_compared_with_the_model_it_began_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tokenizer = byte_tokenizer()
    save_model(tmp_path / "run" / "model", says(tokenizer, "yes"), tokenizer)
    config = f"model: {model}\ndata: {{source: t.jsonl}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config, encoding="utf-8")
    both = said([str(tmp_path / "run"), "--beside-base", *SHORT], "one\n", monkeypatch, capsys)
    of_base = said([str(model), *SHORT], "one\n", monkeypatch, capsys)
    assert "\n".join(both) == "base:  " + "\n".join(of_base) + "\ntuned: yes"


def test_what_was_said_is_sent_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped("a\nb\n", monkeypatch, chat()) == "to a\nto b\n"
    assert asked.prompts[1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "to a"},
        {"role": "user", "content": "b"},
    ]
    assert [settings.seed for settings in asked.settings] == [0, 1]


def test_reset_forgets_and_starts_the_draws_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("a\n/reset\nb\n", monkeypatch, chat())
    assert asked.prompts[1] == [{"role": "user", "content": "b"}]
    assert [settings.seed for settings in asked.settings] == [0, 0]


def test_system_shows_and_sets(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = piped("/system\na\n/system be kind \nb\n", monkeypatch, chat())
    assert shown.startswith("sys\n")
    assert [settings.system for settings in asked.settings] == ["sys", "be kind"]
    assert asked.prompts[1] == [{"role": "user", "content": "b"}]


def test_exit_leaves_and_other_words_explain(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = piped("/what\n/etc/hosts is what?\n/exit\nnever\n", monkeypatch, chat())
    assert "/reset" in shown.splitlines()[0]
    assert asked.prompts == [[{"role": "user", "content": "/etc/hosts is what?"}]]


def test_without_a_template_each_message_goes_alone(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped("a\nb\n", monkeypatch, chat(plain=True))
    assert asked.prompts == ["a", "b"]


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = chat()
    asked.interrupt_after = 1
    assert piped("a\n", monkeypatch, one) == "to  [stopped]\n"
    asked.interrupt_after = None
    assert piped("b\n", monkeypatch, one) == "to b\n"
    assert asked.prompts[1][1] == {"role": "assistant", "content": "to "}


def typed(lines: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the standard input a terminal where these are typed, or these keys pressed."""
    keys = iter(lines)

    def read(prompt: str) -> str:
        key = next(keys)
        if not isinstance(key, str):
            raise key
        return key

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(builtins, "input", read)


def test_keys_of_a_terminal(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(["a", KeyboardInterrupt, "b", EOFError], monkeypatch)
    out = io.StringIO()
    talk(chat(), out.write)
    assert [prompt[-1]["content"] for prompt in asked.prompts] == ["a", "b"]
    assert out.getvalue().splitlines()[1:] == ["to a", "", "/exit or Ctrl-D leaves", "to b", ""]


def failing(answers: list[str]) -> Callable[..., Iterator[str]]:
    def stream(model: Any, tokenizer: Any, prompt: Any, settings: Any) -> Iterator[str]:
        if prompt[-1]["content"] == "too long":
            raise ModelError("prompt 1 fills the context")
        answers.append(prompt[-1]["content"])
        yield "fine"

    return stream


def test_an_error_ends_a_message_in_a_terminal_and_the_verb_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []
    monkeypatch.setattr("afina.models.generate.stream", failing(answers))
    typed(["a", "too long", "b", "/exit"], monkeypatch)
    one, out = chat(), io.StringIO()
    talk(one, out.write)
    assert answers == ["a", "b"]
    assert "fills the context" in out.getvalue()
    assert [turn["content"] for turn in one.turns["tuned"]] == ["a", "fine", "b", "fine"]
    with pytest.raises(ModelError):
        piped("too long\n", monkeypatch, one)


def test_a_conversation_that_fills_the_context_is_to_be_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 256 tokens; each turn takes its marks and its text."""
    tokenizer = byte_tokenizer()
    base = save_model(tmp_path / "m", says(tokenizer, "ok"), tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 150 + "\n" + "b" * 150 + "\n"))
    assert cli.main(["chat", str(base), *HERE]) == 4
    shown = capsys.readouterr()
    assert shown.out == "ok\n"
    assert "the conversation fills the model's whole context" in shown.err
    assert "cure:   /reset forgets the conversation" in shown.err
    # What helps then helps, and one message alone that is too long is not blamed on those before it.
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("a" * 150 + "\n/reset\n" + "b" * 150 + "\n/reset\n" + "c" * 300)
    )
    assert cli.main(["chat", str(base), *HERE]) == 4
    shown = capsys.readouterr()
    assert shown.out == "ok\n(forgotten)\nok\n(forgotten)\n"
    assert "the prompt fills the model's whole context" in shown.err
    assert "shorten the prompt" in shown.err
