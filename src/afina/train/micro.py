"""How many tokens go through the model at once. The step itself never changes: only how much is in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from afina.config import TrainSettings
from afina.parallel.plan import Plan
from afina.parallel.runtime import Mesh, OneProcess
from afina.train.memory import free_bytes, peak_bytes, used_bytes
from afina.train.passes import Passes
from afina.types import Row

MOST_TOKENS = 2048
"""No more tokens than this in one pass on a CPU when the size is chosen here: enough for full-rate matrix products."""
SHARE_OF_FREE = 0.6
"""Share of the free memory that a chosen size may be predicted to take."""


def is_found(settings: TrainSettings) -> bool:
    """Whether the size of a micro-batch is found by trial."""
    return "auto" in (settings.micro_rows, settings.micro_tokens)


def find(
    rows: Sequence[Row],
    step: Sequence[Row],
    run: Callable[[Sequence[Row]], None],
    passes: Passes,
    mesh: Mesh | None = None,
) -> tuple[int, str]:
    """The tokens of a micro-batch, found on a step with the longest of all rows added, and why; as `find_tokens`."""
    longest = max(rows, key=lambda row: len(row.tokens))
    return find_tokens([longest, *step], run, passes, mesh)


def for_stages(tokens: int, step: Sequence[Row], passes: Passes, plan: Plan) -> int:
    """The tokens of a micro-batch where a pipeline has several of them at once, one or more for each process.

    Args:
        tokens: that fit, one micro-batch alone.
        step: rows of a usual step.
        passes: how rows become tokens.
        plan: how processes share the run.
    """
    if plan.pipeline == 1:
        return tokens
    share = -(-passes.tokens(step) // (plan.data * plan.pipeline))
    longest = max(len(row.tokens) for row in step)
    return max(longest, min(tokens // plan.pipeline, share))


def cutter(
    settings: TrainSettings, found: int | None, passes: Passes
) -> Callable[[Sequence[Row]], list[list[Row]]]:
    """What cuts the rows of a step, as set; `found` tokens each where the settings say auto."""
    if is_found(settings):
        return lambda rows: passes.cut(rows, rows_each=None, tokens_each=found)
    each = None if settings.micro_rows is None else int(settings.micro_rows)
    most = None if settings.micro_tokens is None else int(settings.micro_tokens)
    return lambda rows: passes.cut(rows, rows_each=each, tokens_each=most)


def find_tokens(
    step_rows: Sequence[Row],
    run: Callable[[Sequence[Row]], None],
    passes: Passes,
    mesh: Mesh | None = None,
) -> tuple[int, str]:
    """How many tokens one forward and backward pass may hold, found by trial passes.

    Args:
        step_rows: rows of a typical step, the longest row of the data among them.
        run: a forward and backward pass over some rows; leaves no gradient behind.
        passes: how rows become tokens, and where they run.
        mesh: the processes, which make the same passes; None for this one alone.

    Returns:
        The tokens of a micro-batch (at least the longest row), and why.
    """
    ordered = sorted(step_rows, key=lambda row: -len(row.tokens))
    longest = len(ordered[0].tokens)
    device, mesh = passes.device, mesh or OneProcess()
    # A pass that fails in one process is none that others can end, where they talk within it.
    if device.type == "cuda" and not mesh.plan.talks_in_passes:
        return _halve_until_fits(ordered, run, passes, longest)
    before, base, free = peak_bytes(device), used_bytes(device), free_bytes(device)
    if before is None or base is None or free is None:
        return max(longest, MOST_TOKENS), "this system does not tell memory use"
    count, tokens, peak = 0, 0, before
    # The system tells the highest use since the start, which loading may have set: rows are added until a pass exceeds
    # it, and resetting it, which would hide the peak of loading from whoever measures this process, is not needed.
    while mesh.least(peak <= before and count < len(ordered) and tokens < MOST_TOKENS):
        count = min(len(ordered), max(1, 2 * count))
        tokens = passes.tokens(ordered[:count])
        run(ordered[:count])
        peak = peak_bytes(device) or before
    each = max(1.0, (peak - base) / tokens)
    bound = "" if peak > before else "at most "
    why = f"a pass takes {bound}{each / 2**20:.2f} MiB a token, {free / 2**30:.1f} GiB are free"
    return max(longest, min(MOST_TOKENS, int(free * SHARE_OF_FREE / each))), why


def _halve_until_fits(
    ordered: Sequence[Row], run: Callable[[Sequence[Row]], None], passes: Passes, least: int
) -> tuple[int, str]:
    tokens = passes.tokens(ordered)
    while True:
        try:
            run(passes.cut(ordered, rows_each=None, tokens_each=tokens)[0])
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if tokens <= least:
                raise
            tokens = max(least, tokens // 2)
            continue
        return tokens, "the largest of its halves that fits on the GPU"
