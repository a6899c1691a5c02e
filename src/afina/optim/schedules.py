"""Learning rate over time: a pure function of the step, as a factor of the run's rate.

Warm-up is linear from 0 (excluded) to 1, as Goyal et al. 2017, arXiv 1706.02677, section 2.2; cosine is Loshchilov and
Hutter 2016, arXiv 1608.03983, equation 5 with one cycle and a floor of 0. By tokens the decay follows what was shown
instead of the steps, as DeepSpeed's tutorial on curriculum learning advises where early steps have fewer tokens than
late ones: by steps the rate would fall while little is learnt from. The warm-up, which is the optimiser's, stays by
steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Kind = Literal["linear", "cosine", "constant"]


def factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    kind: Kind,
    shown: Sequence[int] | None = None,
) -> float:
    """Factor of the learning rate at optimiser step `step`, counted from 0.

    The warm-up's last step has factor 1; the decay then runs so that the step after the last would have 0.

    Args:
        step: this one.
        total_steps: of the run.
        warmup_steps: over which the rate rises.
        kind: how it falls.
        shown: tokens before each step, and before the step after the last: the decay then goes by these.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    at, begin, end = step, warmup_steps, total_steps
    if shown is not None:
        at, begin, end = (shown[min(one, len(shown) - 1)] for one in (at, begin, end))
    done = (at - begin) / max(1, end - begin)
    if kind == "linear":
        return max(0.0, 1.0 - done)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
