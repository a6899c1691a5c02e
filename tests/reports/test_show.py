"""Rows shown with what trains in them: faithful to the last byte, and safe to print."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.dataset import prepare
from afina.data.settings import DataSettings
from afina.reports.show import byte_of, legend, marked, pieces, safe, shown
from afina.types import Row
from tests.data import kit
from tests.data.kit import metaspace_tokenizer, tokenizer_of
from tests.tiny import byte_tokenizer

BYTES = byte_tokenizer()
MERGED = tokenizer_of(kit.CHATML)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def joined(tokenizer: Any, tokens: list[int]) -> str:
    return "".join(text for _, _, text in pieces(tokenizer, tokens))


@given(st.text(max_size=30))
def test_the_pieces_joined_are_the_text(text: str) -> None:
    for tokenizer in (BYTES, MERGED):
        assert joined(tokenizer, ids(tokenizer, text)) == tokenizer.decode(ids(tokenizer, text))


@pytest.mark.parametrize("text", ["one two Paris.", "Paris", " one"])
def test_the_pieces_of_words_keep_their_spaces(text: str) -> None:
    """A word decoded alone has no space before it."""
    tokenizer = metaspace_tokenizer()
    assert joined(tokenizer, ids(tokenizer, text)) == tokenizer.decode(ids(tokenizer, text))


def test_every_token_is_in_one_piece_and_a_character_is_whole() -> None:
    tokens = ids(BYTES, "a€🎈b")
    found = list(pieces(BYTES, tokens))
    assert [(start, end) for start, end, _ in found] == [(0, 1), (1, 4), (4, 8), (8, 9)]
    assert [text for _, _, text in found] == ["a", "€", "🎈", "b"]


def test_half_a_character_at_the_end_is_shown_as_it_is_decoded() -> None:
    tokens = ids(BYTES, "a€")[:-1]
    assert [text for _, _, text in pieces(BYTES, tokens)] == ["a", "\ufffd"]


def row(tokenizer: Any, text: str, trained: str) -> Row:
    tokens = tuple(ids(tokenizer, text))
    return Row(tokens, tuple(mark == "1" for mark in trained), 0, "a.jsonl:1")


def test_a_character_of_which_a_part_trains_is_shown_as_bytes() -> None:
    parts = marked(row(BYTES, "x€", "0011"), BYTES)
    assert parts == [
        ("context", "x"),
        ("context", "⟨e2⟩"),
        ("trained", "⟨82⟩"),
        ("trained", "⟨ac⟩"),
    ]
    # The control: alike, it is a character.
    assert marked(row(BYTES, "x€", "0111"), BYTES) == [("context", "x"), ("trained", "€")]


def test_the_letters_of_byte_level_vocabularies_are_their_bytes() -> None:
    known = byte_of()
    assert sorted(known.values()) == list(range(256))
    assert (known["A"], known["Ġ"], known["Ċ"], known["Ã"]) == (0x41, 0x20, 0x0A, 0xC3)
    for byte in (0x00, 0x20, 0x7F, 0x80, 0xAD, 0xFF):
        letter = next(letter for letter, known_byte in known.items() if known_byte == byte)
        assert BYTES.convert_tokens_to_ids(letter) is not None


def test_kinds_are_trained_special_and_context() -> None:
    prepared = prepare([kit.turns("Hi", "Hello")], MERGED, DataSettings())
    kinds: dict[str, str] = {}
    for kind, text in marked(prepared.rows[0], MERGED):
        kinds[kind] = kinds.get(kind, "") + text
    assert kinds["trained"] == "Hello"
    assert kinds["trained special"] == "<|im_end|>"
    assert kinds["special"] == "<|im_start|><|im_end|>" * 2 + "<|im_start|>"
    assert "user\nHi" in kinds["context"]


def test_marks_surround_what_trains() -> None:
    prepared = prepare([kit.turns("Hi", "Hello", "And?", "Bye")], MERGED, DataSettings())
    said = shown(prepared.rows[0], MERGED, colour=False)
    text = said.plain
    assert text.startswith("\nrow:1: ")
    assert text.count("[[") == text.count("]]") == 2
    assert "assistant\n[[Hello<|im_end|>]]" in text
    assert "assistant\n[[Bye<|im_end|>]]" in text
    assert not said.spans
    whole = text.split("trained\n", 1)[1].replace("[[", "").replace("]]", "")
    assert whole == MERGED.decode(list(prepared.rows[0].tokens))


def test_colours_surround_what_trains() -> None:
    prepared = prepare([kit.turns("Hi", "Hello")], MERGED, DataSettings())
    text = shown(prepared.rows[0], MERGED, colour=True)
    assert "[[" not in text.plain
    green = [
        text.plain[span.start : span.end] for span in text.spans if "on green" in str(span.style)
    ]
    assert "".join(green) == "Hello"
    assert "trained" in legend(colour=True).plain
    assert "[[" in legend(colour=False).plain


def test_what_steers_a_terminal_is_escaped() -> None:
    assert safe("a\x1b[31mb\tc\nd\u202e") == "a\\x1b[31mb\tc\nd\\u202e"
    assert safe("ação 🎈 日本") == "ação 🎈 日本"
    prepared = prepare([kit.turns("Hi", "\x1b[2Jgone")], MERGED, DataSettings())
    assert "\x1b" not in shown(prepared.rows[0], MERGED, colour=False).plain
