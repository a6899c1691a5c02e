"""What acts at a map, where that is a low-rank path and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from afina.tree.technique import Delta, acts_after


class LowRank(NamedTuple):
    """A path s B A x beside a map.

    Attributes:
        a_RI: A.
        b_OR: B.
        scaling: s.
        delta: the child, which may give lengths to the rows of both; see `Delta.lengths`.
    """

    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    delta: Delta


def low_rank_path(module: nn.Module) -> LowRank | str | None:
    """What acts at a map.

    Args:
        module: the map.

    Returns:
        The path beside it; None where nothing acts; else, in words, what does.
    """
    known: Any = module
    before = (known._forward_pre_hooks, known._backward_hooks, known._backward_pre_hooks)
    if any(before) or "forward" in vars(module):
        return "something else acts at its maps"
    found: list[Delta] = []
    for hook in known._forward_hooks.values():
        delta = acts_after(hook, module)
        if delta is None:
            return "something else acts at its maps"
        if delta.acts:
            found.append(delta)
    if not found:
        return None
    if len(found) > 1 or not found[0].is_low_rank:
        names = " and ".join(type(delta).__name__.removesuffix("Delta") for delta in found)
        return f"{names} at its maps adds more than a low-rank product"
    return LowRank(*found[0].low_rank(), found[0])
