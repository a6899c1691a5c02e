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


def template(rows: Sequence[Row], tokenizer: Any) -> Finding:
    """Whether training and generation mean the same: text to ids and back, and the prompt as the row's beginning."""
    if tokenizer is None:
        return skipped("template", "no tokenizer was given")
    looked = [row for row in spread(rows, SAMPLE) if row.label is None]
    if not looked:
        return skipped("template", "the rows are for classification")
    changed, unsure = _retokenised(looked, tokenizer)
    prompted = [row for row in looked if "prompt" in row.meta]
    other = [row for row in prompted if not _begins_as_generated(row, tokenizer)]
    rewritten = [row for row in prompted if _rewrites(row, tokenizer)]
    values = {
        "rows": len(looked),
        "other_ids": len(changed),
        "other_prompt": len(other),
        "rewritten": len(rewritten),
        "not_reversible": len(unsure),
    }
    if other:
        return Finding(
            "template",
            "warning",
            f"in {len(other)} of {counted(len(looked), 'row')} the prompt that generation would use is not how the "
            f"row begins: {places(other)}",
            "use a chat template whose generation prompt is how it writes an answer",
            values=values,
        )
    if changed:
        return Finding(
            "template",
            "warning",
            f"the text of {len(changed)} of {counted(len(looked), 'row')} has other tokens when it is read as a "
            f"whole: {places(changed)}",
            "put the space or line end between prompt and answer at the start of the answer",
            values=values,
        )
    notes = [
        f"{counted(len(found), 'row')} {what}"
        for found, what in (
            (
                rewritten,
                "with earlier turns that the template rewrites, which only the last turn can train",
            ),
            (unsure, "whose text the tokenizer does not give back exactly"),
        )
        if found
    ]
    if notes:
        return Finding("template", "note", "; ".join(notes), values=values)
    said = f"{counted(len(looked), 'row')} looked at: the text gives the same tokens again"
    if prompted:
        said += ", and generation's prompt is how the row begins"
    return Finding("template", "ok", said, values=values)


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
