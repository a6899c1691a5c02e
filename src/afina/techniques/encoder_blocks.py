"""The children that prune an encoder's tokens: one that begins each pass, and one around each block.

What leaves is decided behind a block, once for each pass: a block that is recomputed in backward finds it in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from afina.errors import TechniqueError
from afina.ops import prefix
from afina.ops.merging import key_mass, portion, write
from afina.techniques import encoder_choice as choice
from afina.techniques import encoder_watch
from afina.techniques.encoder_rows import (
    CALL,
    Change,
    Columns,
    Given,
    Journey,
    real_tokens,
    short_mask,
    takes_flat_masks,
)
from afina.tree import Around, Delta, Side, front_of
from afina.tree.technique import Removable


@dataclass(frozen=True)
class Stage:
    """What a block's child does.

    Attributes:
        score: what decides.
        dropped: what becomes of those that leave.
        number: of the stage, from 1; the tokens leave behind this block, or for random in front of it.
        stages: in all.
        temperature: of learning a threshold.
    """

    score: str
    dropped: str
    number: int
    stages: int
    temperature: float

    def share(self, keep: float) -> float:
        """The share of a row's tokens that is left behind the block: by equal parts, or by equal numbers merged."""
        done = self.number / self.stages
        return 1 - (1 - keep) * done if self.dropped == "merge" else keep**done


class EncoderStack(Delta):
    """At the trunk: begins a pass, of which the blocks are told by a keyword.

    Attributes:
        keep: share of the tokens that is left in evaluation.
        training_keep: the same in training, just now.
    """

    alone: ClassVar[str] = "each chooses the tokens that stay"
    scalable: ClassVar[bool] = False

    def __init__(self, keep: float, always: int, score: str) -> None:
        super().__init__()
        self.keep = self.training_keep = keep
        self.always = always
        self.score = score

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """What the module gave."""
        return y

    def reset(self, seed: int) -> None:
        """Nothing to start from."""

    def hooks(self, module: nn.Module, key: str) -> Sequence[Removable]:
        """Acts before the module does."""
        return [module.register_forward_pre_hook(_Begins(key), with_kwargs=True)]

    def journey(self, training: bool) -> Journey | None:
        """A pass; None where nothing is to leave."""
        keep = self.training_keep if training else self.keep
        idle = self.score == "random" and not training
        if idle or (self.score != "learned" and keep >= 1):
            return None
        # Drawn here, in front of the blocks: one that is recomputed must not draw again.
        seed = int(torch.randint(2**62, ())) if self.score == "random" else 0
        return Journey(keep, self.always, seed)


class _Begins:
    """Calls the child of that name; a deep copy's own child, in a copy."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        child: EncoderStack = getattr(module, self.key)
        journey = child.journey(module.training) if child.acts else None
        if journey is None:
            return args, kwargs
        journey.protected += front_of(module)
        return args, {**kwargs, CALL: journey}


class _Last:
    """The share of factors of the newest pass: it hangs on a graph, which no copy of a module takes along."""

    def __init__(self) -> None:
        self.share: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> _Last:
        return _Last()


class EncoderBlock(Around):
    """Runs one block on shorter rows, and decides what leaves behind it.

    Attributes:
        threshold: a scalar, where it is learnt.
        last: the mean factor of the newest pass in training, where it is learnt.
    """

    follows: ClassVar[Mapping[str, Side]] = {"threshold": "none"}

    def __init__(
        self, number: int, blocks: int, stage: Stage | None, threshold: Tensor | None
    ) -> None:
        super().__init__()
        self.number, self.blocks, self.stage = number, blocks, stage
        self.threshold = None if threshold is None else nn.Parameter(threshold)
        self.start = 0.0
        self.last = _Last()

    def reset(self, seed: int) -> None:
        """The threshold at its start."""
        if self.threshold is not None:
            with torch.no_grad():
                self.threshold.fill_(self.start)

    def silent_at_times(self) -> frozenset[str]:
        """A threshold far from how much any token is looked at has no gradient."""
        return frozenset({"threshold"} if self.threshold is not None else ())

    def around(self, call: Callable[..., Any], base: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `Around.around`.

        Which tokens leave is decided once: a block that is recomputed in backward finds it in the pass.
        """
        run = cast("Callable[..., Any]", _outside_of_graphs)
        return run(self.run, call, base, args, kwargs)

    def run(
        self,
        call: Callable[..., Any],
        base: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What `around` says."""
        journey: Journey | None = kwargs.pop(CALL, None)
        if journey is None:
            return call(*args, **kwargs)
        given = Given.of(base, args, kwargs)
        if self.number == 0 and journey.real_BT is None:
            self._begin(journey, given)
        if self.stage is not None and self.stage.score == "random":
            return self._drawn(call, given, journey, self.stage)
        columns = journey.given.get(self.number)
        if self.stage is None:
            y = self._run(call, given, journey, columns, {})
            rows = y if columns is None else write(given.rows_BSD, y, columns.column_BS)
        elif self._soft(base):
            rows = self._softly(call, base, given, journey)
        else:
            rows = self._changed(call, base, given, journey, columns)
        if self.number == self.blocks - 1:
            return rows[:, : journey.tokens] if rows.shape[1] > journey.tokens else rows
        change = journey.changes.get(self.number)
        journey.given.setdefault(self.number + 1, columns if change is None else change.after)
        return rows

    def _begin(self, journey: Journey, given: Given) -> None:
        if given.values.get("afina_context") is not None:
            raise TechniqueError(
                "token_pruning: rows of an encoder lie packed, and which tokens are of one row is not known here",
                cure="set data.packing=false",
            )
        if given.values.get(prefix.KEYWORD) is not None:
            raise TechniqueError(
                "token_pruning: a prefix's keys stand in attention alone, and how much they are looked at is not known",
                got="prefix beside it",
                cure="take prompt or p_tuning, whose places are tokens; or leave token_pruning out",
            )
        journey.tokens = given.rows_BSD.shape[1]
        journey.real_BT = real_tokens(given.mask, given.rows_BSD)

    def _soft(self, base: nn.Module) -> bool:
        return self.threshold is not None and base.training

    def _run(
        self,
        call: Callable[..., Any],
        given: Given,
        journey: Journey,
        columns: Columns | None,
        more: Mapping[str, Any],
    ) -> Tensor:
        """The block's result for its columns."""
        if columns is None:
            return given.run(call, more)
        if self.number not in journey.masks:
            journey.masks[self.number] = short_mask(
                given.mask, columns, given.rows_BSD, flat=takes_flat_masks(given.block)
            )
        return given.run_short(call, columns, journey.masks[self.number], more)

    def _changed(
        self,
        call: Callable[..., Any],
        base: nn.Module,
        given: Given,
        journey: Journey,
        columns: Columns | None,
    ) -> Tensor:
        """The rows behind a block behind which tokens leave."""
        if self.number in journey.changes:
            y = self._run(call, given, journey, columns, {})
        else:
            with encoder_watch.watched(base) as watch:
                y = self._run(call, given, journey, columns, {encoder_watch.CALL: watch})
            with torch.no_grad():
                before = choice.whole(journey) if columns is None else columns
                journey.changes[self.number] = self._decide(watch, before, journey)
        change = journey.changes[self.number]
        return choice.applied(change, given.rows_BSD, y, columns, journey.tokens)

    def _decide(self, watch: encoder_watch.Watch, before: Columns, journey: Journey) -> Change:
        stage = self.stage
        assert stage is not None
        count_B = portion(journey.count_B, stage.share(journey.keep), journey.protected)
        if stage.score == "similarity":
            return choice.by_likeness(watch.given[1].mean(1), before, count_B, journey)
        mass_BR = _mass(watch, before)
        fuses = stage.dropped == "fuse"
        if self.threshold is not None:
            return choice.by_threshold(mass_BR, before, self.threshold, journey, fuses=fuses)
        return choice.by_mass(mass_BR, before, count_B, journey, fuses=fuses)

    def _softly(
        self, call: Callable[..., Any], base: nn.Module, given: Given, journey: Journey
    ) -> Tensor:
        """All tokens, each times its factor."""
        assert self.threshold is not None
        assert self.stage is not None
        with encoder_watch.watched(base) as watch:
            y = given.run(call, {encoder_watch.CALL: watch})
        mass = _mass(watch, choice.whole(journey))
        rows, share = choice.softly(y, mass, self.threshold, self.stage.temperature, journey)
        self.last.share = share if share.requires_grad else None
        return rows

    def _drawn(
        self, call: Callable[..., Any], given: Given, journey: Journey, stage: Stage
    ) -> Tensor:
        """The rows with some tokens computed, and the others as they came."""
        columns = journey.given.get(self.number)
        if columns is None:
            columns = choice.at_random(journey, journey.keep, self.number)
            journey.given[self.number] = columns
        y = self._run(call, given, journey, columns, {})
        return write(given.rows_BSD, y, columns.column_BS)


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
def _outside_of_graphs(run: Callable[..., Any], *args: Any) -> Any:
    """Shapes depend on the rows, which a compiled graph cannot follow."""
    return run(*args)


def _mass(watch: encoder_watch.Watch, columns: Columns) -> Tensor:
    """How much each column of the watched block is looked at (B, R): 1 is the mean of those that are no padding."""
    q_BHTD, k_BHSD = watch.given
    mask = watch.mask
    if mask is not None and mask.dim() == 2:
        mask = mask.bool()[:, None, None]
    return key_mass(q_BHTD, k_BHSD, mask, columns.real_BR, watch.scale)
