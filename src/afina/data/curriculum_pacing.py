"""How fast a curriculum lets rows in, or lets them grow: pure functions of the step, counted from 0.

Sources: competence is Platanios et al. 2019, arXiv 1903.09848, equations 2 and 5; baby steps are Bengio et al. 2009,
"Curriculum Learning", with the older buckets kept; the length of a row is DeepSpeed's `CurriculumScheduler`
(fixed_linear, fixed_root, fixed_discrete), of Li et al. 2021, arXiv 2108.06084.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def competence_sqrt(step: int, ramp: int, start: float) -> float:
    """min(1, sqrt(t (1 - c0²) / T + c0²)): as many new rows at each step as there is time to learn them.

    Args:
        step: t.
        ramp: T, the step from which on all rows are let in.
        start: c0, the share of rows at step 0.
    """
    return 1.0 if step >= ramp else min(1.0, math.sqrt(step * (1 - start**2) / ramp + start**2))


def competence_linear(step: int, ramp: int, start: float) -> float:
    """min(1, t (1 - c0) / T + c0); arguments as of `competence_sqrt`."""
    return 1.0 if step >= ramp else min(1.0, step * (1 - start) / ramp + start)


def competence_steps(step: int, ramp: int, buckets: int) -> float:
    """One of so many equal buckets at step 0, one more each T / (buckets - 1) steps, and all from step T on."""
    return 1.0 if step >= ramp else (1 + step * (buckets - 1) // ramp) / buckets


def allowed(share: float, count: int) -> int:
    """How many of so many ranked rows have a rank of at most this share: k of them with k / count <= share."""
    found = math.floor(share * count)
    # The product may be rounded over a whole number, or under it.
    while found < count and (found + 1) / count <= share:
        found += 1
    while found > 0 and found / count > share:
        found -= 1
    return found


def root_length(
    step: int, *, ramp: int, least: int, most: int, multiple: int, degree: float
) -> int:
    """Tokens of a row: floor((t / T)^(1 / degree) (most - least) + least), down to a multiple, at most `most`.

    Args:
        step: t.
        ramp: T.
        least: tokens at step 0.
        most: tokens at the end.
        multiple: the length is a multiple of this, but for `most`.
        degree: 1 grows linearly, 2 with the square root.
    """
    length = math.floor((step / ramp) ** (1.0 / degree) * (most - least) + least)
    return min(length - length % multiple, most)


def discrete_length(step: int, lengths: Sequence[int], last_steps: Sequence[int]) -> int:
    """Tokens of a row: the first length up to the first of these steps and with it, and so on; then the last.

    Args:
        step: t.
        lengths: one more than there are steps.
        last_steps: rising.
    """
    return next(
        (length for length, last in zip(lengths, last_steps, strict=False) if step <= last),
        lengths[-1],
    )
