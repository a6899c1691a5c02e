"""A row's parts, as evaluation needs them: its prompt, the answer wanted, and the row with another answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from afina.errors import DataError
from afina.types import Row


def prompt_text(row: Row, tokenizer: Any) -> str:
    """The prompt as the model sees it, special tokens left out."""
    return tokenizer.decode(row.tokens[: row.prompt_tokens], skip_special_tokens=True)


def reference_text(row: Row, tokenizer: Any) -> str | None:
    """The answer wanted: the row's `reference` column, else the text of its last trained stretch after the prompt.

    Returns:
        None when the row is not a prompt with an answer.
    """
    given = row.meta.get("reference")
    if isinstance(given, str):
        return given
    if row.prompt_tokens == 0 or row.prompt_tokens >= len(row.tokens):
        return None
    answer = [
        token
        for token, trained in zip(
            row.tokens[row.prompt_tokens :], row.trained[row.prompt_tokens :], strict=True
        )
        if trained
    ]
    return tokenizer.decode(answer, skip_special_tokens=True) if answer else None


def choices_of(row: Row, choices: Sequence[str]) -> tuple[str, ...]:
    """The answers to choose among: the row's own `choices`, else those given for all rows."""
    own = row.meta.get("choices")
    if own is None:
        return tuple(choices)
    if not isinstance(own, list | tuple) or not all(isinstance(each, str) for each in own):
        raise DataError(
            f"{row.source or row.id}: `choices` is not a list of texts",
            got=repr(own),
            wanted='a list such as ["yes", "no"]',
            cure="correct the column, or rename it",
        )
    return tuple(own)


def right_choice(row: Row, choices: Sequence[str], reference: str) -> int:
    """The number of the choice that is the row's reference.

    Raises:
        DataError: none is.
    """
    stripped = [choice.strip() for choice in choices]
    if reference.strip() not in stripped:
        raise DataError(
            f"{row.source or row.id}: the right answer is not among the choices",
            got=repr(reference.strip()),
            wanted=", ".join(repr(choice) for choice in stripped[:8]),
            cure="add it to the choices, or leave the row out",
        )
    return stripped.index(reference.strip())


def with_answer(row: Row, answer: str, tokenizer: Any) -> Row:
    """The row with another answer after the same prompt, trained on the answer and the end that follows it.

    The end (an end-of-turn token, say) is taken from the row itself, so that an answer which begins another one does
    not win by being shorter. White space that the row has before its answer is put before this one too.

    Raises:
        DataError: the answer has no tokens.
    """
    rest = list(row.tokens[row.prompt_tokens :])
    text = tokenizer.decode(rest, skip_special_tokens=True)
    space = text[: len(text) - len(text.lstrip())]
    own = tokenizer(space + text.strip(), add_special_tokens=False)["input_ids"]
    end: list[int] = []
    if rest[: len(own)] == own:
        flags = row.trained[row.prompt_tokens + len(own) :]
        end = [token for token, flag in zip(rest[len(own) :], flags, strict=True) if flag]
    new = tokenizer(space + answer.strip(), add_special_tokens=False)["input_ids"]
    if not new:
        raise DataError("a choice has no tokens", got=repr(answer), cure="give it some text")
    prompt = row.tokens[: row.prompt_tokens]
    return replace(
        row,
        tokens=(*prompt, *new, *end),
        trained=(False,) * len(prompt) + (True,) * (len(new) + len(end)),
    )
