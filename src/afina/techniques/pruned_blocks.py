"""The children of blocks that run on some of a row's tokens.

Legend: B rows, T tokens, L = B · T, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from afina.techniques.pruned_kept import KEYWORD, Kept, exchanged, named_arguments
from afina.techniques.pruned_pass import Pass
from afina.techniques.pruned_scores import Chooser
from afina.tree import Around

Call = Callable[..., Any]


class PrunedBlock(Around):
    """A block that runs on the tokens that are kept.

    Attributes:
        by_row: rows are computed apart, for what is dropped of one is not what is dropped of another.
        number: of the block.
        by: chooses; None for a block behind a cut that chooses nothing itself.
        window: tokens that the block sees back; in a call with longer rows it runs whole.
    """

    by_row: ClassVar[bool] = True

    def __init__(self, number: int, by: Chooser | None, window: int | None = None) -> None:
        super().__init__()
        self.only_in_training = True
        self.number, self.by, self.window = number, by, window

    # What is traced is the block inside: how many tokens are kept, and which, differs at every call.
    @torch.compiler.disable(recursive=False)  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
    def around(self, call: Call, base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        here: Pass | None = kwargs.pop(KEYWORD, None)
        if here is None:
            return call(*args, **kwargs)
        here.reached.add(self.number)
        return self.run(here, call, base, args, kwargs)

    def run(
        self, here: Pass, call: Call, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The block's result in a pass: the kept tokens through it, the others past it."""
        by = cast("Chooser", self.by)
        hidden_BTD, named = named_arguments(base, args, kwargs)
        if self.number not in here.chosen:
            self.choose(here, hidden_BTD)
        _, kept = here.chosen[self.number]
        if kept is None:
            output = call(*args, **kwargs)
            return exchanged(output, lambda y: by.gated(y, hidden_BTD))
        x = kept.take(hidden_BTD)
        output = call(x, **kept.arguments(base, named))
        return exchanged(output, lambda y: kept.put(hidden_BTD, by.gated(y, x)))

    def choose(self, here: Pass, hidden: Tensor) -> None:
        """Notes what the block is given in a pass, and what of it the block keeps."""
        by = cast("Chooser", self.by)
        too_long = self.window is not None and here.line.longest > self.window
        chosen = None
        if not too_long:
            chosen = here.kept(by.choose(hidden.flatten(0, 1), here))
        here.chosen[self.number] = (None, chosen)

    def reset(self, seed: int) -> None:
        """See `Delta`."""
        if self.by is not None:
            self.by.reset(seed)


class CutBlock(PrunedBlock):
    """A block whose dropped tokens stay out of all that follow, or one that follows such a block.

    Attributes:
        last: of the stack: behind it all tokens are there again, those that were dropped as they were then.
    """

    def __init__(self, number: int, by: Chooser | None, *, last: bool) -> None:
        super().__init__(number, by)
        self.last = last

    def run(
        self, here: Pass, call: Call, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The block's result in a pass: of the tokens that are left, all of them again behind the last block."""
        hidden, named = named_arguments(base, args, kwargs)
        if self.number not in here.chosen:
            self.choose(here, hidden)
        before, kept = here.chosen[self.number]
        if kept is None:
            output = call(*args, **kwargs)
            return exchanged(output, lambda y: self._gated(y, hidden))
        x = hidden if kept is before else kept.take(_all(hidden, before, None))
        output = call(x, **kept.arguments(base, named))
        return exchanged(output, lambda y: self._given(here, kept, self._gated(y, x)))

    def choose(self, here: Pass, hidden: Tensor) -> None:
        """See `PrunedBlock`."""
        before = kept = here.here
        if self.by is not None:
            all_BTD = _all(hidden, before, here.aside_BTD)
            chosen = here.kept(self.by.choose(all_BTD.flatten(0, 1), here))
            if chosen is not None:
                kept = here.here = chosen
                here.aside_BTD = all_BTD.detach()
        here.chosen[self.number] = (before, kept)

    def _gated(self, y: Tensor, x: Tensor) -> Tensor:
        return y if self.by is None else self.by.gated(y, x)

    def _given(self, here: Pass, kept: Kept, y: Tensor) -> Tensor:
        if not self.last:
            return y
        assert here.aside_BTD is not None
        return kept.put(here.aside_BTD, y)


def _all(hidden: Tensor, before: Kept | None, aside_BTD: Tensor | None) -> Tensor:
    """The states of all tokens, of those that are left as they are now; of others zeros where nothing lies aside."""
    if before is None:
        return hidden
    if aside_BTD is None:
        aside_BTD = hidden.new_zeros(*before.shape, hidden.shape[-1])
    return before.put(aside_BTD, hidden)
