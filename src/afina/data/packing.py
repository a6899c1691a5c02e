"""Rows into the tensors of one forward pass: end to end without padding, or one a line.

Either way the targets are shifted inside each row and positions begin at 0 in each row, so the loss of a row does not
depend on its neighbours. What keeps attention inside a row is `segments_BT`, which travels in the `Context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from afina.errors import DataError
from afina.types import IGNORE, Batch, Row, Run


def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows grouped into micro-batches of at most `max_tokens`, each row in the first group with room.

    First fit in the given order: groups are in the order they were opened, and rows inside one keep their order, so
    the same rows always give the same groups. A row longer than `max_tokens` lies alone: none is cut or lost here.

    Raises:
        DataError: `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise DataError("a micro-batch must hold at least one token", got=max_tokens, wanted="≥ 1")
    groups: list[list[Row]] = []
    room: list[int] = []
    for row in rows:
        length = len(row.tokens)
        place = next((at for at, left in enumerate(room) if length <= left), None)
        if place is None:
            groups.append([])
            room.append(max_tokens)
            place = len(groups) - 1
        groups[place].append(row)
        room[place] -= length
    return groups


def targets_of(row: Row) -> list[int]:
    """For each token of a row the id it must predict, or IGNORE: its class, or the next token if that is a label."""
    if row.tags is not None:
        return list(row.tags)
    following = zip(row.tokens[1:], row.trained[1:], strict=True)
    return [id if label else IGNORE for id, label in following] + [IGNORE]


def collate(
    rows: Sequence[Row], packed: bool, pad_id: int, pad_to_multiple: int | None = None
) -> Batch:
    """The batch of some rows.

    Padding is known by its segment (-1), never by its id: `pad_id` may be any token, the stop token too.

    Args:
        rows: at least one, none empty.
        packed: end to end in one line (B = 1); otherwise one row a line, padded on the right.
        pad_id: what padding positions hold.
        pad_to_multiple: T is rounded up to a multiple of this, for compiled graphs.

    Raises:
        DataError: no rows, or one without tokens.
    """
    if not rows or not all(row.tokens for row in rows):
        raise DataError("a batch needs at least one row, and every row a token", got=len(rows))
    lines = [list(rows)] if packed else [[row] for row in rows]
    longest = max(sum(len(row.tokens) for row in line) for line in lines)
    width = -(-longest // (pad_to_multiple or 1)) * (pad_to_multiple or 1)
    # Either there is one line, whose rows are numbered from 0, or a line is one row and has its number.
    filled = [_line(line, first, width, pad_id) for first, line in enumerate(lines)]
    tokens, targets, positions, segments = (
        torch.tensor(part) for part in zip(*filled, strict=True)
    )
    labels = [row.label for row in rows if row.label is not None]
    return Batch(
        tokens_BT=tokens,
        targets_BT=targets,
        positions_BT=positions,
        segments_BT=segments,
        packed=packed,
        rows=tuple(row.id for row in rows),
        real_tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(row.trained_tokens for row in rows),
        labels_B=torch.tensor(labels) if len(labels) == len(rows) else None,
    )


def widen(batch: Batch, rows: int, tokens: int, pad_id: int) -> Batch:
    """The batch with padding that changes no loss: so many lines, of so many tokens.

    Nothing sees the padding of a line. A line that is added is a row whose tokens see each other, for attention that
    sees nothing is not a number; nothing of it is predicted.

    Args:
        batch: of `collate` or `collate_shared`.
        rows: lines, no fewer than there are; 1 when packed.
        tokens: of each line, no fewer than there are.
        pad_id: what padding positions hold.
    """
    lines, width = batch.tokens_BT.shape
    more, wide = rows - lines, tokens - width
    if not more and not wide:
        return batch
    runs = batch.runs
    if wide and runs:
        runs = (*runs, Run(width, wide))
    made = {
        "tokens_BT": F.pad(batch.tokens_BT, (0, wide, 0, more), value=pad_id),
        "targets_BT": F.pad(batch.targets_BT, (0, wide, 0, more), value=IGNORE),
        "positions_BT": F.pad(batch.positions_BT, (0, wide, 0, more)),
        "segments_BT": F.pad(batch.segments_BT, (0, wide, 0, more), value=-1),
    }
    if more:
        made["tokens_BT"][lines:, 0] = batch.tokens_BT[0, 0]
        numbers = torch.arange(lines, rows, device=batch.tokens_BT.device)
        made["segments_BT"][lines:] = numbers[:, None]
    labels_B = batch.labels_B
    if labels_B is not None:
        labels_B = F.pad(labels_B, (0, more), value=IGNORE)
    return replace(batch, **made, labels_B=labels_B, runs=runs)


def _line(
    rows: Sequence[Row], first: int, width: int, pad_id: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens, targets, positions and segments of rows end to end, numbered from `first` and padded to `width`."""
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    for number, row in enumerate(rows, start=first):
        tokens += row.tokens
        targets += targets_of(row)
        positions += range(len(row.tokens))
        segments += [number] * len(row.tokens)
    empty = width - len(tokens)
    return (
        tokens + [pad_id] * empty,
        targets + [IGNORE] * empty,
        positions + [0] * empty,
        segments + [-1] * empty,
    )
