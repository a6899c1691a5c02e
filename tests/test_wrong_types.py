"""The public functions given what they do not take: an error of ours that says what they do, and how to get it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import afina
from afina.errors import AfinaError
from afina.types import ROLES
from tests.tiny import byte_tokenizer, tiny_llama

ROWS = [{"prompt": "a", "completion": "b"}]
Call = Callable[[Any, Any], Any]


def generate(model: Any, tokenizer: Any, message: dict[str, Any]) -> Any:
    """An answer to a conversation whose second message is this one."""
    return afina.generate(model, tokenizer, [[{"role": "system", "content": "s"}, message]])


CALLS: dict[str, tuple[Call, str]] = {
    "load nothing": (lambda m, t: afina.load(None), "the model needs a name"),
    "load a number": (lambda m, t: afina.load(5), "the model needs a name"),
    "load bytes": (lambda m, t: afina.load(b"model"), "the model needs a name"),
    "load an empty name": (lambda m, t: afina.load(""), "the model needs a name"),
    "load a model": (lambda m, t: afina.load(m), "got:    LlamaForCausalLM"),
    "load on no device": (lambda m, t: afina.load("x", device=3.5), "unknown device"),
    "load on devices": (lambda m, t: afina.load("x", device=["cpu"]), "unknown device"),
    "load as a number": (lambda m, t: afina.load("x", dtype=8), "unknown dtype"),
    "load for no task": (lambda m, t: afina.load("x", task="chat"), "causal, encoder, class"),
    "load a text of classes": (lambda m, t: afina.load("x", num_labels="two"), "number of classes"),
    "load no classes": (lambda m, t: afina.load("x", num_labels=0), "wanted: 1 or more"),
    "load a number of a revision": (lambda m, t: afina.load("o/n", revision=2), "the revision"),
    "apply to nothing": (lambda m, t: afina.apply(None, [afina.LoRA()]), "this is no model"),
    "apply to a pair": (lambda m, t: afina.apply((m, t), [afina.LoRA()]), "take the pair apart"),
    "apply nothing": (lambda m, t: afina.apply(m, None), "not a list of techniques"),
    "apply a number": (lambda m, t: afina.apply(m, 5), "not a list of techniques"),
    "apply a word": (lambda m, t: afina.apply(m, "lora"), "not a list of techniques"),
    "apply one": (lambda m, t: afina.apply(m, afina.LoRA()), "not a list of techniques"),
    "apply a class": (lambda m, t: afina.apply(m, [afina.LoRA]), "not a list of techniques"),
    "apply with a word of a seed": (
        lambda m, t: afina.apply(m, [afina.LoRA(rank=2)], seed="0"),
        "a seed is a whole number",
    ),
    "evaluate with a number": (
        lambda m, t: afina.evaluate(m, t, ROWS, generate=5),
        "generate is to be called",
    ),
    "tell a number": (
        lambda m, t: afina.evaluate(m, t, ROWS, on_progress=5),
        "on_progress is to be called",
    ),
    "hand answers to a list": (
        lambda m, t: afina.generate(m, t, ["a"], on_answers=[]),
        "on_answers is to be called",
    ),
    "an adapter of nothing": (lambda m, t: afina.load_adapter(m, None), "the adapter needs a name"),
    "an adapter of a number": (lambda m, t: afina.load_adapter(m, 5), "the adapter needs a name"),
    "an adapter onto nothing": (lambda m, t: afina.load_adapter(None, "x"), "this is no model"),
    "an adapter onto a pair": (lambda m, t: afina.load_adapter((m, t), "x"), "take the pair apart"),
    "an adapter and a model": (lambda m, t: afina.load_adapter("x", m), "this is no model"),
    "merge nothing": (lambda m, t: afina.merge(None, "x"), "what is merged needs a name"),
    "merge a model": (lambda m, t: afina.merge(m, "x"), "in memory it is edit.merge()"),
    "merge into nothing": (lambda m, t: afina.merge("x", None), "the output needs a name"),
    "merge into an empty name": (lambda m, t: afina.merge("x", ""), "the output needs a name"),
    "generate with nothing": (lambda m, t: afina.generate(None, None, ["a"]), "are needed"),
    "generate, swapped": (lambda m, t: afina.generate(t, m, ["a"]), "in this order"),
    "generate with a name": (lambda m, t: afina.generate("m", t, ["a"]), "in this order"),
    "generate from nothing": (lambda m, t: afina.generate(m, t, None), "prompts are a list"),
    "generate from one text": (lambda m, t: afina.generate(m, t, "a"), "prompts are a list"),
    "generate from no prompt": (lambda m, t: afina.generate(m, t, [None]), "this is no prompt"),
    "generate by a dict": (lambda m, t: afina.generate(m, t, ["a"], {"seed": 1}), "Settings"),
    "a negative id": (lambda m, t: afina.generate(m, t, [[1, -1]]), "got:    id -1"),
    "a role that nobody has": (
        lambda m, t: generate(m, t, {"role": "usr", "content": "a"}),
        "message 1 has an unknown role\n  got:    'usr'\n  wanted: system, developer, user, assistant, tool, "
        "function\n  cure:   did you mean 'user'?",
    ),
    "a role of no kind": (
        lambda m, t: generate(m, t, {"role": "narrator", "content": "a"}),
        "say who speaks: user, or assistant?",
    ),
    "a role that is no text": (lambda m, t: generate(m, t, {"role": 5, "content": "a"}), "role 5"),
    "a message of nobody": (lambda m, t: generate(m, t, {"content": "a"}), "keys ['content']"),
    "a message of nothing": (lambda m, t: generate(m, t, {"role": "user"}), "has no content"),
    "a message of a number": (
        lambda m, t: generate(m, t, {"role": "user", "content": 5}),
        "message 1 (user) has content that is not text",
    ),
    "evaluate nothing": (lambda m, t: afina.evaluate(None, None, ROWS), "are needed"),
    "evaluate on nothing": (lambda m, t: afina.evaluate(m, t, None), "there are no rows in this"),
    "evaluate on numbers": (lambda m, t: afina.evaluate(m, t, [5]), "no mapping of columns"),
    "evaluate by a number": (lambda m, t: afina.evaluate(m, t, ROWS, 5), "these are no EvalSet"),
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_llama(hidden_size=8, intermediate_size=8, num_hidden_layers=1), byte_tokenizer()


@pytest.mark.parametrize("name", CALLS)
def test_it_is_said_and_nothing_is_written(
    name: str, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, says = CALLS[name]
    with pytest.raises(AfinaError) as caught:
        call(*pair)
    assert says in str(caught.value)
    assert caught.value.got is not None
    assert caught.value.wanted is not None or caught.value.cure is not None
    assert list(tmp_path.iterdir()) == []


def test_messages_of_every_known_role_are_answered(pair: tuple[Any, Any]) -> None:
    """Content may be left out beside the calls of tools."""
    settings = afina.GenerateSettings(max_new_tokens=1)
    said = [{"role": role, "content": "a"} for role in ROLES]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert len(afina.generate(*pair, [[*said, calls]], settings)) == 1
