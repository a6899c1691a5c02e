"""The edits that stand on one model. Several act together, and each may go before those that came after it.

Each comes upon what earlier ones made: flags of training, a base tensor that trains in place, a weight that another
change is folded into. What it found is what it puts back, unless the one that made it is gone by then. So who goes
hands on what it found to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from afina.tree.edit import Edit
    from afina.tree.technique import Technique


@dataclass
class Stand:
    """The place of one edit. It holds neither model nor edit, so that both can be let go of.

    Attributes:
        edit: whose it is.
        techniques: that made it.
        flags: what it found: whether each parameter trained, by name.
    """

    edit: weakref.ref[Edit]
    techniques: tuple[Technique, ...]
    flags: dict[str, bool]


_STANDS: weakref.WeakKeyDictionary[nn.Module, list[Stand]] = weakref.WeakKeyDictionary()


def stands_on(model: nn.Module) -> list[Stand]:
    """The places of the edits that are not undone, in the order in which they came."""
    return list(_STANDS.get(model, ()))


def edits_on(model: nn.Module) -> list[Edit]:
    """Those of the edits that somebody still holds: the others cannot be undone or merged any more."""
    return [edit for stand in stands_on(model) if (edit := stand.edit()) is not None]


def enter(edit: Edit) -> Callable[[], None]:
    """Freezes every parameter of the edit's model, and gives the edit its place; the result takes it away again.

    Who leaves last gives every flag back. Who leaves before later ones hands on the flags that it found.
    """
    model = edit.model
    # By name, for a reference to a tensor would keep it in memory after another has taken its place.
    flags = {name: p.requires_grad for name, p in _parameters(model).items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mine = Stand(weakref.ref(edit), edit.techniques, flags)
    _STANDS.setdefault(model, []).append(mine)

    def leave() -> None:
        every = _STANDS[model]
        later = every[every.index(mine) + 1 :]
        every.remove(mine)
        own = _parameters(model)
        if not later:
            for name, flag in flags.items():
                if name in own:  # an earlier edit that is gone by now took its own along
                    own[name].requires_grad_(flag)
            return
        later[0].flags.update({name: flag for name, flag in flags.items() if name in own})

    return leave


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    whole: Any = model
    return dict(whole.named_parameters(remove_duplicate=False))


def heir_of(edit: Edit, name: str) -> Edit | None:
    """The next later edit that trains the base tensor `name` in place too; None where there is none."""
    every = edits_on(edit.model)
    later = every[every.index(edit) + 1 :] if edit in every else []
    return next((other for other in later if name in other.in_place), None)


def merged_on(model: nn.Module) -> list[Edit]:
    """The edits that are merged, in the order in which they were."""
    found = [edit for edit in edits_on(model) if edit.merged]
    return sorted(found, key=lambda edit: edit.merged_at)


@contextmanager
def originals(model: nn.Module) -> Generator[dict[int, Tensor], None, None]:
    """Inside the block nothing is folded in; what is given are the values before training, by a tensor's `id`."""
    found: dict[int, Tensor] = {}
    for edit in edits_on(model):
        for name, kept in edit.snapshots.items():
            found.setdefault(id(edit.in_place[name]), kept)
    with lifted(merged_on(model)):
        yield found


@contextmanager
def lifted(edits: Sequence[Edit]) -> Generator[None, None, None]:
    """The weights without what these merged edits folded into them; behind the block it is folded into what is there.

    Args:
        edits: in the order in which they were merged.
    """
    for edit in reversed(edits):
        edit.take_out()
    try:
        yield
    finally:
        with torch.no_grad():
            for edit in edits:
                edit.fold_in()
