"""What a process really says: every message that goes through torch's dispatcher, by kind, bytes and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - what is said is counted
from torch.utils._python_dispatch import TorchDispatchMode

from afina.parallel.traffic import Message

Words = Counter[tuple[str, int, int]]
"""(kind, bytes, processes) -> how often."""

KINDS = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "send": "send",
    "recv_": "receive",
}
"""An operator of c10d -> how it is called here; another is an error."""


class Heard(TorchDispatchMode):
    """Notes the messages of this process while it is entered.

    Attributes:
        words: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words: Words = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            kind = KINDS[func._schema.name.partition("::")[2]]
            # Of what is put together or scattered, the whole.
            tensors = args[1] if kind == "reduce_scatter" else args[0]
            many = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            group = next(
                dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)
            )
            among = 2 if kind in ("send", "receive") else group.size()
            self.words[kind, sum(t.nbytes for t in many), among] += 1
        return func(*args, **(kwargs or {}))


def stated(messages: Iterable[Message]) -> Words:
    """The same of what was foretold."""
    found: Words = Counter()
    for message in messages:
        found[message.kind, message.bytes, message.among] += message.times
    return found
