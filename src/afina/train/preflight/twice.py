"""The same row twice: in the training rows, or on both sides of a validation."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from afina.data.split import content_of, shared
from afina.errors import counted
from afina.train.preflight.finding import Finding, place, skipped
from afina.types import Row


def duplicates(rows: Sequence[Row]) -> Finding:
    """Rows that say what an earlier row says, and prompts with several answers."""
    first: dict[str, Row] = {}
    again: list[tuple[Row, Row]] = []
    answers: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        content = content_of(row)
        if content in first:
            again.append((row, first[content]))
        first.setdefault(content, row)
        prompt = prompt_of(row)
        if prompt:
            answers[prompt].add(content)
    several = sum(len(contents) > 1 for contents in answers.values())
    values = {"duplicates": len(again), "prompts_with_several_answers": several}
    if again:
        row, earlier = again[0]
        return Finding(
            "duplicates",
            "warning",
            f"{counted(len(again), 'row')} with the content of an earlier one; first: {place(row)} is {place(earlier)}",
            "leave the repetitions out, unless they are meant to weigh more",
            values=values,
        )
    if several:
        said = f"no row twice; {counted(several, 'prompt')} with several answers"
        return Finding("duplicates", "note", said, values=values)
    return Finding("duplicates", "ok", f"no row twice among {len(rows)}", values=values)


def overlap(rows: Sequence[Row], val_rows: Sequence[Row]) -> Finding:
    """Validation rows, or their prompts, that are also trained on: their score is too good."""
    if not val_rows:
        return skipped("overlap", "there are no validation rows")
    pairs = shared(rows, val_rows)
    known = {prompt for row in rows if (prompt := prompt_of(row))}
    prompted = sum(prompt_of(row) in known for row in val_rows)
    values = {"shared_rows": len(pairs), "shared_prompts": prompted, "rows": len(val_rows)}
    if pairs:
        one, other = pairs[0]
        return Finding(
            "overlap",
            "warning",
            f"{counted(len(pairs), 'validation row')} also among the training rows, so the score is too good "
            f"(row {place(one)} is {place(other)})",
            "take them out of one side; data.val_fraction never splits equal rows",
            values=values,
        )
    if prompted:
        said = (
            f"no row is on both sides, but {prompted} of {counted(len(val_rows), 'validation prompt')} also among the "
            "training rows, with another answer"
        )
        return Finding("overlap", "note", said, values=values)
    return Finding(
        "overlap", "ok", "no validation row or prompt is a training row's", values=values
    )


def prompt_of(row: Row) -> str:
    """A digest of the prompt of a row; "" where there is none."""
    if not row.prompt_tokens:
        return ""
    return hashlib.sha256(repr(row.tokens[: row.prompt_tokens]).encode()).hexdigest()
