"""Learning rate over time: a pure function of the step, as a factor of the run's rate.

Warm-up is linear from 0 (excluded) to 1, as Goyal et al. 2017, arXiv 1706.02677, section 2.2; cosine is Loshchilov and
Hutter 2016, arXiv 1608.03983, equation 5 with one cycle and a floor of 0.
"""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["linear", "cosine", "constant"]


def factor(step: int, *, total_steps: int, warmup_steps: int, kind: Kind) -> float:
    """Factor of the learning rate at optimiser step `step`, counted from 0.

    The warm-up's last step has factor 1; the decay then runs so that the step after the last would have 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1.0 - done)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
