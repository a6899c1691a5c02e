"""A row as text, with what trains in it marked: by colour in a terminal, by [[ ]] elsewhere.

Each token is shown as what it adds to the text. A character that takes several tokens is shown with its last one or,
where only some of them train, as the bytes of each.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Literal

from rich.text import Text

from afina.train.preflight import place
from afina.types import Row

Kind = Literal["trained", "trained special", "special", "context"]

STYLES: dict[str, str] = {
    "trained": "bold black on green",
    "trained special": "bold white on dark_green",
    "special": "magenta",
    "context": "dim",
}

OPEN, CLOSE = "[[", "]]"
"""Around what trains, where there is no colour."""

MOST_PIECES = 4
"""Tokens that one character can take: UTF-8 has at most four bytes."""

BEFORE = 8
"""Tokens decoded before a piece, since what a token adds depends on what is before it."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def legend(*, colour: bool) -> Text:
    """What the marks mean."""
    if not colour:
        return Text(f"{OPEN}trained{CLOSE}, the rest is context")
    names = [(f" {kind} ", style) for kind, style in STYLES.items()]
    return Text.assemble(*(part for name in names for part in (name, " ")))


def shown(row: Row, tokenizer: Any, *, colour: bool) -> Text:
    """A row with its marks, under a line that says where it came from."""
    head = f"\n{place(row)}: {row.trained_tokens} of {len(row.tokens)} tokens trained\n"
    text = Text(head, style="bold" if colour else "")
    parts = marked(row, tokenizer)
    if colour:
        for kind, piece in parts:
            text.append(piece, STYLES[kind])
        return text
    for trained, group in groupby(parts, lambda part: part[0].startswith("trained")):
        inside = "".join(piece for _, piece in group)
        text.append(f"{OPEN}{inside}{CLOSE}" if trained else inside)
    return text


def marked(row: Row, tokenizer: Any) -> list[tuple[Kind, str]]:
    """The row's text in pieces, each with its kind; joined they are the whole text, made safe to print."""
    special = set(tokenizer.all_special_ids)
    special |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds: list[Kind] = [
        _kind(trained, id in special) for id, trained in zip(row.tokens, row.trained, strict=True)
    ]
    parts: list[tuple[Kind, str]] = []
    for start, end, text in pieces(tokenizer, row.tokens):
        if len(set(kinds[start:end])) == 1:
            parts.append((kinds[start], safe(text)))
        else:
            for at in range(start, end):
                parts.append((kinds[at], _bytes(tokenizer, row.tokens[at])))
    return parts


def _kind(trained: bool, special: bool) -> Kind:
    if trained:
        return "trained special" if special else "trained"
    return "special" if special else "context"


def pieces(tokenizer: Any, tokens: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """(start, end, text): what the tokens [start, end) add to the text; several where a character is cut."""
    starts, start = [0], 0
    for end in range(1, len(tokens) + 1):
        anchor = starts[max(0, len(starts) - BEFORE)]
        before = _decode(tokenizer, tokens[anchor:start])
        text = _decode(tokenizer, tokens[anchor:end])[len(before) :]
        whole = not text.endswith("\ufffd") or end - start == MOST_PIECES
        if whole or end == len(tokens):
            yield start, end, text
            start = end
            starts.append(start)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


def _bytes(tokenizer: Any, token: int) -> str:
    """A token that is a part of a character, as its bytes: ⟨c3⟩."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    by_name = _BYTE.fullmatch(name)
    if by_name:
        return f"⟨{by_name[1].lower()}⟩"
    known = byte_of()
    if all(letter in known for letter in name):
        return f"⟨{bytes(known[letter] for letter in name).hex(' ')}⟩"
    return safe(name)


@cache
def byte_of() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies: printable bytes stand for themselves, the others from U+0100 on.

    Source: the mapping of GPT-2's `encoder.py`, which every byte-level tokenizer has taken over.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def safe(text: str) -> str:
    """The text with characters that would steer a terminal, or hide in it, written as escapes."""
    return "".join(map(_safe, text))


def _safe(letter: str) -> str:
    if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf"):
        return letter
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"
