"""Everything that one process tells others in a step, and hears from them."""

from __future__ import annotations

from collections.abc import Sequence

from afina.parallel.pipeline_traffic import pipeline_traffic
from afina.parallel.portion import Portion
from afina.parallel.tensor_traffic import Pass, tensor_traffic
from afina.parallel.traffic import Message, traffic


def step_traffic(
    portion: Portion,
    passes: Sequence[Pass],
    *,
    rounds: int | None = None,
    recompute: bool = False,
    anew: bool = False,
) -> list[Message]:
    """The messages of one step after the first two: with other rows, other parts of matrices, other stages.

    Args:
        portion: what the process holds.
        passes: of this process: the micro-batches in which something trains.
        rounds: passes that all processes make, where they must make equally many; by default as many.
        recompute: blocks run again in backward.
        anew: the shape of a pipeline's micro-batches is another than in the step before.
    """
    widest = max((one.tokens for one in passes), default=0)
    if portion.plan.pipeline > 1:
        # Messages have one shape: all are widened to the longest.
        passes = [Pass(widest, one.labels) for one in passes]
    rounds = len(passes) if rounds is None else rounds
    return [
        *traffic(portion, rounds),
        *tensor_traffic(portion, passes, recompute=recompute),
        *pipeline_traffic(portion, widest, len(passes), anew=anew),
    ]
