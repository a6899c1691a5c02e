"""What processes with different rows tell each other in one step: every message, its kind and its size.

It is stated from shapes alone, so that a plan can be judged before anything is loaded; tests count the messages of real
steps and find these.

    zero 0    all_reduce of what trains
    zero 1    reduce_scatter and all_gather of what trains
    zero 2    reduce_scatter of it in each pass, one all_gather
    zero 3    in each pass: all_gather of every unit, again for blocks in backward; reduce_scatter of what trains

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
from afina.parallel.runtime import Named
from afina.parallel.shares import span
from afina.parallel.units import units_of

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]

NUMBER = 8
"""Bytes of a number that is told: a sum, a least, a norm."""

FLAG = 4
"""Bytes of a tensor's flag: whether a process has a gradient of it."""


class Message(NamedTuple):
    """What processes say together.

    Attributes:
        kind: the collective.
        bytes: of the whole: of what is summed, scattered or put together.
        of: what it is about.
        times: in a step.
    """

    kind: Kind
    bytes: int
    of: str
    times: int = 1


def traffic(
    plan: Plan,
    model: nn.Module,
    tensors: Named,
    rounds: int = 1,
    most_bytes: int = BUCKET_BYTES,
) -> list[Message]:
    """The messages of one process with those that have other rows, in one step after the first two.

    Args:
        plan: of the run, without tensor groups and pipeline.
        model: its shapes and types alone are asked for; it may lie on the meta device, and is not shared out yet.
        tensors: that train, by name.
        rounds: passes of each process.
        most_bytes: of a bucket.
    """
    if plan.data == 1:
        return []
    shares = plan.zero > 0 and plan.shard > 1
    found = told(plan, shares=shares)
    if not shares:
        return [*found, *_copies(tensors, most_bytes)]
    scalars = {n: p for n, p in tensors.items() if not p.dim()}
    rest = {n: p for n, p in tensors.items() if p.dim()}
    found += _copies(scalars, most_bytes)
    if plan.zero == 3:
        return [*found, *_by_units(plan, model, rest, rounds, most_bytes)]
    return [*found, *_by_buckets(plan, rest, rounds, most_bytes)]


def told(plan: Plan, *, shares: bool) -> list[Message]:
    """Numbers: tokens, labels and loss; how many passes there are; the norm."""
    found = [Message("all_reduce", NUMBER, "tokens, labels and loss", 3)]
    if shares and plan.zero > 1:
        found.append(Message("all_reduce", NUMBER, "passes"))
    if shares:
        found.append(Message("all_reduce", NUMBER, "norm"))
    return found


def _copies(tensors: Named, most_bytes: int) -> list[Message]:
    if not tensors:
        return []
    flags = Message("all_reduce", FLAG * len(tensors), "who has gradients")
    sums = [_bytes(b) for b in buckets(tensors.values(), most_bytes)]
    return [flags, *(Message("all_reduce", size, "gradients") for size in sums)]


def _by_buckets(plan: Plan, tensors: Named, rounds: int, most_bytes: int) -> list[Message]:
    if not tensors:
        return []
    found: list[Message] = []
    together = buckets([*tensors.values()][::-1], most_bytes)
    for bucket in together:
        size = plan.shard * _share(bucket, plan.shard)
        times = rounds if plan.zero == 2 else 1
        found.append(Message("reduce_scatter", size, "gradients", times))
        if plan.replicate > 1:
            found.append(Message("all_reduce", size // plan.shard, "gradients, over copies"))
        found.append(Message("all_gather", size, "what trains"))
    flags = FLAG * (len(tensors) + len(together))
    return [*found, Message("all_reduce", flags, "who has gradients")]


def _by_units(
    plan: Plan, model: nn.Module, tensors: Named, rounds: int, most_bytes: int
) -> list[Message]:
    found: list[Message] = []
    again = _gathered_again(model, tensors)
    for name, own in unit_tensors(model, tensors).items():
        times = rounds * (2 if name in again else 1)
        size = plan.shard * _share(own.values(), plan.shard)
        found.append(Message("all_gather", size, name or "what lies outside of blocks", times))
        trains = [p for n, p in own.items() if n in tensors]
        if trains:
            size = plan.shard * _share(trains, plan.shard)
            found.append(Message("reduce_scatter", size, f"gradients of {name or 'it'}", rounds))
    if plan.replicate > 1:
        # Pieces of this process; which are smaller at the end of a tensor is not told here.
        shares = [p[: span(p.shape[0], plan.shard, 0)[1]] for p in tensors.values()]
        found += [
            Message("all_reduce", _bytes(bucket), "gradients, over copies")
            for bucket in buckets(shares, most_bytes)
        ]
    return found


def unit_tensors(model: nn.Module, tensors: Named) -> dict[str, dict[str, nn.Parameter]]:
    """The tensors that stage 3 gathers together, by the name of the unit; those outside of all under ""."""
    found: dict[str, dict[str, nn.Parameter]] = {u.name: {} for u in units_of(model, tensors)}
    found[""] = {}
    for name, parameter in model.named_parameters():
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


def sent(messages: Sequence[Message], parts: int) -> int:
    """Bytes that one of so many processes sends in a step, by the least that a ring of them needs.

    An all_reduce of S bytes is a reduce_scatter and an all_gather, each (parts - 1) / parts of S.
    """
    ways = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    return sum(m.times * ways[m.kind] * m.bytes * (parts - 1) // parts for m in messages)
