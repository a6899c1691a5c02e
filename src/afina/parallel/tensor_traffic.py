"""What processes that share each matrix tell each other in one step: every message, its kind and its size.

    forward     all_reduce behind each map that is cut along its input, each group of experts, and the embedding
    backward    all_reduce in front of each group of maps that are cut along their output and share their input,
                where a gradient flows on
    loss        two all_reduces of a number or two for each label; backward one in front of the head
    once        all_reduce of the gradients of which each process has a part

A Llama block costs two messages forward and two backward, with an adapter beside every map as without. It is stated
from shapes and names alone; tests count the messages of real steps and find these. What an adapter itself asks for
comes to it: DoRA's norms (one all_reduce a pass beside a map that is cut along its input) and AdaLoRA's penalty.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

from afina import seams
from afina.ops.loss import PIECE_BYTES
from afina.parallel.copies import BUCKET_BYTES, buckets
from afina.parallel.plan import Plan
from afina.parallel.runtime import Named
from afina.parallel.shares import span
from afina.parallel.tensor_place import CUT, Which, placed
from afina.parallel.tensor_plan import Way, ways_of
from afina.parallel.traffic import FLAG, NUMBER, Message

ROUTED = 4
"""Bytes of fp32, at least, in which routers and losses are computed."""


def tensor_traffic(
    plan: Plan,
    model: nn.Module,
    tensors: Named,
    tokens: int,
    rounds: int = 1,
    *,
    labels: int | None = None,
    recompute: bool = False,
    most_bytes: int = BUCKET_BYTES,
) -> list[Message]:
    """The messages of one process with those that share its matrices, in one step after the first two.

    Args:
        plan: of the run, without a pipeline.
        model: its shapes and types alone are asked for; it may lie on the meta device, and is not shared out yet.
        tensors: that train, by name.
        tokens: of a pass, padding with them.
        rounds: passes of each process.
        labels: trained tokens of a pass; None is all of them.
        recompute: blocks run again in backward; torch ends there before the last sum of a block, whose result is not
            kept (where a norm comes behind it, it is, and is made once more than said).
        most_bytes: of a bucket.
    """
    if plan.tensor == 1:
        return []
    ways = ways_of(model, plan.tensor)
    labels = tokens if labels is None else labels
    found = list(_forward(model, ways, tokens, rounds, recompute=recompute))
    found += _backward(model, ways, tensors, tokens, rounds)
    found += _loss(plan, model, ways, tensors, (tokens, labels, rounds))
    found += _partial(plan, model, ways, tensors, most_bytes)
    # Beside stages that share the optimiser's state out it is told of there (`traffic.told`).
    if not (plan.zero and plan.shard > 1):
        found.append(Message("all_reduce", NUMBER, "norm"))
    return found


def _forward(
    model: nn.Module, ways: Mapping[str, Way], tokens: int, rounds: int, *, recompute: bool
) -> Iterator[Message]:
    """Forward: what leaves a map."""
    blocks = tuple(f"{block.name}." for block in seams.blocks(model))
    leaving = [n for n, w in ways.items() if w in ("rows", "rows_split", "experts")]
    # The feed-forward's, which comes last whatever the order of names is.
    ends = {b: [n for n in leaving if n.startswith(b) and not _attends(model, n)] for b in blocks}
    last = {names[-1] for names in ends.values() if names}
    for name, way in ways.items():
        again = recompute and name.startswith(blocks) and name not in last
        times = rounds * (2 if again else 1)
        module: Any = model.get_submodule(name)
        if way in ("rows", "rows_split", "columns_joined"):
            weight = module.weight
            size = tokens * weight.shape[0] * weight.element_size()
            kind = "all_gather" if way == "columns_joined" else "all_reduce"
            yield Message(kind, size, f"behind {name}", times)
        if way == "experts":
            yield Message("all_reduce", tokens * _width(module), f"behind {name}", times)
        if way == "vocabulary":
            size = tokens * module.weight.shape[1] * module.weight.element_size()
            yield Message("all_reduce", size, f"behind {name}", times)


def _loss(
    plan: Plan,
    model: nn.Module,
    ways: Mapping[str, Way],
    tensors: Named,
    counts: tuple[int, int, int],
) -> Iterator[Message]:
    """The loss where the head is shared out; beside an adapter at the head logits are put together."""
    tokens, labels, rounds = counts
    name = next((name for name, way in ways.items() if way == "head"), None)
    if name is None:
        return
    module = model.get_submodule(name)
    weight = module.get_parameter("weight")
    vocabulary, width = weight.shape
    trains = any(p is weight or n.startswith(f"{name}.") for n, p in tensors.items())
    if any(p is not weight and not n.startswith(f"{name}.") for n, p in tensors.items()):
        seen = tokens if list(module.children()) else labels
        size = seen * width * weight.element_size()
        yield Message("all_reduce", size, f"what enters {name}", rounds)
    if list(module.children()):
        size = tokens * vocabulary * weight.element_size()
        yield Message("all_gather", size, f"behind {name}", rounds)
        return
    wide = max(weight.element_size(), ROUTED)
    most = max(1, PIECE_BYTES // (vocabulary // plan.tensor * wide))
    each = -(-labels // -(-labels // most)) if labels else 1
    # A head that trains computes its pieces again in backward.
    times = rounds * (2 if trains else 1)
    for start in range(0, labels, each):
        part = min(each, labels - start)
        yield Message("all_reduce", part * wide, "the largest logit of each label", times)
        yield Message("all_reduce", 2 * part * wide, "softmax of each label", times)


def _attends(model: nn.Module, name: str) -> bool:
    return any(name.startswith(f"{owner}.") for owner in seams.attention_modules(model))


def _width(module: nn.Module) -> int:
    """Bytes of what experts give for one token."""
    down = module.get_parameter("down_proj")
    side = 2 if getattr(module, "is_transposed", False) else 1
    return down.shape[side] * down.element_size()


def _backward(
    model: nn.Module, ways: Mapping[str, Way], tensors: Named, tokens: int, times: int
) -> Iterator[Message]:
    """Backward: the gradient of what enters, where one flows on."""
    flows, config = _Flows(model, ways, tensors), cast("Any", model).config
    groups: dict[str, str] = {}
    for name, way in ways.items():
        if way != "head" and CUT.get(way, ("", 0))[0] == "out":
            groups.setdefault(name.rpartition(".")[0], name)
    for parent, name in groups.items():
        if flows.into(name):
            weight = model.get_submodule(name).get_parameter("weight")
            size = tokens * weight.shape[1] * weight.element_size()
            yield Message("all_reduce", size, f"what enters {parent}", times)
    for name, way in ways.items():
        module: Any = model.get_submodule(name)
        if way == "rows_split" and flows.into(name):
            size = tokens * module.weight.shape[1] * module.weight.element_size()
            yield Message("all_gather", size, f"what enters {name}", times)
        if way == "experts" and flows.into(name):
            yield Message("all_reduce", tokens * _width(module), f"what enters {name}", times)
            chosen = int(config.get_text_config().num_experts_per_tok)
            size = tokens * chosen * ROUTED
            yield Message("all_reduce", size, f"how much experts of {name} count", times)


class _Flows:
    """Whether a gradient flows into what a map is given: something that trains lies before it.

    A block is taken to be its attention and then its feed-forward, with what is in neither (norms) in front; and each
    of the two to be what leads into it, and then what leads out.
    """

    def __init__(self, model: nn.Module, ways: Mapping[str, Way], tensors: Named) -> None:
        depths = seams.Depths(model)
        self._attention = tuple(f"{name}." for name in seams.attention_modules(model))
        self._blocks = {f"{block.name}.": block.index for block in seams.blocks(model)}
        self._out = tuple(f"{n}." for n, w in ways.items() if w in ("rows", "rows_split"))
        tied = {id(p) for p in model.get_submodule(seams.input_embedding(model)).parameters()}
        before = [
            self._order(name)
            for name, p in tensors.items()
            if depths.of(name) != "behind" or id(p) in tied
        ]
        self._lowest = min(before, default=(len(self._blocks), 0, 0))

    def _order(self, name: str) -> tuple[int, int, int]:
        """Block, sublayer of it and side of that."""
        block = next((n for begin, n in self._blocks.items() if name.startswith(begin)), -1)
        attends = name.startswith(self._attention)
        if not attends and "mlp." not in name and "feed_forward." not in name:
            return block, 0, -1
        return block, 0 if attends else 1, 1 if f"{name}.".startswith(self._out) else 0

    def into(self, name: str) -> bool:
        """Whether one flows into the module of this name."""
        return self._lowest < self._order(name)


def _partial(
    plan: Plan,
    model: nn.Module,
    ways: Mapping[str, Way],
    tensors: Named,
    most_bytes: int,
) -> list[Message]:
    """Once a step: gradients of which each process has a part."""
    partial = placed(model, ways, Which(0, plan.tensor)).partial
    mine = [p for name, p in tensors.items() if name in partial]
    if not mine:
        return []
    if plan.zero and plan.shard > 1:
        # Pieces of the first process; which are smaller at the end of a tensor is not told here.
        mine = [p[: span(p.shape[0], plan.shard, 0)[1]] if p.dim() else p for p in mine]
    sums = [
        sum(p.numel() * p.element_size() for p in bucket) for bucket in buckets(mine, most_bytes)
    ]
    flags = Message("all_reduce", FLAG * len(mine), "who has gradients")
    return [flags, *(Message("all_reduce", size, "gradients in parts") for size in sums)]
