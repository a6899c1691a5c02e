"""Rows on their way from examples to tokens: what every family of formats gives."""

from __future__ import annotations

from dataclasses import dataclass

from afina.data.example import Example
from afina.data.masks import Masked


@dataclass(frozen=True)
class Draft:
    """Rows before any is cut or dropped, with what differs between chats, plain texts and classes.

    `examples[i]` is what `masked[i]` was made of; `turns[i]` are the message numbers of its trained turns, beside
    `masked[i].starts`.
    """

    examples: list[Example]
    masked: list[Masked]
    turns: list[tuple[int, ...]]
    template: str
    stop: str
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
