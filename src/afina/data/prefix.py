"""Rows that begin alike, as a tree: each shared run of tokens is there once.

Instruction data repeats its system prompt and its instruction in every row. The rows of a micro-batch become a prefix
tree whose nodes are runs of tokens, laid end to end in one line so that whatever lies below a node follows it. A token
sees the tokens before it in its own node and all of its node's ancestors: exactly the tokens before it in its row.

    rows  a b c d   a b e   x         line  a b | c d | e | x
          node    0: a b    1: c d (below 0)    2: e (below 0)    3: x

The loss stays that of the rows: a position that stands for several rows counts once for each, and the last token of a
shared run has one target for each way in which the rows go on.

Legend: T tokens of the line, N pairs of a position and its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afina.errors import DataError
from afina.types import IGNORE, Batch, Row, Run

WORTH = 16
"""Tokens that a node must save. Below that, what does not shrink with the tokens costs more than it saves."""


@dataclass(frozen=True)
class Node:
    """A run of tokens.

    Attributes:
        start: place of its first token in the line.
        first: place of that token in its rows.
        length: tokens.
        parent: the node before it in its rows, None at their beginning.
    """

    start: int
    first: int
    length: int
    parent: int | None


@dataclass(frozen=True)
class Tree:
    """The rows of a micro-batch with their common beginnings joined.

    Attributes:
        nodes: in the order of the line; a node follows its parent.
        tokens: ids along the line.
        positions: of each token in its rows.
        owners: the node of each token.
        places: for each row, the places of its tokens in the line.
        order: the rows, as they lie in the line.
    """

    nodes: tuple[Node, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    owners: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def run(self, number: int) -> Run:
        """A node, and the runs before it in its rows."""
        before: list[tuple[int, int]] = []
        at = self.nodes[number].parent
        while at is not None:
            before.append((self.nodes[at].start, self.nodes[at].length))
            at = self.nodes[at].parent
        node = self.nodes[number]
        return Run(node.start, node.length, tuple(reversed(before)))

    def path(self, number: int) -> list[int]:
        """Places of the tokens that the last token of a node sees, in the order of its rows; its own at the end."""
        run = self.run(number)
        runs = [*run.before, (run.start, run.length)]
        return [place for start, length in runs for place in range(start, start + length)]


def tree(rows: Sequence[Row], *, worth: int = WORTH) -> Tree:
    """Joins the rows' common beginnings.

    Args:
        rows: of a micro-batch.
        worth: tokens that a shared run must save over all its rows.
    """
    builder = _Builder(rows, worth)
    builder.group(sorted(range(len(rows)), key=lambda n: rows[n].tokens), 0, None)
    return builder.tree()


def labels(tree: Tree, rows: Sequence[Row]) -> dict[tuple[int, int], int]:
    """What is predicted where: (place, target) -> for how many rows, in order of the place."""
    found: dict[tuple[int, int], int] = {}
    for row, places in zip(rows, tree.places, strict=True):
        for at in range(1, len(row.tokens)):
            if row.trained[at]:
                pair = (places[at - 1], row.tokens[at])
                found[pair] = found.get(pair, 0) + 1
    return dict(sorted(found.items()))


def pack_shared(rows: Sequence[Row], max_tokens: int, *, worth: int = WORTH) -> list[list[Row]]:
    """Rows grouped into micro-batches of at most `max_tokens`, a common beginning counted once.

    Rows are taken in the order of their tokens, so that those which begin alike come together. A row longer than
    `max_tokens` lies alone.

    Raises:
        DataError: `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise DataError("a micro-batch must hold at least one token", got=max_tokens, wanted="≥ 1")
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.tokens):
        if groups and unique_tokens([*groups[-1], row], worth=worth) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def unique_tokens(rows: Sequence[Row], *, worth: int = WORTH) -> int:
    """Tokens that are left when common beginnings are joined."""
    return len(tree(rows, worth=worth).tokens)


def collate_shared(
    rows: Sequence[Row], pad_id: int, pad_to_multiple: int | None = None, *, worth: int = WORTH
) -> Batch:
    """The batch of some rows with common beginnings joined, in one packed line.

    Args:
        rows: at least one, none empty.
        pad_id: what padding positions hold.
        pad_to_multiple: T is rounded up to a multiple of this.
        worth: tokens that a shared run must save.

    Raises:
        DataError: no rows, or one without tokens.
    """
    if not rows or not all(row.tokens for row in rows):
        raise DataError("a batch needs at least one row, and every row a token", got=len(rows))
    found = tree(rows, worth=worth)
    counted = labels(found, rows)
    multiple = pad_to_multiple or 1
    empty = -len(found.tokens) % multiple
    runs = [found.run(number) for number in range(len(found.nodes))]
    if empty:
        runs.append(Run(len(found.tokens), empty))
    width = len(found.tokens) + empty
    return Batch(
        tokens_BT=torch.tensor([[*found.tokens, *[pad_id] * empty]]),
        targets_BT=torch.full((1, width), IGNORE),
        positions_BT=torch.tensor([[*found.positions, *[0] * empty]]),
        segments_BT=torch.tensor([[*found.owners, *[-1] * empty]]),
        packed=True,
        rows=tuple(rows[n].id for n in found.order),
        real_tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(counted.values()),
        runs=tuple(runs),
        entries=(
            torch.tensor([place for place, _ in counted], dtype=torch.int64),
            torch.tensor([target for _, target in counted], dtype=torch.int64),
            torch.tensor(list(counted.values()), dtype=torch.int64),
        ),
    )


class _Builder:
    """Lays nodes one after the other."""

    def __init__(self, rows: Sequence[Row], worth: int) -> None:
        self.rows, self.worth = rows, worth
        self.nodes: list[Node] = []
        self.line: list[int] = []
        self.positions: list[int] = []
        self.owners: list[int] = []
        self.places: list[list[int]] = [[] for _ in rows]
        self.order: list[int] = []

    def group(self, members: list[int], depth: int, parent: int | None) -> None:
        """Lays rows (sorted) that are equal up to `depth`, which lies in the line already."""
        if len(members) == 1:
            self._end(members[0], depth, parent)
            return
        # Sorted rows agree as far as the first and the last of them do.
        common = _common(self.rows[members[0]].tokens, self.rows[members[-1]].tokens, depth)
        if common and common * (len(members) - 1) >= self.worth:
            parent = self._lay(members, depth, common, parent)
            depth += common
            common = 0
        for part in self._parts(members, depth + common):
            if len(part) == len(members):
                # Rows that are equal to their end, and whose sharing is not worth a node: each is laid by itself.
                for member in part:
                    self._end(member, depth, parent)
            else:
                self.group(part, depth, parent)

    def _parts(self, members: list[int], depth: int) -> list[list[int]]:
        """Members by the token at `depth`; those that end there are one part."""
        parts: dict[int | None, list[int]] = {}
        for member in members:
            tokens = self.rows[member].tokens
            parts.setdefault(tokens[depth] if depth < len(tokens) else None, []).append(member)
        return list(parts.values())

    def _end(self, member: int, depth: int, parent: int | None) -> None:
        """Lays what is left of a row, if anything is."""
        self.order.append(member)
        left = len(self.rows[member].tokens) - depth
        if left:
            self._lay([member], depth, left, parent)

    def _lay(self, members: list[int], depth: int, length: int, parent: int | None) -> int:
        number, start = len(self.nodes), len(self.line)
        self.nodes.append(Node(start, depth, length, parent))
        self.line += self.rows[members[0]].tokens[depth : depth + length]
        self.positions += range(depth, depth + length)
        self.owners += [number] * length
        for member in members:
            self.places[member] += range(start, start + length)
        return number

    def tree(self) -> Tree:
        """What was laid."""
        return Tree(
            tuple(self.nodes),
            tuple(self.line),
            tuple(self.positions),
            tuple(self.owners),
            tuple(tuple(places) for places in self.places),
            tuple(self.order),
        )


def _common(one: Sequence[int], other: Sequence[int], start: int) -> int:
    """How many tokens from `start` on are equal in both."""
    stop = min(len(one), len(other))
    at = start
    while at < stop and one[at] == other[at]:
        at += 1
    return at - start
