"""How a step's rows are cut into forward passes. The step itself never changes: only how much is in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from afina.config import TrainSettings
from afina.data.packing import pack
from afina.models.forward import to_device, token_losses, trained_logits
from afina.train.memory import free_bytes, peak_bytes, used_bytes
from afina.tree import Edit
from afina.types import Batch, Row

MOST_TOKENS = 2048
"""No more tokens than this in one pass on a CPU when the size is chosen here: enough for full-rate matrix products."""
SHARE_OF_FREE = 0.6
"""Share of the free memory that a chosen size may be predicted to take."""


def cut(rows: Sequence[Row], *, rows_each: int | None, tokens_each: int | None) -> list[list[Row]]:
    """The rows of a step as micro-batches, of so many rows or of at most so many tokens; all at once for neither."""
    if tokens_each is not None:
        return pack(rows, tokens_each)
    each = rows_each or max(1, len(rows))
    return [list(rows[i : i + each]) for i in range(0, len(rows), each)]


def cutter(
    settings: TrainSettings, found: int | None
) -> Callable[[Sequence[Row]], list[list[Row]]]:
    """What cuts the rows of a step, as set; `found` tokens each where the settings say auto."""
    if "auto" in (settings.micro_rows, settings.micro_tokens):
        return lambda rows: cut(rows, rows_each=None, tokens_each=found)
    each = None if settings.micro_rows is None else int(settings.micro_rows)
    most = None if settings.micro_tokens is None else int(settings.micro_tokens)
    return lambda rows: cut(rows, rows_each=each, tokens_each=most)


def trial(
    model: nn.Module, edit: Edit, collate: Callable[[Sequence[Row]], Batch]
) -> Callable[[Sequence[Row]], None]:
    """A forward and backward pass over some rows that leaves nothing behind."""
    device = next(model.parameters()).device

    def run(rows: Sequence[Row]) -> None:
        batch = to_device(collate(rows), device)
        if batch.trained_tokens:
            token_losses(*trained_logits(model, batch)).sum().backward()
        for parameter in edit.trainable().values():
            parameter.grad = None

    return run


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
    ordered = sorted(step_rows, key=lambda row: -len(row.tokens))
    longest = len(ordered[0].tokens)
    if device.type == "cuda":
        return _halve_until_fits(ordered, run, sum(len(row.tokens) for row in ordered), longest)
    before, base, free = peak_bytes(device), used_bytes(device), free_bytes(device)
    if before is None or base is None or free is None:
        return max(longest, MOST_TOKENS), "this system does not tell memory use"
    count, tokens, peak = 0, 0, before
    # The system tells the highest use since the start, which loading may have set: rows are added until a pass exceeds
    # it, and resetting it, which would hide the peak of loading from whoever measures this process, is not needed.
    while peak <= before and count < len(ordered) and tokens < MOST_TOKENS:
        count = min(len(ordered), max(1, 2 * count))
        tokens = sum(len(row.tokens) for row in ordered[:count])
        run(ordered[:count])
        peak = peak_bytes(device) or before
    each = max(1.0, (peak - base) / tokens)
    bound = "" if peak > before else "at most "
    why = f"a pass takes {bound}{each / 2**20:.2f} MiB a token, {free / 2**30:.1f} GiB are free"
    return max(longest, min(MOST_TOKENS, int(free * SHARE_OF_FREE / each))), why


def _halve_until_fits(
    ordered: Sequence[Row], run: Callable[[Sequence[Row]], None], tokens: int, least: int
) -> tuple[int, str]:
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
