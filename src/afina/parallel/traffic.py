"""What processes with different rows tell each other in one step: every message, its kind and its size.

It is stated from shapes alone, so that a plan can be judged before anything is loaded; tests count the messages of real
steps and find these.

    zero 0    all_reduce of what trains
    zero 1    reduce_scatter and all_gather of what trains
    zero 2    reduce_scatter of it in each pass, one all_gather
    zero 3    in each pass: all_gather of every unit, again for blocks in backward; reduce_scatter of what trains

"What trains" is the part that a process holds of it: its slices beside tensor groups, its stage's blocks in a pipeline.
There passes follow each other as they like, so that weights are gathered once a step, and gradients summed once.

A few messages of a number or two come to these in every step (`told`): sums of tokens and loss, the norm, who has
gradients. At the first two steps the audit speaks as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import Tensor, nn

from afina import seams
from afina.parallel.copies import BUCKET_BYTES, buckets
from afina.parallel.plan import Plan
from afina.parallel.portion import Portion
from afina.parallel.runtime import Named
from afina.parallel.shares import span
from afina.parallel.units import units_of

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "send", "receive"]

NUMBER = 8
"""Bytes of a number that is told: a sum, a least, a norm."""

FLAG = 4
"""Bytes of a tensor's flag: whether a process has a gradient of it."""


class Message(NamedTuple):
    """What processes say together, or one to another.

    Attributes:
        kind: the collective, or send and receive.
        bytes: of the whole: of what is summed, scattered or put together.
        of: what it is about.
        among: processes that take part.
        times: in a step.
    """

    kind: Kind
    bytes: int
    of: str
    among: int
    times: int = 1


def traffic(portion: Portion, rounds: int = 1, most_bytes: int = BUCKET_BYTES) -> list[Message]:
    """The messages of one process with those that have other rows, in one step after the first two.

    Args:
        portion: what the process holds.
        rounds: passes of each process.
        most_bytes: of a bucket.
    """
    plan, trains = portion.plan, portion.trains
    found = told(plan)
    if plan.data == 1:
        return found
    if not portion.shares_state:
        return [*found, *summed(trains.values(), len(trains), plan.data, "gradients", most_bytes)]
    scalars = [p for p in trains.values() if not p.dim()]
    rest = {n: p for n, p in trains.items() if p.dim()}
    found += summed(scalars, len(scalars), plan.data, "gradients", most_bytes)
    if plan.zero == 3:
        return [*found, *_by_units(portion, rest, rounds, most_bytes)]
    return [*found, *_by_buckets(plan, rest, rounds, most_bytes)]


def told(plan: Plan) -> list[Message]:
    """Numbers: tokens, labels and loss; how many passes there are; the norm."""
    shares = plan.zero > 0 and plan.shard > 1
    found: list[Message] = []
    if plan.data > 1:
        found.append(Message("all_reduce", NUMBER, "tokens, labels and loss", plan.data, 3))
    if shares and plan.zero > 1 and plan.pipeline == 1:
        found.append(Message("all_reduce", NUMBER, "passes", plan.processes))
    if shares or plan.tensor > 1 or plan.pipeline > 1:
        found.append(Message("all_reduce", NUMBER, "norm", plan.processes))
    return found


def summed(
    tensors: Iterable[Tensor], flags: int, among: int, of: str, most_bytes: int = BUCKET_BYTES
) -> list[Message]:
    """The messages of `Copies.reduce`.

    Args:
        tensors: that are summed.
        flags: how many tensors there are, empty ones with them.
        among: processes.
        of: what they are.
        most_bytes: of a bucket.
    """
    if not flags or among == 1:
        return []
    sizes = [_bytes(bucket) for bucket in buckets(tensors, most_bytes)]
    return [
        Message("all_reduce", FLAG * flags, "who has gradients", among),
        *(Message("all_reduce", size, of, among) for size in sizes if size),
    ]


def _by_buckets(plan: Plan, tensors: Named, rounds: int, most_bytes: int) -> list[Message]:
    if not tensors:
        return []
    found: list[Message] = []
    together = buckets([*tensors.values()][::-1], most_bytes)
    # A pipeline's passes are one round.
    times = rounds if plan.zero == 2 and plan.pipeline == 1 else 1
    for bucket in together:
        size = plan.shard * _share(bucket, plan.shard)
        found.append(Message("reduce_scatter", size, "gradients", plan.shard, times))
        if plan.replicate > 1:
            each = size // plan.shard
            found.append(Message("all_reduce", each, "gradients, over copies", plan.replicate))
        found.append(Message("all_gather", size, "what trains", plan.shard))
    flags = FLAG * (len(tensors) + len(together))
    return [*found, Message("all_reduce", flags, "who has gradients", plan.data)]


def _by_units(portion: Portion, tensors: Named, rounds: int, most_bytes: int) -> list[Message]:
    plan, found = portion.plan, list[Message]()
    alone = plan.pipeline == 1
    again = _gathered_again(portion.model, tensors) if alone else set[str]()
    rounds = rounds if alone else 1
    for name, own in unit_tensors(portion).items():
        times = rounds * (2 if name in again else 1)
        size = plan.shard * _share(own.values(), plan.shard)
        of = name or "what lies outside of blocks"
        found.append(Message("all_gather", size, of, plan.shard, times))
        trains = [p for n, p in own.items() if n in tensors]
        if trains:
            size = plan.shard * _share(trains, plan.shard)
            of = f"gradients of {name or 'it'}"
            found.append(Message("reduce_scatter", size, of, plan.shard, rounds))
    if plan.replicate > 1:
        found += [
            Message("all_reduce", size, "gradients, over copies", plan.replicate)
            for bucket in buckets(portion.pieces(tensors), most_bytes)
            if (size := _bytes(bucket))
        ]
    return found


def unit_tensors(portion: Portion) -> dict[str, dict[str, nn.Parameter]]:
    """The tensors that stage 3 gathers together, by the name of the unit; those outside of all under ""."""
    units = units_of(portion.model, portion.trains)
    found: dict[str, dict[str, nn.Parameter]] = {unit.name: {} for unit in units}
    found[""] = {}
    for name, parameter in portion.held.items():
        if parameter.dim():
            # The innermost: units inside of others come first.
            unit = next((u for u in found if u and name.startswith(f"{u}.")), "")
            found[unit][name] = parameter
    return {name: own for name, own in found.items() if own}


def _gathered_again(model: nn.Module, tensors: Named) -> set[str]:
    """Units that are gathered in backward too: from the lowest that trains upwards, and the one before, in advance."""
    found: set[str] = set()
    depths = seams.Depths(model)
    for stack, blocks in seams.stacks(model).items():
        names = [f"{stack}.{index}" for index in range(len(blocks))]
        inside = tuple(f"{name}." for name in names)
        below = [n for n in tensors if not n.startswith(inside) and depths.of(n) != "behind"]
        trained = [any(n.startswith(f"{name}.") for n in tensors) for name in names]
        lowest = 0 if below else [*trained, True].index(True)
        found |= set(names[max(0, lowest - 1) :])
    return found


def _share(tensors: Iterable[Tensor], parts: int) -> int:
    """Bytes of one process's share of a message, what fills it up included."""
    return sum(
        span(t.shape[0], parts, 0)[1] * math.prod(t.shape[1:]) * t.element_size() for t in tensors
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def counts(messages: Sequence[Message]) -> Mapping[Kind, int]:
    """How many messages of each kind there are in a step."""
    found: dict[Kind, int] = {}
    for message in messages:
        found[message.kind] = found.get(message.kind, 0) + message.times
    return found


def sent(messages: Iterable[Message]) -> int:
    """Bytes that one process sends, by the least that a ring of those that take part needs.

    An all_reduce of S bytes among n is a reduce_scatter and an all_gather, each (n - 1) / n of S.
    """
    ways = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    found = 0
    for kind, size, _, among, times in messages:
        if kind in ways:
            found += times * (ways[kind] * size * (among - 1) // among)
        elif kind == "send":
            found += times * size
    return found
