"""Who sees whom in a packed line, as ranges: the keys that a query sees, the queries that may see a key.

A range, `first ≤ key < last`, says rows, causality and windows at once. Where rows share their beginning, its keys lie
in the line of keys once for each row.

Legend: T queries, S keys (the same tokens where nothing is shared); M rows of a block, L queries and P keys of a row
in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afina.types import Layout


@dataclass(frozen=True)
class Ranges:
    """Who sees whom, as places in the lines of queries and keys; int32.

    Attributes:
        first_T: of each query the first key that it sees.
        last_T: the place behind the last one.
        from_S: of each key the first query that may see it.
        to_S: the place behind the last one.
    """

    first_T: Tensor
    last_T: Tensor
    from_S: Tensor
    to_S: Tensor

    @staticmethod
    def of(*places: Tensor) -> Ranges:
        """From places of any integer type, in the order above."""
        return Ranges(*(x.to(torch.int32).contiguous() for x in places))


def ranges_of(segments_T: Tensor, *, causal: bool, window: int | None = None) -> Ranges:
    """From the numbers of the rows that tokens belong to, which lie together; −1 is padding, which nobody sees."""
    place_T = torch.arange(len(segments_T), device=segments_T.device)
    new_T = torch.ones_like(segments_T, dtype=torch.bool)
    new_T[1:] = segments_T[1:] != segments_T[:-1]
    starts = place_T[new_T]
    ends = torch.cat([starts[1:], place_T[-1:] + 1])
    row_T = new_T.cumsum(0) - 1
    start_T, end_T = starts[row_T], ends[row_T]
    end_T = torch.where(segments_T < 0, start_T, end_T)
    first_T, last_T, from_T, to_T = start_T, end_T, start_T, end_T
    if causal:
        last_T, from_T = torch.minimum(end_T, place_T + 1), torch.maximum(start_T, place_T)
    if window is not None:
        first_T, from_T = (torch.maximum(x, place_T - window + 1) for x in (first_T, from_T))
        last_T, to_T = (torch.minimum(x, place_T + window) for x in (last_T, to_T))
    return Ranges.of(first_T, last_T, from_T, to_T)


def shared_ranges(layout: Layout, *, causal: bool, window: int | None = None) -> Ranges:
    """Of the line's own tokens as queries, and as keys those of `layout.keys_Q`, in its blocks of padded rows."""
    firsts: list[Tensor] = []
    lasts: list[Tensor] = []
    since: list[Tensor] = []
    until: list[Tensor] = []
    queries_at = keys_at = 0
    for rows, length, keys, places in layout.blocks:
        device = places.first_M.device
        base_M1 = keys_at + keys * torch.arange(rows, device=device)[:, None]
        first_M1, keys_M1 = places.first_M[:, None], places.keys_M[:, None]
        # Places in the row: of a query, and of a key.
        query_ML = first_M1 + torch.arange(length, device=device)
        key_MP = torch.arange(keys, device=device).expand(rows, -1)
        low_ML, high_ML = torch.zeros_like(query_ML), keys_M1.expand(-1, length)
        from_MP, to_MP = first_M1.expand(-1, keys), keys_M1.expand(-1, keys)
        if causal:
            high_ML, from_MP = torch.minimum(high_ML, query_ML + 1), torch.maximum(from_MP, key_MP)
        if window is not None:
            low_ML = torch.maximum(low_ML, query_ML - window + 1)
            high_ML = torch.minimum(high_ML, query_ML + window)
            from_MP = torch.maximum(from_MP, key_MP - window + 1)
            to_MP = torch.minimum(to_MP, key_MP + window)
        to_MP = torch.where(key_MP < keys_M1, to_MP, from_MP)  # padding
        start_M1 = layout.queries_P[queries_at : queries_at + rows * length : length, None]
        firsts.append((base_M1 + low_ML).flatten())
        lasts.append((base_M1 + high_ML).flatten())
        since.append((start_M1 - first_M1 + from_MP).flatten())
        until.append((start_M1 - first_M1 + to_MP).flatten())
        queries_at += rows * length
        keys_at += rows * keys
    by_token = (torch.cat(x)[layout.back_T] for x in (firsts, lasts))
    return Ranges.of(*by_token, torch.cat(since), torch.cat(until))
