"""How deep in a model each of its tensors lies: before the blocks, in one of them, or behind the last one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from afina.seams.ends import head, task_head
from afina.seams.stack import Block, blocks

Place = Block | Literal["before", "behind"]
"""A block, or what lies before the first one or behind the last one of its stack."""


class Depths:
    """Where the tensors of one model lie, by the modules that hold them.

    Behind the blocks is what makes an answer of their states: norms, poolers, the head, all that lies outside of the
    trunk, and an embedding whose weight is the head's as well. Before them is every other embedding, with what stands
    beside it under a name that speaks of embeddings, as BERT's `embeddings.LayerNorm`.

    Args:
        model: any; its modules are looked at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = {block.name: block for block in blocks(model)}
        end = head(model)
        self._behind = {*task_head(model), *([] if end.name is None else [end.name])}
        self._tied = {id(p) for p in end.module.parameters()} if end.module and end.tied else set()
        trunk = getattr(model, "base_model", None)
        named: Iterable[tuple[str, nn.Module]] = model.named_modules()
        self._trunk = next((name for name, module in named if module is trunk), "")

    def of(self, name: str) -> Place | None:
        """Where the tensor of this name lies, a child's too; None for what is none of the above."""
        *modules, _ = holders = _beginnings(name)
        inside = next((self._blocks[one] for one in modules if one in self._blocks), None)
        if inside is not None:
            return inside
        if self._behind & set(modules) or id(self._model.get_parameter(name)) in self._tied:
            return "behind"
        if self._trunk and self._trunk not in holders:
            return "behind"
        for holder in modules:
            found = _kind(holder, self._model.get_submodule(holder))
            if found is not None:
                return found
        return None


def _beginnings(name: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` of `a.b.c`."""
    pieces = name.split(".")
    return [".".join(pieces[: i + 1]) for i in range(len(pieces))]


def _kind(name: str, module: nn.Module) -> Literal["before", "behind"] | None:
    """What a module outside the blocks is by itself; None for one that only holds others."""
    own = name.rpartition(".")[2].lower()
    if isinstance(module, nn.Embedding) or "embed" in own:
        return "before"
    if "norm" in type(module).__name__.lower() or "norm" in own or "pooler" in own:
        return "behind"
    return None
