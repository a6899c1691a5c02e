"""How the blocks of a model are run: plainly, compiled, or recomputed in backward instead of remembered.

Each block's call is exchanged, in the place where `nn.Module.compile` puts its own; the block, its hooks and its names
stay as they are. All blocks of one kind share one compiled graph, in which the number of tokens is a variable, so
rows of other lengths compile nothing. Attention is not part of the graph: it has its own kernels.

Recomputing keeps a block's input alone and runs it again in backward: about a third more work for a small part of the
memory. Selectively, the results of matrix products are kept too, and only what is cheap is computed again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; what is kept selectively
follows Korthikanti et al. 2022, arXiv 2205.05198, section 4.2, turned to where attention is cheap and maps are not.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._dynamo import config as compiler
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from afina import seams
from afina.errors import TechniqueError
from afina.models import fused
from afina.ops.lowrank import out_of_place
from afina.ops.native.rooms import rooms, wide_rooms
from afina.seams.calls import Call, calls, put
from afina.tree import Around

Recompute = bool | int | Literal["selective"]
"""False: none; True: every block; n: every n-th block; selective: see above."""

_KEPT = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Blocks:
    """The blocks of one model, and how they are run.

    Attributes:
        blocks: all of them, those of two stacks one after the other.
        recompute: which are run again in backward.
        compiled: whether they run compiled.
        unfused: why they are not computed as one operation each, in words; None where they are.
    """

    def __init__(
        self, model: nn.Module, recompute: Recompute = False, *, must_compile: bool = False
    ) -> None:
        """Changes nothing yet.

        Raises:
            TechniqueError: blocks are to be recomputed or compiled, and the model has none, or none that may be.
        """
        if recompute is not False:
            seams.require_stack(model, "train.recompute")
        if must_compile:
            seams.require_stack(model, "train.compile")
        self.blocks = [block for stack in seams.stacks(model).values() for block in stack]
        self._apart = [_runs_itself(block) for block in self.blocks]
        if must_compile and any(self._apart):
            raise TechniqueError(
                "train.compile=true: reversible blocks are not compiled",
                got=f"{sum(self._apart)} of {len(self._apart)} blocks",
                cure="leave train.compile out, or take train.recompute=true in place of reversible",
            )
        if recompute is not False and self.blocks and all(self._apart):
            raise TechniqueError(
                "train.recompute would do nothing: every block is reversible, and so runs again in backward already",
                cure="leave one of the two out",
            )
        self.recompute: Recompute = recompute
        self.compiled = False
        self.model = model
        self.unfused: str | None = "no pass was made"

    @property
    def compilable(self) -> bool:
        """Whether there are blocks, and all of them may be compiled."""
        return bool(self.blocks) and not any(self._apart)

    @contextmanager
    def running(self) -> Generator[Blocks, None, None]:
        """Inside the block the model's blocks run this way; afterwards as before."""
        before = calls(self.blocks)
        try:
            self.unfused = self._unfused()
            self._put()
            # The compiler would take blocks with hooks and without for the same, and where only some have an adapter,
            # a graph that knows of none would serve them all.
            with compiler.patch(skip_nnmodule_hook_guards=False):
                yield self
        finally:
            put(self.blocks, before)
            self.compiled = False
            rooms.clear()
            wide_rooms.clear()

    def compile(self, wanted: bool) -> None:
        """From here on compiled, or not; the graphs are made at the next call."""
        self.compiled = wanted
        self._put()

    def _unfused(self) -> str | None:
        if self.recompute == "selective":
            return "they are recomputed selectively"
        found = fused.acts_elsewhere(self.model)
        reasons = [found, *(fused.reason(block) for block in self.blocks)]
        return next((reason for reason in reasons if reason is not None), None)

    def _put(self) -> None:
        for number, block in enumerate(self.blocks):
            call: Call | None = None
            if self._apart[number]:
                continue
            if self.unfused is None:
                call = fused.fused(block, block._call_impl)
            if self.compiled:
                call = cast("Call", torch.compile(block._call_impl, dynamic=True))  # pyright: ignore[reportUnknownMemberType]
            # A compiled graph computes again by itself what is cheap, so for it there is nothing to select.
            if self.recompute == "selective" and not self.compiled:
                call = partial(_recomputed, partial(_separately, block._call_impl), _contexts)
            elif _again(number, self.recompute):
                call = partial(_recomputed, call or block._call_impl, noop_context_fn)
            put([block], [call])


@contextmanager
def plainly(model: nn.Module) -> Generator[None, None, None]:
    """Inside the block the model's blocks run as the model itself runs them: for passes without a gradient."""
    blocks = [block for stack in seams.stacks(model).values() for block in stack]
    before = calls(blocks)
    try:
        put(blocks, [None] * len(blocks))
        yield
    finally:
        put(blocks, before)


def _runs_itself(block: nn.Module) -> bool:
    """Whether a child of the block runs it again in backward."""
    return any(isinstance(child, Around) and child.recomputes for child in block.children())


def _again(number: int, recompute: Recompute) -> bool:
    """Whether a block is recomputed whole."""
    if isinstance(recompute, str):
        return False
    return recompute is True or (recompute is not False and number % recompute == 0)


def _recomputed(call: Call, contexts: Call, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    run = cast("Call", checkpoint)
    return run(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _separately(call: Call, *args: Any, **kwargs: Any) -> Any:
    """The call with nothing written into the results of products, which are kept."""
    with out_of_place():
        return call(*args, **kwargs)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return cast("Call", create_selective_checkpoint_contexts)(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
