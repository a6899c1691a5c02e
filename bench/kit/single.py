"""Figures that are not of windows: memory of a long run, distance from the floor, time until something happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .cache import machine
from .meter import read_notes
from .pieces import result_of
from .races import OURS
from .report import Figure
from .rows import content_hash
from .side import SideBySide, median
from .variants import QUICK, Windows, variants, with_knobs

MEMORY_STEPS = 120
FLOORS = 3
"""Runs in which the share of the floor is measured, where the command line says nothing else."""


def memory_figures(side: SideBySide) -> Iterator[Figure]:
    """The most memory that a run of 120 steps held, and what it was when model and adapter were there."""
    quick = side.options.quick
    steps, batch = (6, QUICK.batch) if quick else (MEMORY_STEPS, Windows.batch)
    found: dict[str, dict[str, Any]] = {}
    for variant in variants(side.fast_bf16):
        folder = side.train(side.job(variant, 0, steps, 0, batch), "memory")
        if folder is not None:
            found[variant.setting] = result_of(folder) or {}
    for setting in ("usual", "expert"):
        for metric, key in (
            (f"peak memory after {steps} steps", "peak_bytes"),
            ("memory when loaded", "loaded_bytes"),
        ):
            bytes_ = [found.get(each, {}).get(key) for each in (OURS, setting)]
            values = [None if each is None else each / 2**30 for each in bytes_]
            yield side.figure(f"long run, {setting}", metric, "GiB", *values)


def floor_figures(side: SideBySide, size: Windows) -> Iterator[Figure]:
    """What share of its steps afina would need for their large products alone, nothing shared between rows."""
    ours = next(each for each in variants(side.fast_bf16) if each.setting == OURS)
    apart = with_knobs(ours, share_prefixes=False, floor=True)
    shares: list[float] = []
    speeds: list[float] = []
    floors: list[float] = []
    for run in range(side.options.rounds or (1 if side.options.quick else FLOORS)):
        job = side.job(apart, run, size.warm + size.steps, size.warm, size.batch)
        folder = side.train(job, f"floor{run}")
        if folder is None:
            continue
        result = result_of(folder) or {}
        step_s, floor_s = (sum(result[key][size.warm :]) for key in ("step_s", "floor_s"))
        tokens = sum(note["tokens"] for note in read_notes(folder)[size.warm :])
        shares.append(floor_s / step_s)
        speeds.append(tokens / step_s)
        floors.append(tokens / floor_s)
    for metric, unit, values in (
        ("share of the GEMM floor", "share", shares),
        ("speed", "tokens/s", speeds),
        ("speed of the floor's products alone", "tokens/s", floors),
    ):
        yield side.figure("sharing off", metric, unit, median(values), None)


def start_figures(side: SideBySide, data: Path) -> Iterator[Figure]:
    """Seconds of `afina --help`, and from `afina train` to the end of its first step, caches warm."""
    times = side.options.rounds or (1 if side.options.quick else 5)
    job = {
        "data": str(data.resolve()),
        "base": side.model,
        "times": times,
        "threads": side.options.threads,
    }
    lines = content_hash(data.read_text("utf-8"))
    key = content_hash([times, lines, side.model_hash, side.versions["afina"], machine()])
    asked = {"times": times, "threads": side.options.threads, "lines": lines}
    folder = side.piece("start", side.name("start"), key, {**job, **asked}, "afina", OURS)
    result = {} if folder is None else result_of(folder) or {}
    for metric, name in (
        ("afina --help", "help_s"),
        ("afina train, start to first step", "first_step_s"),
    ):
        yield side.figure("", metric, "s", median(result.get(name, ())), None)
        yield side.figure("", f"{metric}, slowest", "s", _most(result.get(name, ())), None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)
