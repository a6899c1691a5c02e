"""How a packed line is taken apart: its runs of tokens as blocks of rows of about one length, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from afina.types import Context, Layout, Places, Run, Runs

EVEN = 0.5
"""A row joins a block when it is at least this share of the block's longest, in queries and in keys."""


def with_layout(context: Context, runs: Sequence[Run] | None = None) -> Context:
    """Adds to a packed line's context how it is taken apart.

    Args:
        context: with segments_BT of one line (B = 1); -1 is padding.
        runs: that the line consists of; by segments when None, no beginning shared.
    """
    if not runs:
        runs = runs_of(cast("list[int]", context.segments_BT[0].tolist()))  # pyright: ignore[reportUnknownMemberType]
    return replace(context, layout=layout_of(runs, context.segments_BT.device))


def runs_of(segments_T: Sequence[int]) -> list[Run]:
    """The runs of a line in which no beginning is shared; padding forms one of its own."""
    starts = [i for i, s in enumerate(segments_T) if i == 0 or s != segments_T[i - 1]]
    ends = [*starts[1:], len(segments_T)]
    return [Run(a, b - a) for a, b in zip(starts, ends, strict=True)]


def layout_of(runs: Sequence[Run], device: torch.device) -> Layout:
    """How a line of these runs, which fill it, is taken apart."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    blocks: list[tuple[int, int, int, Places]] = []
    back_T = torch.empty(sum(run.length for run in runs), dtype=torch.int64)
    at = 0
    for block in _blocks(runs):
        long, wide = (
            max(n) for n in zip(*((r.length, r.first + r.length) for r in block), strict=True)
        )
        for number, run in enumerate(block):
            own = torch.arange(run.start, run.start + run.length)
            path = torch.cat([*(torch.arange(a, a + n) for a, n in run.before), own])
            queries.append(_stretched(own, long))
            keys.append(_stretched(path, wide))
            back_T[run.start : run.start + run.length] = (
                at + number * long + torch.arange(run.length)
            )
        at += len(block) * long
        first, ends = (
            torch.tensor(n, device=device)
            for n in zip(*((r.first, r.first + r.length) for r in block), strict=True)
        )
        blocks.append((len(block), long, wide, Places.of(first, ends)))
    return Layout(
        torch.cat(queries).to(device),
        torch.cat(keys).to(device),
        back_T.to(device),
        tuple(blocks),
        shared=any(run.before for run in runs),
        runs=Runs.of(runs),
    )


def _blocks(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of about one length together, the longest first."""
    found: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: (-r.length, -r.first, r.start)):
        block = found[-1] if found else []
        widest = max((r.first + r.length for r in block), default=0)
        even = bool(block) and run.length >= EVEN * block[0].length
        if even and EVEN * widest <= run.first + run.length <= widest / EVEN:
            block.append(run)
        else:
            found.append([run])
    return found


def _stretched(places: Tensor, length: int) -> Tensor:
    """Padded to `length` by repeating the last."""
    return torch.cat([places, places[-1:].expand(length - len(places))])
