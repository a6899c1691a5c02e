"""ZeRO, stage 3: processes with different rows share weights out too, frozen ones and those that train.

Each block is gathered when it runs, forward and again backward, and given up afterwards; what lies outside of blocks
(embedding, final norm, head) is gathered once a pass. torch's `fully_shard` does it, each block and the rest one group
with one message. Gradients are summed over processes after each pass, and each keeps its piece of them.

A pass happens inside of `FullShards.within`, around all of it: the loss reads the head's weight outside of the model's
own forward. All processes make equally many; one that has no rows makes one all the same, and sends zeros.

What a process moves are plain tensors (`own`), views of its pieces. torch gives gradients as a mean by default, and
gloo knows no other factor than by the number of processes, so each group is told to sum.

Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.3; torch's "Getting Started with Fully Sharded Data
Parallel (FSDP2)".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from afina.parallel.copies import Copies, Groups, reduce_scatter, sum_up
from afina.parallel.pipeline_stage import Left
from afina.parallel.runtime import Micro, Named, there_and_back
from afina.parallel.shares import shard_of
from afina.parallel.units import Unit, units_of
from afina.tree.pieces import mark

T = TypeVar("T")


class Root(nn.Module):
    """What passes happen inside of.

    Args:
        model: whose tensors are shared out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        """What the call gives; of a pass that ends within the model (a pipeline's stage) how it ended."""
        try:
            found = call()
        except Left as left:
            # A result too: what runs backward from it gathers weights.
            return left, _own(left.hidden_BTD)
        return _own(found) if isinstance(found, Tensor) else found


class Sum:
    """Sums gradients over processes, as `fully_shard` asks for it.

    Attributes:
        silent: this process sends zeros, whatever its gradient is.
    """

    def __init__(self) -> None:
        self.silent = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Each process gets its share."""
        if self.silent:
            input_tensor.zero_()
        reduce_scatter(output_tensor, input_tensor, group)


class FullShards:
    """See `held.Held`: stage 3. The model's tensors are exchanged: `Edit.renew` takes up the new ones.

    Args:
        model: with its values, the same in all processes.
        tensors: that train, by name.
        groups: of the processes.
        mesh: of those that share a copy out.
        offload: pieces lie in the CPU, and are gathered on the GPU.
        holds: whether a parameter of the model is here, by name; others (of a pipeline's other stages) are let be.

    Raises:
        ConfigError: tensors that cannot be shared out together.
    """

    whole = False
    in_rounds = True

    def __init__(
        self,
        model: nn.Module,
        tensors: Named,
        groups: Groups,
        mesh: DeviceMesh,
        *,
        offload: bool = False,
        holds: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._model, self._groups = model, groups
        self._scalars = {n: p for n, p in tensors.items() if not p.dim()}
        self._pieces = {n: shard_of(p, groups) for n, p in tensors.items()}
        self._copies, self._sum = Copies(groups.data), Sum()
        # Looked up before any of them is exchanged.
        here = {name for name, _ in model.named_parameters() if holds(name)}
        self.units = [
            unit
            for unit in units_of(model, tensors)
            if any(n.startswith(f"{unit.name}.") for n in here)
        ]
        gone = {p for n, p in model.named_parameters() if n not in here or not p.dim()}
        self.root = _shared_out(model, self.units, mesh, self._sum, gone, offload=offload)
        self._own: dict[str, nn.Parameter] = {}
        self._ready, self._opened = False, 0

    def embody(self, device: torch.device) -> None:
        """Gives memory to the pieces of a model on the meta device; the values are still to come."""

        def made(tensor: Tensor) -> Tensor:
            empty = tensor.is_meta and isinstance(tensor, DTensor)
            return torch.empty_like(tensor, device=device) if empty else tensor

        apply: Any = self.root._apply
        apply(made)

    def own(self, tensors: Named) -> dict[str, nn.Parameter]:
        """The pieces; only once the model has its values."""
        if not self._own:
            self._own = {n: mark(self._piece(n), piece) for n, piece in self._pieces.items()}
        return dict(self._own)

    def _piece(self, name: str) -> nn.Parameter:
        """This process's part, in the memory where `fully_shard` keeps it."""
        found = self._model.get_parameter(name).detach()
        return nn.Parameter(found.to_local() if isinstance(found, DTensor) else found)

    def within(self, call: Callable[[], T]) -> T:
        """What a pass gives."""
        found: Any = self.root(call)
        if not torch.is_grad_enabled() and not self._opened:
            self.root.reshard()  # no backward pass will do it
        if isinstance(found, tuple) and isinstance(found[0], Left):
            raise Left(cast("Any", found)[1])
        return cast("T", found)

    @contextmanager
    def opened(self) -> Generator[None, None, None]:
        """Inside the block whoever likes calls the model without a gradient, in all processes alike."""
        if not self._ready:
            # Whoever runs first is taken for the root.
            self.within(lambda: None)
            self._ready = True
        self.root.unshard()
        self._opened += 1
        try:
            yield
        finally:
            self._opened -= 1
            if not self._opened:
                self.root.reshard()

    @contextmanager
    def kept(self, *, train: bool) -> Generator[None, None, None]:
        """Inside the block weights stay gathered from one pass to the next, and gradients are summed at its end.

        For passes that processes make in different numbers, and forwards before the backwards of others: a pipeline's.
        """
        modules: list[Any] = [*(unit.module for unit in self.units), self.root]
        with self.opened():
            for module in modules:
                module.unshard()
            self._talks(False)
            try:
                yield
                self._talks(True)
                if train:
                    # A pass of nothing, whose backward sums what all of them left.
                    self.root(lambda: torch.zeros((), requires_grad=True) + 0).backward()
            finally:
                self._talks(True)
                for module in modules:
                    module.reshard()

    def _talks(self, talks: bool) -> None:
        """Whether weights come and go with each pass, and gradients are summed in it."""
        self.root.set_reshard_after_forward(talks)
        self.root.set_reshard_after_forward(False, recurse=False)
        self.root.set_reshard_after_backward(talks)
        self.root.set_requires_gradient_sync(talks)

    def begin(self) -> None:
        """Nothing to prepare."""

    def taken(self, micro: Micro) -> float | None:
        """A pass, of the micro-batch or of nothing."""
        batch = micro.begin()
        if batch is not None:
            return there_and_back(micro, batch)
        kept = {n: p.grad for n, p in self._scalars.items()}
        # Taken away, for a pass adds to what is there.
        for parameter in self._scalars.values():
            parameter.grad = None
        self._sum.silent = True
        try:
            loss = micro.idle()
            if loss.requires_grad:
                loss.backward()
        finally:
            self._sum.silent = False
        for name, gradient in kept.items():
            self._scalars[name].grad = gradient
        return None

    def passed(self, tensors: Named) -> None:
        """Gradients were shared out within the pass."""

    def reduce(self, tensors: Named) -> None:
        """The pieces have their gradients, summed over groups that hold a copy each."""
        self._copies.reduce(self._scalars)
        for name, own in self.own(tensors).items():
            parameter = self._model.get_parameter(name)
            gradient, parameter.grad = parameter.grad, None
            own.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if self._groups.replicate.size() == 1:
            return
        rest = [own for name, own in self._own.items() if name not in self._scalars]
        sum_up([own.grad for own in rest if own.grad is not None], self._groups.replicate)

    def publish(self, tensors: Named) -> None:
        """The next pass gathers what has moved."""


def _own(tensor: Tensor) -> Tensor:
    """Not a view of another: something done to that in place would lose the hook that gathers weights in backward."""
    return tensor if tensor._base is None else tensor.clone()  # pyright: ignore[reportPrivateUsage]


def _shared_out(
    model: nn.Module,
    units: list[Unit],
    mesh: DeviceMesh,
    total: Sum,
    whole: set[nn.Parameter],
    *,
    offload: bool,
) -> Any:
    """The root of a model whose tensors are shared out, unit by unit; less those that are let be."""
    root = Root(model)
    # A unit that holds others comes after them, and takes what they leave.
    modules: list[tuple[nn.Module, bool]] = [(unit.module, True) for unit in units]
    # Memory that is pinned is for copies to a GPU.
    pinned = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for module, again in (*modules, (root, False)):
        shared: FSDPModule = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=again,
            ignored_params=whole,
            offload_policy=policy,
        )
        shared.set_force_sum_reduction_for_comms(True)
        shared.set_gradient_divide_factor(1.0)
        shared.set_custom_reduce_scatter(cast("Any", total))
    cast("FSDPModule", root).set_reduce_scatter_unused_params(True)
    return root
