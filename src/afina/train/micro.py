"""How a step's rows are cut into forward passes. The step itself never changes: only how much is in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from afina.data.packing import pack
from afina.train.memory import free_bytes, peak_bytes, reset_peak, used_bytes
from afina.types import Row

MOST_TOKENS = 8192
"""No more tokens than this in one pass when the size is chosen here: beyond it nothing gets faster."""
SHARE_OF_FREE = 0.6
"""Share of the free memory that a chosen size may be predicted to take."""
UNKNOWN_TOKENS = 2048
"""The size where the system does not tell how much memory a pass takes."""


def cut(rows: Sequence[Row], *, rows_each: int | None, tokens_each: int | None) -> list[list[Row]]:
    """The rows of a step as micro-batches, of so many rows or of at most so many tokens; all at once for neither."""
    if tokens_each is not None:
        return pack(rows, tokens_each)
    each = rows_each or max(1, len(rows))
    return [list(rows[i : i + each]) for i in range(0, len(rows), each)]


def find_tokens(
    step_rows: Sequence[Row],
    run: Callable[[Sequence[Row]], None],
    device: torch.device,
) -> tuple[int, str]:
    """How many tokens one forward and backward pass may hold, found by trial passes.

    Args:
        step_rows: rows of a typical step, the longest row of the data among them.
        run: a forward and backward pass over some rows; leaves no gradient behind.
        device: where it runs.

    Returns:
        The tokens of a micro-batch (at least the longest row), and why.
    """
    longest = max(len(row.tokens) for row in step_rows)
    if device.type == "cuda":
        whole = sum(len(row.tokens) for row in step_rows)
        return _halve_until_fits(step_rows, run, max(longest, min(MOST_TOKENS, whole)), longest)
    one = [max(step_rows, key=lambda row: len(row.tokens))]
    two = [*one, *sorted(step_rows, key=lambda row: -len(row.tokens))[:1]]
    run(one)  # warms up: the first pass also allocates what later ones reuse
    if not reset_peak(device):
        return max(longest, UNKNOWN_TOKENS), "this system does not tell memory use"
    base = used_bytes(device) or 0
    run(one)
    first = (peak_bytes(device) or 0) - base
    reset_peak(device)
    run(two)
    second = (peak_bytes(device) or 0) - base
    tokens = sum(len(row.tokens) for row in two)
    each = max(first / longest, second / tokens, 1.0)
    free = free_bytes(device)
    if free is None:
        return max(longest, UNKNOWN_TOKENS), "this system does not tell free memory"
    fits = int(free * SHARE_OF_FREE / each)
    why = f"a pass takes about {each / 2**20:.2f} MiB a token, {free / 2**30:.1f} GiB are free"
    return max(longest, min(MOST_TOKENS, fits)), why


def _halve_until_fits(
    rows: Sequence[Row], run: Callable[[Sequence[Row]], None], tokens: int, least: int
) -> tuple[int, str]:
    ordered = sorted(rows, key=lambda row: -len(row.tokens))
    while True:
        try:
            run(pack(ordered, tokens)[0])
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if tokens <= least:
                raise
            tokens = max(least, tokens // 2)
            continue
        return tokens, "the largest of its halves that fits on the GPU"
