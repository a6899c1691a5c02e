"""Whether training and generation mean the same: text to ids and back, and the prompt as the row's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afina.data.masks import encode
from afina.data.templates import render
from afina.errors import AfinaError, DataError, counted
from afina.models import prompts
from afina.train.preflight.finding import Finding, places, skipped
from afina.types import Row

SAMPLE = 64
"""Rows whose text is made again, spread over all of them: a template's mistake shows in any."""


def template(rows: Sequence[Row], tokenizer: Any, limit: int | None = None) -> Finding:
    """Whether training and generation mean the same: text to ids and back, and the prompt as the row's beginning."""
    if tokenizer is None:
        return skipped("template", "no tokenizer was given")
    looked = [row for row in spread(rows, SAMPLE) if row.label is None]
    if not looked:
        return skipped("template", "the rows are for classification")
    # What was cut may end inside a word, whose beginning has other tokens.
    whole = [row for row in looked if limit is None or len(row.tokens) < limit]
    changed, unsure = _retokenised(whole, tokenizer)
    prompted = [row for row in looked if "prompt" in row.meta]
    other = [row for row in prompted if not _begins_as_generated(row, tokenizer)]
    rewritten = [row for row in prompted if _rewrites(row, tokenizer)]
    # Where the prompt is generation's, a row was tokenised apart on purpose: the second of the ways of `data.masks`.
    good = {id(row) for row in prompted} - {id(row) for row in other}
    apart = [row for row in changed if id(row) in good]
    foreign = [row for row in changed if id(row) not in good]
    values = {
        "rows": len(looked),
        "other_ids": len(changed),
        "other_prompt": len(other),
        "rewritten": len(rewritten),
        "not_reversible": len(unsure),
    }
    of = f"of {counted(len(looked), 'row')}"
    if other:
        return Finding(
            "template",
            "warning",
            f"in {len(other)} {of} the prompt that generation would use is not how the row begins: {places(other)}",
            "use a chat template whose generation prompt is how it writes an answer",
            values=values,
        )
    if foreign:
        return Finding(
            "template",
            "warning",
            f"the text of {len(foreign)} {of} has other tokens than the row: {places(foreign)}",
            "make the rows with this model's own tokenizer",
            values=values,
        )
    notes = _notes(apart, rewritten, unsure)
    if notes:
        return Finding("template", "note", "; ".join(notes), values=values)
    said = f"{counted(len(looked), 'row')} looked at: the text gives the same tokens again"
    if prompted:
        said += ", and generation's prompt is how the row begins"
    return Finding("template", "ok", said, values=values)


def _notes(apart: Sequence[Row], rewritten: Sequence[Row], unsure: Sequence[Row]) -> list[str]:
    said = (
        (apart, "whose prompt and answer are tokenised apart, as in generation"),
        (rewritten, "with earlier turns that the template rewrites: only the last turn can train"),
        (unsure, "whose text the tokenizer does not give back exactly"),
    )
    return [f"{counted(len(found), 'row')} {what}" for found, what in said if found]


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """So many rows, evenly over all of them."""
    if len(rows) <= count:
        return list(rows)
    return [rows[at * len(rows) // count] for at in range(count)]


def _retokenised(rows: Sequence[Row], tokenizer: Any) -> tuple[list[Row], list[Row]]:
    """Rows whose text has other tokens, and rows whose text is not given back, so that this cannot be told."""

    def texts(ids: Sequence[Sequence[int]]) -> list[str]:
        return [tokenizer.decode(list(one), clean_up_tokenization_spaces=False) for one in ids]

    before = texts([row.tokens for row in rows])
    again = encode(tokenizer, before)
    after = texts(again)
    differ = [
        (row, same)
        for row, ids, same in zip(
            rows, again, (a == b for a, b in zip(before, after, strict=True)), strict=True
        )
        if tuple(ids) != row.tokens
    ]
    return [row for row, same in differ if same], [row for row, same in differ if not same]


def _begins_as_generated(row: Row, tokenizer: Any) -> bool:
    """Whether the row begins with what `generate` is given for its prompt."""
    if not row.meta["prompt"]:
        return True
    try:
        ids = prompts.encode(tokenizer, row.meta["prompt"], tools=row.meta.get("tools"))
    except AfinaError:
        return False
    return tuple(ids) == row.tokens[: row.prompt_tokens]


def _rewrites(row: Row, tokenizer: Any) -> bool:
    """Whether the text of an earlier turn changes when later ones follow."""
    prompt, tools = row.meta["prompt"], row.meta.get("tools")
    if isinstance(prompt, str):
        return False
    ends = [at + 1 for at, message in enumerate(prompt) if message["role"] == "assistant"]
    try:
        whole = render(tokenizer, prompt, tools)
        return not all(whole.startswith(render(tokenizer, prompt[:end], tools)) for end in ends)
    except DataError:  # a template may refuse a beginning alone, which says nothing of the whole
        return False
