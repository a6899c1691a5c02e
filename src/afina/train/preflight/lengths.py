"""Tokens per row, beside the model's context and the sizes of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from afina.config import TrainSettings
from afina.errors import counted
from afina.train.preflight.finding import Finding, place
from afina.types import Row

BINS = 8
"""Bars of the histogram of row lengths."""

BAR = 40
"""Width of its longest bar, in characters."""


def lengths(
    rows: Sequence[Row], val_rows: Sequence[Row], context: int | None, settings: TrainSettings
) -> Finding:
    """Tokens per row, beside the model's context and the sizes of a step."""
    found = [len(row.tokens) for row in rows]
    longest = max(rows, key=lambda row: len(row.tokens))
    most = len(longest.tokens)
    mean = sum(found) / len(found)
    said = f"{min(found)} to {most} tokens a row, {mean:.0f} on average"
    if min(found) == most:
        said = f"{counted(most, 'token')} in every row"
    values = {"min": min(found), "max": most, "mean": mean, "context": context}
    bars = histogram(found)
    over = max((*rows, *val_rows), key=lambda row: len(row.tokens))
    if context is not None and len(over.tokens) > context:
        return Finding(
            "lengths",
            "error",
            f"{place(over)} has {len(over.tokens)} tokens, and the model reads {context}",
            "cut or leave out the longer rows",
            bars,
            values,
        )
    for name in ("micro_tokens", "tokens_per_step"):
        size = getattr(settings, name)
        if isinstance(size, int) and most > size:
            return Finding(
                "lengths",
                "warning",
                f"{said}; {place(longest)} is longer than train.{name} ({size}), so it lies alone and takes more",
                f"set train.{name} to {most} or more, or data.max_tokens to {size}",
                bars,
                values,
            )
    beside = f"; the model reads {context}" if context else ""
    return Finding("lengths", "ok", said + beside, details=bars, values=values)


def histogram(numbers: Sequence[int]) -> tuple[str, ...]:
    """Bars of how many numbers lie in equal ranges, as lines of text."""
    low, high = min(numbers), max(numbers)
    width = max(1, -(-(high - low + 1) // BINS))
    counts: dict[int, int] = defaultdict(int)
    for number in numbers:
        counts[(number - low) // width] += 1
    most, digits = max(counts.values()), len(str(high))
    return tuple(
        f"{low + at * width:>{digits}}"
        + (f" to {low + (at + 1) * width - 1:>{digits}}" if width > 1 else "")
        + f"  {'█' * -(-BAR * counts[at] // most)} {counts[at]}"
        for at in range((high - low) // width + 1)
    )
