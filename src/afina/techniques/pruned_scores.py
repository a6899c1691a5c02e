"""What says of each token whether it is kept: a draw, a small network of its state, or how hard its id is to predict.

    network:  s = u · GELU(D x / rms(x) + d)
    loss:     m ← βⁿ m + (1 - βⁿ) · mean of the n losses of an id in a step

A step's n losses of an id count as in the method's one by one, but their order does not, so that a step gives the same
however it is cut. The gate through which the network learns is explained in `token_pruning`.

Legend: x a token's state, s its score, D (W × width), d and u (W) the network, m the running loss of an id, β its
decay. B rows, T tokens, L tokens of a call, N those of a step, V vocabulary, W the network's inner width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afina.ops.pruning import drawn, lengths_of, lowest, quantile_above, rounded, uniform
from afina.tree import seed_of
from afina.tree.timing import Each
from afina.types import IGNORE, Batch

if TYPE_CHECKING:
    from afina.techniques.pruned_pass import Pass

SMALL = 1e-3
"""What the network's gradient is multiplied by, so that it is no part of a norm that is clipped; Adam undoes it."""
STEADY = 0.8
"""Share of the old threshold that a step's own leaves: some steps together know a quantile better than one."""
APART = 1e-6
"""In nats: what is drawn on top of a running loss, so that equal ones are not kept or dropped all together."""


class Chooser(nn.Module):
    """What chooses the tokens that one block keeps.

    Attributes:
        seed: of this block's draws.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    @abstractmethod
    def choose(self, states_LD: Tensor, here: Pass) -> Tensor:
        """Which tokens are kept (L,), bool.

        Args:
            states_LD: what enters the block; of tokens that are not there any more, anything.
            here: the call.
        """

    def gated(self, y: Tensor, x: Tensor) -> Tensor:
        """What the block gives for the kept tokens, through what the chooser learns by; itself for most.

        Args:
            y: what the block gives.
            x: what it was given, of the same shape.
        """
        return y

    def reset(self, seed: int) -> None:
        """The start of a run."""
        self.seed = seed

    def bring(self, each: Each) -> None:
        """After the last pass of a step: what processes saw of their own rows is brought together."""

    def learn(self, share: float) -> None:
        """After a step, told what a row keeps in the next."""

    def bits(self, here: Pass) -> Tensor:
        """A random number for each token (L,), by block, step, row and place."""
        seed = seed_of(self.seed, f"step {here.step}")
        return drawn(seed, here.line.rows_L, here.line.places_L)


class ByDraw(Chooser):
    """Exactly the share of each row, any set of its tokens as likely as any other."""

    def __init__(self, granularity: int = 1) -> None:
        super().__init__()
        self.granularity = granularity

    def choose(self, states_LD: Tensor, here: Pass) -> Tensor:
        """See `Chooser`."""
        front, segments_L = here.line.front, here.segments_L
        own_R = (lengths_of(segments_L) - front).clamp(min=0)
        counts_R = front + rounded(own_R.double() * here.share, self.granularity)
        if here.share >= 1:
            counts_R = front + own_R
        return lowest(self.bits(here), segments_L, counts_R, here.stays_L)


class Seen(NamedTuple):
    """What a block was given in a micro-batch.

    Attributes:
        scores_N: of the tokens that may be dropped.
        own: tokens of the rows' own, all that were there.
        stays: those of them that must be kept.
    """

    scores_N: Tensor
    own: int
    stays: int


class ByThreshold(Chooser):
    """Each token by its own score: kept where it reaches a quantile of the scores of the steps before.

    Attributes:
        threshold: of the next step; below every score until the first.
        seen: of this step's micro-batches.
    """

    threshold: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        start = torch.tensor(-torch.inf, dtype=torch.float64, device=device)
        self.register_buffer("threshold", start, persistent=False)
        self.seen: list[Seen] = []

    @abstractmethod
    def scores(self, states_LD: Tensor, here: Pass) -> Tensor:
        """The score of each token (L,), of what is known of it alone."""

    @torch.no_grad()
    def choose(self, states_LD: Tensor, here: Pass) -> Tensor:
        """See `Chooser`."""
        real_L = here.segments_L >= 0
        free_L = real_L & ~here.stays_L
        scores_L = self.scores(states_LD, here).double()
        if here.told:
            own = real_L & (here.line.places_L >= here.line.front)
            stays = int((own & here.stays_L).sum())
            self.seen.append(Seen(scores_L[free_L], int(own.sum()), stays))
        if here.share >= 1:
            return real_L
        return real_L & (here.stays_L | (scores_L >= self.threshold))

    def reset(self, seed: int) -> None:
        """The first step finds the threshold."""
        super().reset(seed)
        self.threshold.fill_(-torch.inf)
        self.seen.clear()

    @torch.no_grad()
    def bring(self, each: Each) -> None:
        """See `Chooser`: a quantile is one of all rows."""
        none = torch.zeros(0, dtype=self.threshold.dtype, device=self.threshold.device)
        scores_N = torch.cat([none, *(one.scores_N for one in self.seen)])
        counts = [sum(one.own for one in self.seen), sum(one.stays for one in self.seen)]
        told = torch.stack(each(torch.tensor(counts, device=none.device))).sum(0)
        scores_N, own = torch.cat(each(scores_N)), int(told[0])
        self.seen = [Seen(scores_N, own, int(told[1]))] if own else []

    @torch.no_grad()
    def learn(self, share: float) -> None:
        """Moves the threshold to where the share of this step's tokens reaches it."""
        if not self.seen:
            return
        scores_N = torch.cat([one.scores_N for one in self.seen])
        own, stays = sum(one.own for one in self.seen), sum(one.stays for one in self.seen)
        self.seen.clear()
        if not len(scores_N) or not bool(torch.isfinite(scores_N).all()):
            return
        found = quantile_above(scores_N, round(share * own) - stays)
        first = bool(self.threshold.isinf())
        old = found if first else self.threshold
        self.threshold.copy_(found + STEADY * (old - found))


class ByNetwork(ByThreshold):
    """A score that a small network of the token's own state gives, in fp32 (fp64 beside an fp64 base)."""

    def __init__(self, width: int, inner: int, near: Tensor) -> None:
        super().__init__(near.device)
        kind: dict[str, Any] = {
            "dtype": torch.promote_types(near.dtype, torch.float32),
            "device": near.device,
        }
        self.down = nn.Parameter(torch.zeros(inner, width, **kind))
        self.down_bias = nn.Parameter(torch.zeros(inner, **kind))
        self.up = nn.Parameter(torch.zeros(inner, **kind))

    def network(self, states: Tensor) -> Tensor:
        """The scores (…,) of states (…, width), through which no gradient goes on to what made them."""
        x = states.detach().to(self.down.dtype)
        # The least of the type's numbers keeps a state of zeros from dividing by zero.
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).tiny)
        return F.gelu(F.linear(x, self.down, self.down_bias)) @ self.up

    def scores(self, states_LD: Tensor, here: Pass) -> Tensor:
        """See `ByThreshold`."""
        return self.network(states_LD)

    def gated(self, y: Tensor, x: Tensor) -> Tensor:
        """See `Chooser`: y itself, and a gradient for the network."""
        gate = cast("Callable[..., Tensor]", _Gate.apply)  # pyright: ignore[reportUnknownMemberType]
        return gate(y, x, self.network(x))

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Random, so that no two tokens score alike; drawn on the CPU in fp32 so that every device gets the same."""
        super().reset(seed)
        for name, parameter in (("down", self.down), ("up", self.up)):
            generator = torch.Generator().manual_seed(seed_of(seed, name))
            uniform_ = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(uniform_ / math.sqrt(parameter.shape[-1]))
        self.down_bias.zero_()


class ByLoss(ByThreshold):
    """The running loss of a token's id."""

    def scores(self, states_LD: Tensor, here: Pass) -> Tensor:
        """See `ByThreshold`."""
        assert here.hard_L is not None
        return here.hard_L + APART * uniform(self.bits(here))


class LossTable(nn.Module):
    """How hard each id of the vocabulary was to predict lately.

    Attributes:
        losses_V: in nats.
        decay: β.
        start: the value of an id that was not predicted yet.
    """

    losses_V: Tensor

    def __init__(self, vocabulary: int, decay: float, start: float, device: torch.device) -> None:
        super().__init__()
        self.decay, self.start = decay, start
        values = torch.full((vocabulary,), start, dtype=torch.float64, device=device)
        self.register_buffer("losses_V", values, persistent=False)
        self.sums: Tensor | None = None

    def reset(self) -> None:
        """The start of a run."""
        self.losses_V.fill_(self.start)
        self.sums = None

    def of(self, ids_L: Tensor | None) -> Tensor | None:
        """Of each token's id (L,); of a place that has none the value at the start."""
        if ids_L is None:
            return None
        found = self.losses_V[ids_L.clamp(min=0)]
        return torch.where(ids_L >= 0, found, self.start)

    @torch.no_grad()
    def see(self, losses_N: Tensor, batch: Batch, step: int) -> Tensor:
        """Adds up what a micro-batch lost on each id; gives the losses as they are."""
        targets_N = batch.targets_BT[batch.targets_BT != IGNORE]
        if self.sums is None:
            self.sums = torch.zeros(2, *self.losses_V.shape, dtype=torch.float64)
            self.sums = self.sums.to(self.losses_V.device)
        self.sums[0].index_add_(0, targets_N, losses_N.detach().double())
        self.sums[1].index_add_(0, targets_N, torch.ones_like(targets_N, dtype=torch.float64))
        return losses_N

    @torch.no_grad()
    def bring(self, each: Each) -> None:
        """The sums of all rows of a step."""
        mine = torch.zeros(
            2, *self.losses_V.shape, dtype=torch.float64, device=self.losses_V.device
        )
        mine = mine if self.sums is None else self.sums
        self.sums = torch.stack(each(mine.flatten())).sum(0).view_as(mine)

    @torch.no_grad()
    def learn(self) -> None:
        """After a step."""
        if self.sums is None:
            return
        total_V, count_V = self.sums
        self.sums = None
        left_V = self.decay**count_V
        mean_V = total_V / count_V.clamp(min=1)
        new_V = left_V * self.losses_V + (1 - left_V) * mean_V
        # An id without a loss, or with one that is no number, stays as it is.
        self.losses_V.copy_(torch.where(torch.isfinite(new_V), new_V, self.losses_V))


class _Gate(torch.autograd.Function):
    """y, as if it were x + g · (y - x) at g = 1; the gradient of g, made small, is the score's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(y, x)
        ctx.dtype = scores.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        along = grads[0].to(ctx.dtype) * (y.to(ctx.dtype) - x.to(ctx.dtype))
        return grads[0], None, SMALL * along.sum(-1)
