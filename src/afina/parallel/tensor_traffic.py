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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from afina import seams
from afina.ops.loss import PIECE_BYTES
from afina.parallel.copies import BUCKET_BYTES
from afina.parallel.portion import Portion
from afina.parallel.runtime import Named
from afina.parallel.tensor_place import CUT
from afina.parallel.tensor_plan import Way
from afina.parallel.traffic import Kind, Message, summed

ROUTED = 4
"""Bytes of fp32, at least, in which routers and losses are computed."""


class Pass(NamedTuple):
    """A micro-batch.

    Attributes:
        tokens: padding with them.
        labels: trained tokens.
    """

    tokens: int
    labels: int


def tensor_traffic(
    portion: Portion,
    passes: Sequence[Pass],
    *,
    recompute: bool = False,
    most_bytes: int = BUCKET_BYTES,
) -> list[Message]:
    """The messages of one process with those that share its matrices, in one step after the first two.

    Args:
        portion: what the process holds: of a pipeline's, its own blocks speak, and the ends that it has.
        passes: of the process.
        recompute: blocks run again in backward; torch ends there before the last sum of a block, whose result is not
            kept (where a norm comes behind it, it is, and is made once more than said; where a schedule splits the
            backward pass, blocks run again in both halves, and say more than is said here).
        most_bytes: of a bucket.
    """
    parts = portion.plan.tensor
    if parts == 1:
        return []
    said, found = _Said(portion), list[Message]()
    for one, times in Counter(passes).items():
        each = [
            *said.forward(one.tokens, recompute=recompute),
            *said.backward(one.tokens),
            *said.loss(one),
        ]
        found += [Message(kind, size, of, parts, times * many) for kind, size, of, many in each]
    partial = [name for name in portion.trains if name in portion.placed.partial]
    mine = portion.pieces(partial)
    return [*found, *summed(mine, len(partial), parts, "gradients in parts", most_bytes)]


Line = tuple[Kind, int, str, int]
"""Kind, bytes, what it is about, and how often in a pass."""


class _Said:
    """What the modules of one process say in a pass."""

    def __init__(self, portion: Portion) -> None:
        self._portion, self._model = portion, portion.model
        self._ways: dict[str, Way] = {n: way for n, way in portion.ways.items() if portion.runs(n)}
        self._attention = tuple(f"{name}." for name in seams.attention_modules(self._model))
        self._flows = _Flows(self._model, portion.ways, portion.tensors)

    def forward(self, tokens: int, *, recompute: bool) -> Iterator[Line]:
        """What leaves a map."""
        blocks = tuple(f"{block.name}." for block in seams.blocks(self._model))
        leaving = [n for n, w in self._ways.items() if w in ("rows", "rows_split", "experts")]
        # The feed-forward's, which comes last whatever the order of names is.
        feeds = [n for n in leaving if not n.startswith(self._attention)]
        ends = {b: [n for n in feeds if n.startswith(b)] for b in blocks}
        last = {names[-1] for names in ends.values() if names}
        for name, way in self._ways.items():
            again = recompute and name.startswith(blocks) and name not in last
            times = 2 if again else 1
            module: Any = self._model.get_submodule(name)
            if way in ("rows", "rows_split", "columns_joined"):
                weight = module.weight
                size = tokens * weight.shape[0] * weight.element_size()
                kind = "all_gather" if way == "columns_joined" else "all_reduce"
                yield kind, size, f"behind {name}", times
            if way == "experts":
                yield "all_reduce", tokens * _width(module), f"behind {name}", times
            if way == "vocabulary":
                size = tokens * module.weight.shape[1] * module.weight.element_size()
                yield "all_reduce", size, f"behind {name}", times

    def loss(self, one: Pass) -> Iterator[Line]:
        """The loss where the head is shared out; beside an adapter at the head logits are put together."""
        name = next((name for name, way in self._ways.items() if way == "head"), None)
        if name is None:
            return
        module, tensors = self._model.get_submodule(name), self._portion.tensors
        weight = module.get_parameter("weight")
        vocabulary, width = weight.shape
        trains = any(p is weight or n.startswith(f"{name}.") for n, p in tensors.items())
        if any(p is not weight and not n.startswith(f"{name}.") for n, p in tensors.items()):
            seen = one.tokens if list(module.children()) else one.labels
            yield "all_reduce", seen * width * weight.element_size(), f"what enters {name}", 1
        if list(module.children()):
            size = one.tokens * vocabulary * weight.element_size()
            yield "all_gather", size, f"behind {name}", 1
            return
        wide = max(weight.element_size(), ROUTED)
        most = max(1, PIECE_BYTES // (vocabulary // self._portion.plan.tensor * wide))
        each = -(-one.labels // -(-one.labels // most)) if one.labels else 1
        # A head that trains computes its pieces again in backward; where that is split, in both halves.
        again = 2 if self._portion.plan.splits_backward else 1
        times = 1 + again if trains else 1
        for start in range(0, one.labels, each):
            part = min(each, one.labels - start)
            yield "all_reduce", part * wide, "the largest logit of each label", times
            yield "all_reduce", 2 * part * wide, "softmax of each label", times

    def backward(self, tokens: int) -> Iterator[Line]:
        """The gradient of what enters, where one flows on."""
        flows, config = self._flows, cast("Any", self._model).config
        groups: dict[str, str] = {}
        for name, way in self._ways.items():
            if way != "head" and CUT.get(way, ("", 0))[0] == "out":
                groups.setdefault(name.rpartition(".")[0], name)
        for parent, name in groups.items():
            if flows.into(name):
                weight = self._model.get_submodule(name).get_parameter("weight")
                size = tokens * weight.shape[1] * weight.element_size()
                yield "all_reduce", size, f"what enters {parent}", 1
        for name, way in self._ways.items():
            module: Any = self._model.get_submodule(name)
            if way == "rows_split" and flows.into(name):
                size = tokens * module.weight.shape[1] * module.weight.element_size()
                yield "all_gather", size, f"what enters {name}", 1
            if way == "experts" and flows.into(name):
                yield "all_reduce", tokens * _width(module), f"what enters {name}", 1
                chosen = int(config.get_text_config().num_experts_per_tok)
                size = tokens * chosen * ROUTED
                yield "all_reduce", size, f"how much experts of {name} count", 1


def _width(module: nn.Module) -> int:
    """Bytes of what experts give for one token."""
    down = module.get_parameter("down_proj")
    side = 2 if getattr(module, "is_transposed", False) else 1
    return down.shape[side] * down.element_size()


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
