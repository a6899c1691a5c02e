"""Which blocks each stage of a pipeline gets: as many where blocks are equal, else by the time that they take.

A pipeline is as fast as its slowest stage. The split is the one whose slowest stage takes least; among those, the one
whose stages are most alike, and then the one whose later stages have less, for the last has the head too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afina.errors import ConfigError
from afina.parallel.bubbles import chunks_of
from afina.parallel.pipeline_stage import hidden_of
from afina.parallel.plan import Plan
from afina.seams.calls import Call, instead

REPEATS = 3
"""A block is timed so many times, and its least time counts: whatever else runs only makes it longer."""


def stretches(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """First block of each stage, and the one behind its last.

    Args:
        costs: of the blocks, in the order of the model; equal ones for equal blocks.
        stages: at most as many as there are blocks.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    count = len(costs)
    if stages > count:
        raise ConfigError(
            "a pipeline has more stages than the model has blocks",
            got=f"{stages} stages, {count} blocks",
            wanted=f"at most {count} stages",
            cure="lower parallel.pipeline; interleaved has two stages a process",
        )
    if len(set(costs)) == 1:
        each, more = divmod(count, stages)
        sizes = [each + (stage < more) for stage in range(stages)]
        ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
        return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[end]: (slowest stage, sum of squares, ends) of the best split of the blocks before `end`.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(1, stages + 1):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, count - (stages - stage) + 1):
            splits = [
                (
                    max(slowest, before[end] - before[first]),
                    squares + (before[end] - before[first]) ** 2,
                    (*ends, end),
                )
                for first, (slowest, squares, ends) in best.items()
                if first < end
            ]
            found[end] = min(splits, key=lambda s: (s[0], s[1], tuple(-e for e in s[2])))
        best = found
    ends = best[count][2]
    return list(zip((0, *ends), ends, strict=False))


def bounds_of(
    plan: Plan, count: int, costs: Callable[[], Sequence[float]] | None = None
) -> list[tuple[int, int]]:
    """First block of each stage of a pipeline, and the one behind its last.

    Args:
        plan: of the run, which may say how blocks are split.
        count: blocks.
        costs: what they cost, if it does not; by default they are alike.

    Raises:
        ConfigError: more stages than blocks, or a split into other blocks than there are.
    """
    if not plan.split:
        return stretches(costs() if costs else [1.0] * count, plan.pipeline * chunks_of(plan))
    if sum(plan.split) != count:
        raise ConfigError(
            "parallel.split does not share out this model's blocks",
            got=f"{', '.join(map(str, plan.split))}: {sum(plan.split)} blocks in {len(plan.split)} stages",
            wanted=f"{count} blocks in {plan.pipeline} stages, or in a multiple of that",
        )
    ends = [sum(plan.split[: stage + 1]) for stage in range(len(plan.split))]
    return [(end - size, end) for size, end in zip(plan.split, ends, strict=True)]


def kinds(blocks: Sequence[nn.Module], config: Any) -> list[int]:
    """A number for each block, the same for blocks that compute alike."""
    types: Sequence[Any] = getattr(config, "layer_types", None) or [None] * len(blocks)
    known: dict[Any, int] = {}
    found: list[int] = []
    for block, kind in zip(blocks, types, strict=False):
        parts = tuple(
            (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
        )
        form = (type(block), kind, parts)
        found.append(known.setdefault(form, len(known)))
    return found


def measured(
    blocks: Sequence[nn.Module],
    config: Any,
    run: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of a forward and backward pass of each block; 1 for each where all are equal.

    One block of each kind is timed. Where the blocks have no values yet, the number of their weights stands for it.

    Args:
        blocks: of the model, with their values.
        config: the model's.
        run: a pass of the whole model over some tokens.
        clock: seconds.
    """
    found = kinds(blocks, config)
    if len(set(found)) == 1:
        return [1.0] * len(blocks)
    if any(p.is_meta for block in blocks for p in block.parameters()):
        return [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    firsts = {kind: blocks[found.index(kind)] for kind in set(found)}
    times: dict[int, float] = {}

    def timed(kind: int) -> Callable[[Call], Call]:
        def of(call: Call) -> Call:
            def taken(*args: Any, **kwargs: Any) -> Any:
                trained = [p for p in firsts[kind].parameters() if p.requires_grad]
                seconds = [_once(call, args, kwargs, trained, clock) for _ in range(REPEATS)]
                times[kind] = min(seconds)
                with torch.no_grad():
                    return call(*args, **kwargs)

            return taken

        return of

    with instead({block: timed(kind) for kind, block in firsts.items()}):
        run()
    return [times[kind] for kind in found]


def _once(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trained: Sequence[nn.Parameter],
    clock: Callable[[], float],
) -> float:
    """Seconds of one forward and backward pass, which leaves no gradient behind."""
    hidden_BTD = hidden_of(args, kwargs).detach().requires_grad_()
    given = (hidden_BTD, *args[1:]) if args else ()
    named = kwargs if args else {**kwargs, "hidden_states": hidden_BTD}
    began = clock()
    with torch.enable_grad():
        out = call(*given, **named)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(hidden.sum(), [hidden_BTD, *trained], allow_unused=True)
    return clock() - began
