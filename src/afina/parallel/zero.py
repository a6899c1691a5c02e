"""ZeRO, stages 1 and 2: processes with different rows share out what trains along its first dimension.

Each keeps the optimiser's state of its own pieces, and from stage 2 on their gradients alone. The tensors themselves
stay whole in every process, so forward and backward pass know nothing of it; a piece is a view into its tensor. What is
frozen is neither touched nor sent.

    stage 1    backward … backward, reduce_scatter of gradients, optimiser on pieces, all_gather of tensors
    stage 2    (backward, reduce_scatter) …, optimiser on pieces, all_gather of tensors

Messages hold many tensors (`Bucket`), so that their number does not grow with that of the tensors. Where several groups
hold a copy each (`Plan.replicate`), what a process has is summed over them too, once a step.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054, sections 5.1 and 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from afina.parallel.copies import (
    BUCKET_BYTES,
    Copies,
    Groups,
    all_gather,
    buckets,
    reduce_scatter,
)
from afina.parallel.runtime import Named
from afina.parallel.shares import shard_of, span
from afina.tree.pieces import mark


class Slot(NamedTuple):
    """A tensor's place in a message.

    Attributes:
        name: of the tensor.
        at: where the piece of any process begins in that process's share of the message.
    """

    name: str
    at: int


@dataclass
class Bucket:
    """Tensors of one dtype that go in one message.

    The message has a share for each process, all of one length: behind a piece that is smaller than the first one
    there are zeros.

    Attributes:
        slots: of the tensors.
        width: numbers of one share.
        like: a tensor of its dtype and device.
        sums: the share of this process, summed so far; the gradients of its pieces lie in it.
        waiting: names of tensors whose gradient of this pass is not there yet.
        sent: in this pass.
    """

    slots: Sequence[Slot]
    width: int
    like: Tensor
    sums: Tensor | None = None
    waiting: set[str] = field(default_factory=set[str])
    sent: bool = False


def bucket_of(names: Sequence[str], tensors: Named, parts: int) -> Bucket:
    """The message of some tensors, for so many processes."""
    slots: list[Slot] = []
    width = 0
    for name in names:
        slots.append(Slot(name, width))
        first, *others = tensors[name].shape
        width += span(first, parts, 0)[1] * math.prod(others)
    return Bucket(slots, width, tensors[names[0]].detach())


class Shards(Copies):
    """See `held.Held`: stage 1, or with `every_round` stage 2.

    A tensor without dimensions stays whole in all processes, its gradient as with `Copies`.

    Args:
        tensors: that train, by name.
        groups: of the processes.
        every_round: gradients are shared out after each pass, not after the last alone.
        early: they are as soon as those of a message are there, so that never all of them are; where backward passes
            follow each other without a word (a pipeline), only afterwards.
        most_bytes: of a message, unless one tensor is more.

    Attributes:
        groups: see above.
        buckets: the messages, in the order in which they go.
    """

    whole = False

    def __init__(
        self,
        tensors: Named,
        groups: Groups,
        *,
        every_round: bool,
        early: bool = True,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(groups.data)
        self.in_rounds, self._early = every_round, every_round and early
        self.groups, self._parts = groups, groups.shard.size()
        self._scalars = {n: p for n, p in tensors.items() if not p.dim()}
        self._rest = {n: p for n, p in tensors.items() if p.dim()}
        self._copies = Copies(groups.data)
        self._own = {n: self._piece(p) for n, p in tensors.items()}
        names = {id(p): n for n, p in self._rest.items()}
        # Backward comes to the last tensors first.
        found = buckets(reversed(self._rest.values()), most_bytes)
        self.buckets = [
            bucket_of([names[id(p)] for p in one], self._rest, self._parts) for one in found
        ]
        self._bucket_of = {slot.name: one for one in self.buckets for slot in one.slots}
        self._there: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._rearm()

    def _piece(self, parameter: nn.Parameter) -> nn.Parameter:
        """This process's part, in the tensor's own memory."""
        part = parameter.detach()
        if parameter.dim():
            first, end = span(parameter.shape[0], self._parts, self.groups.shard.rank())
            part = part[first:end]
        return mark(nn.Parameter(part), shard_of(parameter, self.groups))

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """The pieces."""
        return dict(self._own)

    def begin(self) -> None:
        """A window begins: passes before it (trials) tell nothing."""
        self._end()
        if self._early:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
                for name, parameter in self._rest.items()
            ]

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._there.clear()
        for bucket in self.buckets:
            bucket.sums = None
        self._rearm()

    def _rearm(self) -> None:
        for bucket in self.buckets:
            bucket.waiting, bucket.sent = {slot.name for slot in bucket.slots}, False

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is there: what is complete is sent, in the same order in every process."""
        self._bucket_of[name].waiting.discard(name)
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if not bucket.sent:
                self._send(bucket)

    def passed(self, tensors: Named) -> None:
        """Stage 2: what was not sent within the pass. A process without rows sends zeros."""
        if self.in_rounds:
            self._send_rest()
            self._rearm()

    def _send_rest(self) -> None:
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Sums the gradients of a bucket; each process keeps its share, and the gradients go."""
        message = bucket.like.new_zeros(self._parts, bucket.width)
        for name, at in bucket.slots:
            parameter = self._rest[name]
            if parameter.grad is None:
                continue
            self._there.add(name)
            for share, part in zip(message, parameter.grad.chunk(self._parts), strict=False):
                share[at : at + part.numel()] = part.reshape(-1)
            parameter.grad = None
        share = bucket.like.new_empty(bucket.width)
        reduce_scatter(share, message.view(-1), self.groups.shard)
        bucket.sent = True
        if bucket.sums is not None:
            bucket.sums += share
            return
        bucket.sums = share
        for name, at in bucket.slots:
            own = self._own[name]
            own.grad = share[at : at + own.numel()].view(own.shape)

    def reduce(self, tensors: Named) -> None:
        """The pieces have their gradients; none where no process has one."""
        self._copies.reduce(self._scalars)
        for name, parameter in self._scalars.items():
            self._own[name].grad, parameter.grad = parameter.grad, None
        if not self.in_rounds:
            self._send_rest()
        there, left = self._told()
        for bucket in self.buckets:
            if left[bucket.slots[0].name]:
                self._send(bucket)
            if self.groups.replicate.size() > 1 and bucket.sums is not None:
                dist.all_reduce(bucket.sums, group=self.groups.replicate)
        for name, many in there.items():
            if not many:
                self._own[name].grad = None
        self._end()

    def _told(self) -> tuple[dict[str, float], dict[str, float]]:
        """How many processes had a gradient of each tensor, and how many have one left of each bucket.

        What runs backward inside the backward pass reaches a tensor more than once, also after it was sent.
        """
        names = list(self._rest)
        left = {
            b.slots[0].name: float(any(self._rest[s.name].grad is not None for s in b.slots))
            for b in self.buckets
        }
        if not names:
            return {}, {}
        mine = [*(float(name in self._there) for name in names), *left.values()]
        flags = torch.tensor(mine, device=self.buckets[0].like.device)
        dist.all_reduce(flags, group=self.groups.data)
        found = flags.tolist()
        return (
            dict(zip(names, found, strict=False)),
            dict(zip(left, found[len(names) :], strict=True)),
        )

    @torch.no_grad()
    def publish(self, tensors: Named) -> None:
        """Every process gets the pieces of the others."""
        for bucket in self.buckets:
            share = bucket.like.new_zeros(bucket.width)
            for name, at in bucket.slots:
                own = self._own[name]
                share[at : at + own.numel()] = own.reshape(-1)
            message = bucket.like.new_empty(self._parts * bucket.width)
            all_gather(message, share, self.groups.shard)
            for name, at in bucket.slots:
                parts = self._rest[name].detach().chunk(self._parts)
                for told, part in zip(message.view(self._parts, -1), parts, strict=False):
                    part.copy_(told[at : at + part.numel()].view(part.shape))
