"""Words with classes made into tokens with classes; and the order in which classes are numbered.

The class of a word is learnt, and measured, at its first token; its further tokens and what the tokenizer puts around
a row have none, as in Devlin et al. 2019, "BERT", arXiv 1810.04805, section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from afina.data.badrows import BadRows
from afina.data.draft import Draft
from afina.data.example import Example
from afina.data.masks import Masked
from afina.errors import DataError
from afina.types import IGNORE


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, by the alphabet; where all are numbers, by their value."""
    found = set(names)
    numeric = all(name.removeprefix("-").isdecimal() for name in found)
    return tuple(sorted(found, key=int) if numeric else sorted(found))


def tagged(
    tokenizer: Any, examples: Sequence[Example], labels: Sequence[str] | None, bad: BadRows
) -> Draft:
    """Tokens and their classes; `bad` gathers rows with a class that is not among `labels`.

    Raises:
        DataError: a slow tokenizer, which does not say which word a token is of.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "this tokenizer does not say which word a token is of",
            got=type(tokenizer).__name__,
            wanted="a fast tokenizer",
            cure="load the model with its tokenizer.json",
        )
    every = (tag for example in examples for tag in example.tags)
    known = in_order(every) if labels is None else tuple(labels)
    numbers = {name: number for number, name in enumerate(known)}
    found = bad.good(examples, lambda one: _masked(tokenizer, one, numbers), lambda one: one.source)
    kept = [example for example, _ in found]
    return Draft(kept, [one for _, one in found], [()] * len(kept), "classes", "", known)


def _masked(tokenizer: Any, example: Example, numbers: dict[str, int]) -> Masked:
    unknown = sorted({tag for tag in example.tags if tag not in numbers})
    if unknown:
        raise DataError(
            f"{example.source}: a class that the training rows do not have",
            got=", ".join(map(repr, unknown[:5])),
            wanted=", ".join(list(numbers)[:20]),
            cure="correct the tag, or train with such rows too",
        )
    made = tokenizer(list(example.words), is_split_into_words=True, verbose=False)
    tags: list[int] = []
    before: int | None = None
    for word in made.word_ids(0):
        if word is None or word == before:
            tags.append(IGNORE)
        else:
            tags.append(numbers[example.tags[word]])
        before = word
    ids = tuple(made["input_ids"])
    return Masked(ids, (False,) * len(ids), (), tags=tuple(tags))


def cut(tokenizer: Any, masked: Masked, limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first `limit` tokens and their classes; a special token at the row's end stays there."""
    tokens, tags = masked.tokens, masked.tags or ()
    if tokens[-1] in tokenizer.all_special_ids and limit > 1:
        return (*tokens[: limit - 1], tokens[-1]), (*tags[: limit - 1], IGNORE)
    return tokens[:limit], tags[:limit]
