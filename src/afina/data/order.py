"""In which order rows are seen, and which of them an optimiser step gets: pure functions of the seed.

Shuffling sorts by a hash (BLAKE2b) of seed, epoch and place instead of drawing from a generator: so the order is the
same on every machine and with every version of torch or numpy, and a run resumes at step k from k alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from afina.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """The rows of one optimiser step: their places in the list of rows.

    Attributes:
        step: counted from 0 over all epochs.
        epoch: counted from 0.
        rows: in the order they are seen; the last window of an epoch may be short.
    """

    step: int
    epoch: int
    rows: tuple[int, ...]


def order(n: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(n), a pure function of its arguments."""
    key = blake2b(f"{seed}/{epoch}".encode()).digest()

    def rank(place: int) -> bytes:
        return blake2b(place.to_bytes(8, "big"), digest_size=8, key=key).digest()

    return sorted(range(n), key=rank)


def shuffled(n: int, seed: int, step: int) -> Iterator[int]:
    """The places of range(n) in an order of their own for each step, one after the other: a pure function.

    Fisher and Yates' shuffle, made only as far as somebody takes places, by draws from a hash: each beginning of the
    order is equally likely (to 2**-64 of n).
    """
    key = blake2b(f"{seed}/step {step}".encode()).digest()
    moved: dict[int, int] = {}
    for at in range(n):
        draw = blake2b(at.to_bytes(8, "big"), digest_size=8, key=key).digest()
        other = at + (int.from_bytes(draw, "big") * (n - at) >> 64)
        yield moved.get(other, other)
        moved[other] = moved.pop(at, at)


def cut(
    places: Sequence[int],
    lengths: Sequence[int],
    *,
    rows_per_step: int | None = None,
    tokens_per_step: int | None = None,
) -> list[tuple[int, ...]]:
    """An order cut into the windows of optimiser steps; every place is in exactly one, a short last one is kept.

    Args:
        places: rows in the order they are seen.
        lengths: tokens of each row, by place.
        rows_per_step: rows in a window; or
        tokens_per_step: a window closes before the row that would exceed this (a longer row is a window of its own).

    Raises:
        ConfigError: not exactly one of the two sizes, or one below 1.
    """
    sizes = [size for size in (rows_per_step, tokens_per_step) if size is not None]
    if len(sizes) != 1 or sizes[0] < 1:
        raise ConfigError(
            "a step needs one size",
            got=f"rows_per_step={rows_per_step}, tokens_per_step={tokens_per_step}",
            wanted="one of the two, at least 1",
        )
    if rows_per_step is not None:
        return [
            tuple(places[at : at + rows_per_step]) for at in range(0, len(places), rows_per_step)
        ]
    windows: list[tuple[int, ...]] = []
    window: list[int] = []
    tokens = 0
    for place in places:
        if window and tokens + lengths[place] > sizes[0]:
            windows.append(tuple(window))
            window, tokens = [], 0
        window.append(place)
        tokens += lengths[place]
    return [*windows, tuple(window)] if window else windows


def windows(
    lengths: Sequence[int],
    seed: int,
    *,
    rows_per_step: int | None = None,
    tokens_per_step: int | None = None,
    start: int = 0,
) -> Iterator[Window]:
    """The windows of steps `start`, `start` + 1, … without end, one epoch after another.

    Window k is a pure function of the arguments and k: starting at k gives what going on to k gives.

    Raises:
        ConfigError: as `cut`; or there are no rows.
    """
    if not lengths:
        raise ConfigError("no rows to train on", got="0 rows", wanted="at least one")
    step = first = 0
    if (
        rows_per_step
    ):  # every epoch has the same number of windows, so whole ones can be skipped unseen
        each = -(-len(lengths) // rows_per_step)
        first = start // each
        step = first * each
    for epoch in count(first):
        places = order(len(lengths), seed, epoch)
        found = cut(places, lengths, rows_per_step=rows_per_step, tokens_per_step=tokens_per_step)
        for rows in found:
            if step >= start:
                yield Window(step, epoch, rows)
            step += 1


def steps_in(
    lengths: Sequence[int],
    seed: int,
    epochs: float,
    *,
    rows_per_step: int | None = None,
    tokens_per_step: int | None = None,
) -> int:
    """The optimiser steps of some epochs; a part of an epoch is rounded up to whole steps.

    Raises:
        ConfigError: as `windows`; or `epochs` is not positive.
    """
    if not epochs > 0:
        raise ConfigError("train.epochs out of range", got=epochs, wanted="more than 0")
    if not lengths:
        raise ConfigError("no rows to train on", got="0 rows", wanted="at least one")
    total = 0
    for epoch in range(math.ceil(epochs)):
        found = cut(
            order(len(lengths), seed, epoch),
            lengths,
            rows_per_step=rows_per_step,
            tokens_per_step=tokens_per_step,
        )
        total += math.ceil(min(1.0, epochs - epoch) * len(found))
    return total
