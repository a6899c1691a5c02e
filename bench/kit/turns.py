"""Ways to do one thing that take turns, so that what the machine does meanwhile meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    times: int,
    reads: Callable[[str], float] | None = None,
) -> dict[str, float]:
    """Median seconds of each way, the ways taking turns; each runs once more before, which is not counted.

    Args:
        ways: what is run, by name.
        times: counted runs of each, at least one.
        reads: the seconds of the run of that name just now, where it notes them itself; None takes the clock's.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    names = list(ways)
    for turn in range(times):
        first = turn % len(names)  # each is first in its turn
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            ways[name]()
            passed = time.perf_counter() - began
            seconds[name].append(passed if reads is None else reads(name))
    return {name: statistics.median(found) for name, found in seconds.items()}
