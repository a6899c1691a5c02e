"""Tensor parallelism: processes share each matrix, and each has a part of every token's numbers.

A map that leads into attention or feed-forward is cut along its output, the one that leads out along its input:

    h = f(x A_p)  in each process p,    y = Σ_p h B_p

so that a sublayer costs one sum forward and one backward. Which maps are cut how says the model itself (`tensor_plan`);
adapters lie as their maps do (`tensor_place`); what is said within a pass, and when, is in `tensor_calls`. Tensors stay
plain local ones, in their own places and under their own names: a process has smaller ones, and each knows which part
of the whole it is (`tree.pieces`). Norms are whole in every process, and all compute the same there; embedding and
head are shared out by tokens where that can be, and the loss is made of parts of the logits.

All processes of a group have the same rows and draw the same random numbers. So dropout is that of one process where
its input is whole, and beside an adapter also where it is a part; the model's own inside of attention drops the same
places in each process's heads.

Before and after sharing out the model is asked the same question: where the answers differ, its code counts heads in a
way that the plan does not know, and the run is refused. At the first steps the gradients of what is whole are compared
between processes, for the same reason.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afina.errors import ConfigError, RunError
from afina.ops.loss import Part
from afina.parallel.copies import Copies, carried
from afina.parallel.runtime import Named
from afina.parallel.tensor_calls import (
    Behind,
    Enters,
    EntersExperts,
    Entrance,
    Looks,
    Parts,
    Splits,
    without_bias,
)
from afina.parallel.tensor_place import CUT, Placed, marked, placed
from afina.parallel.tensor_plan import WAY_OUT, Way, ways_of
from afina.parallel.tensor_sizes import counts_in, refuse_size
from afina.parallel.watch import is_lost
from afina.seams import ELSEWHERE, PART, vocabulary
from afina.tree import Delta
from afina.tree.pieces import mark, piece_of

WITHIN = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative difference of the answers, at most, of a model in half precision; of a wider one 1e-4."""

COMPARED_STEPS = 2
"""Steps at which gradients are compared."""


class Slices:
    """One process's part of every matrix.

    Args:
        group: the processes that share each matrix.
        model: whole; from here on this process has its own part of it.
        tensors: that train, by name.

    Attributes:
        parts: the processes.
        placed: where the model's tensors lie.

    Raises:
        ConfigError: the model, or what acts in it, cannot be shared out, or not into so many parts.
    """

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, tensors: Named) -> None:
        self.parts = Parts(group)
        ways = ways_of(model, group.size())
        refuse_size(self.parts.which.count, counts_in(model, ways))
        self.placed = placed(model, ways, self.parts.which)
        before = _answer(model)
        _take(model, self.placed, self.parts)
        self._looks = _hook(model, ways, self.parts)
        if before is not None:
            _refuse_other(model, before)
        self._copies = Copies(group)
        self._partial = [name for name in tensors if name in self.placed.partial]
        self._whole = [
            name
            for name in tensors
            if self.placed.pieces[name].whole and name not in self.placed.partial
        ]
        self._compared = 0

    def add_partial(self, own: Named) -> None:
        """Sums the gradients of which each process has a part, once a step.

        Args:
            own: what this process moves, with its gradients, summed over rows.

        Raises:
            RunError: a gradient that should be the same in all processes is not.
        """
        self._copies.reduce({name: own[name] for name in self._partial if name in own})
        if self._compared < COMPARED_STEPS:
            self._compared += 1
            self._compare({name: own[name] for name in self._whole if name in own})

    @contextmanager
    def silent(self) -> Generator[None, None, None]:
        """Inside the block nobody uses what the embedding looks up, and its parts are not put together."""
        for looks in self._looks:
            looks.silent = True
        try:
            yield
        finally:
            for looks in self._looks:
                looks.silent = False

    def _compare(self, own: Named) -> None:
        sizes = [0.0 if p.grad is None else float(p.grad.double().norm()) for p in own.values()]
        if not sizes:
            return
        least = carried(torch.tensor(sizes, dtype=torch.float64), self.parts.group)
        most = least.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.parts.group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.parts.group)
        apart = [
            name
            for name, low, high in zip(own, least.tolist(), most.tolist(), strict=True)
            if high - low > 1e-2 * high
        ]
        if apart:
            raise RunError(
                "processes that share matrices have different gradients of what each holds whole: this model uses it "
                "in a place that its tensor plan does not tell of",
                got=", ".join(apart[:3]),
                cure=WAY_OUT,
            )


@torch.no_grad()
def _take(model: nn.Module, found: Placed, parts: Parts) -> None:
    """Each tensor becomes this process's part of it, and stays the same object: ties and references hold."""
    for name, piece in found.pieces.items():
        parameter = model.get_parameter(name)
        if not piece.whole:
            parameter.data = piece.of(parameter.data).clone(memory_format=torch.contiguous_format)
        mark(parameter, marked(piece, parts.total))
    for name, piece in found.buffers.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        part = piece.of(module.get_buffer(own)).clone(memory_format=torch.contiguous_format)
        setattr(module, own, mark(part, marked(piece, parts.total)))
    for name, share in found.shares.items():
        delta = model.get_submodule(name)
        assert isinstance(delta, Delta)
        delta.shared_out(share.with_total(parts.leave))


def _hook(model: nn.Module, ways: Mapping[str, Way], parts: Parts) -> list[Looks]:
    """What enters and leaves each module goes by its way; how embeddings do."""
    found: list[Looks] = []
    together: dict[str, int] = {}
    for name, way in ways.items():
        if CUT.get(way, ("", 0))[0] == "out":
            parent = name.rpartition(".")[0]
            together[parent] = together.get(parent, 0) + 1
    entrances = {parent: Entrance(parts, maps) for parent, maps in together.items()}
    for name, way in ways.items():
        module: Any = model.get_submodule(name)
        if way in ("columns", "columns_joined", "head"):
            enters = Enters(entrances[name.rpartition(".")[0]])
            module.register_forward_pre_hook(enters, prepend=True)
        if way == "rows_split":
            module.register_forward_pre_hook(Splits(parts), prepend=True)
        if way == "experts":
            first, end = parts.which.span(module.num_experts)
            enters = EntersExperts(parts, module.num_experts)
            module.num_experts, module._is_expert_parallel = end - first, True
            module.register_forward_pre_hook(enters, prepend=True)
        if way in ("rows", "rows_split", "experts"):
            module.register_forward_hook(Behind(parts.leave))
        if way in ("columns_joined", "head"):
            module.register_forward_hook(Behind(parts.join))
        if way == "vocabulary":
            looks = Looks(parts, piece_of(module.weight).shape[0])
            found.append(looks)
            _shift_padding(module, looks)
            module.register_forward_pre_hook(looks, prepend=True)
            module.register_forward_hook(Behind(looks.found))
        if way == "head":
            first = piece_of(module.weight).box[0][0]
            setattr(module, PART, Part(first, parts.enter, parts.most, parts.total))
        if way in ("rows", "rows_split") and module.bias is not None and parts.which.part:
            # Of the parts of a sum the first has the bias.
            module.forward = MethodType(without_bias, module)
            setattr(module, ELSEWHERE, True)
    return found


def _shift_padding(module: Any, looks: Looks) -> None:
    """The row of padding, which learns nothing, by the number that it has here; none where it is elsewhere."""
    padding = module.padding_idx
    if padding is not None:
        here = looks.first <= padding < looks.end
        module.padding_idx = padding - looks.first if here else None


@torch.no_grad()
def _answer(model: nn.Module) -> Tensor | None:
    """What the model says to a few tokens; None where it has no values yet."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    whole: Any = model
    device = whole.get_input_embeddings().weight.device
    ids_BT = torch.arange(1, 6, device=device)[None] * 53 % vocabulary(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        said: Tensor = whole(input_ids=ids_BT, use_cache=False)[0]
    finally:
        for module, mode in modes:
            module.training = mode
    return said


def _refuse_other(model: nn.Module, before: Tensor) -> None:
    """Raises where a model says something else since it is shared out, or nothing at all."""
    got = type(model).__name__
    try:
        after = _answer(model)
        if after is not None and _near(after, before):
            return
    except RuntimeError as error:
        if is_lost(error):
            raise
        got = f"{got}: {error}"
    raise ConfigError(
        "parallel.tensor: this model does not compute the same when its matrices are shared out as its plan says",
        got=got,
        cure=WAY_OUT,
    )


def _near(after: Tensor, before: Tensor) -> bool:
    wide = torch.promote_types(before.dtype, torch.float32)
    within = WITHIN.get(before.dtype, 1e-4) * before.to(wide).norm()
    return after.shape == before.shape and bool((after.to(wide) - before.to(wide)).norm() <= within)
