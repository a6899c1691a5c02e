"""Cross-entropy of a linear head without ever holding its logits.

    loss_n = logsumexp_v(z_nv) − z_n,target(n),    z = cap(scale · h Wᵀ + b),    cap(z) = c·tanh(z / c)

Only trained positions come in. They are taken a few at a time: the logits of a piece, its losses and, in the same
pass, the gradient ∂loss_n/∂h_n = Σ_v (softmax(z)_nv − [v = target(n)]) · ∂z_nv/∂h_n, which is all that backward needs
when the head is frozen, for each position's gradient is only scaled by what comes from above. A head that trains needs
that factor first, so its pieces are computed again in backward. In bf16 on a CPU that multiplies it itself, all that
lies between the products is one kernel (`ops.native.loss`), in their own place.

Where processes share the vocabulary out, each computes the logits of its own part, and the largest of them, their sum
and the target's are found over all parts; the gradient of h is then a part of a sum.

Legend: N trained positions, D width, V vocabulary, C positions of a piece.

Source: the softmax's gradient, by hand. Pieces as in "Cut Your Losses", Wijmans et al. 2024, arXiv 2411.09009, and
Liger's fused linear cross-entropy, whose formulas (not code) agree with these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from afina.ops.native import loss as native
from afina.ops.native.rooms import rooms
from afina.types import IGNORE


@dataclass(frozen=True)
class Part:
    """The part of a vocabulary that this process has the head of.

    Attributes:
        first: its first id.
        enter: (hidden) -> the same, its gradient summed over the parts.
        most, total: (tensor) -> its largest, or its sum, over the parts.
    """

    first: int
    enter: Callable[[Tensor], Tensor]
    most: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


PIECE_BYTES = 64 * 2**20
"""Size of the widest buffer of a piece: large enough for matrix products at full rate."""


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    part: Part | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Tensor:
    """Minus the log-probability of each target (N,), in fp32 or wider; differentiable in hidden, weight and bias.

    Args:
        hidden_ND: final hidden states of the trained positions.
        weight_VD: the head, or the part of it that is here.
        targets_N: ids; where IGNORE, the loss is 0 and has no gradient.
        bias_V: of the head, as the weight.
        scale: factor of the logits (Cohere's, Granite's).
        softcap: logits become softcap·tanh(logits / softcap) (Gemma 2's).
        part: which part of the head is here; None where it is whole. All processes ask alike.
        piece_bytes: bound of the widest buffer, in bytes.

    Returns:
        (N,).

    Raises:
        ValueError: shapes that do not belong together.
    """
    if hidden_ND.shape[0] != targets_N.shape[0] or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)}, head {tuple(weight_VD.shape)} and targets "
            f"{tuple(targets_N.shape)} do not belong together"
        )
    head = _Head(scale, softcap, piece_bytes, part)
    hidden_ND = hidden_ND if part is None else part.enter(hidden_ND)
    apply = cast("Callable[..., Tensor]", _LinearCrossEntropy.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(hidden_ND, weight_VD, bias_V, targets_N, head)


class _Head:
    """How logits follow from products, how many positions go at once, and which part of the vocabulary is here."""

    def __init__(
        self, scale: float, softcap: float | None, piece_bytes: int, part: Part | None
    ) -> None:
        self.scale, self.softcap, self.piece_bytes = scale, softcap, piece_bytes
        self.part = part

    def pieces(self, positions: int, position_bytes: int) -> list[slice]:
        """Slices of the positions, as even as may be."""
        most = max(1, self.piece_bytes // position_bytes)
        count = -(-positions // most)
        size = -(-positions // count) if count else 0
        return [slice(i, min(i + size, positions)) for i in range(0, positions, size or 1)]

    def logits_(self, products_CV: Tensor) -> Tensor:
        """Logits, in the products' place."""
        if self.scale != 1.0:
            products_CV.mul_(self.scale)
        if self.softcap is not None:
            products_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return products_CV

    def bend(self, logits_CV: Tensor) -> Tensor | float | None:
        """∂logit/∂product; None where it is 1."""
        if self.softcap is None:
            return None if self.scale == 1.0 else self.scale
        return (logits_CV / self.softcap).square_().neg_().add_(1).mul_(self.scale)


class _Room:
    """Memory that all pieces share: fresh memory of that size would cost the system more than it costs to fill.

    Attributes:
        pieces: slices of the positions.
        narrow: in the head's own type, for products and for slopes.
        wide: in fp32 or wider, for logits; the same where the head is as wide, or where a kernel does without.
    """

    def __init__(
        self,
        head: _Head,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        *,
        bias_trains: bool,
    ) -> None:
        self.head, self.weight_VD, self.bias_V = head, weight_VD, bias_V
        # A bias's gradient is the slopes' sum, and the kernel's slopes are rounded before they can be added up.
        self.native = (
            head.part is None and not bias_trains and native.takes(hidden_ND, weight_VD, bias_V)
        )
        narrow = weight_VD.dtype
        wide = narrow if self.native else torch.promote_types(hidden_ND.dtype, torch.float32)
        vocabulary = weight_VD.shape[0]
        self.pieces = head.pieces(hidden_ND.shape[0], vocabulary * wide.itemsize)
        most = max((part.stop - part.start for part in self.pieces), default=0)
        fresh = rooms.take if self.native else weight_VD.new_empty
        self.narrow = fresh(most, vocabulary)
        self.wide = self.narrow if narrow == wide else torch.empty_like(self.narrow, dtype=wide)

    def leave(self) -> None:
        """Gives the memory back, for the next pass; nothing may be asked of it any more."""
        if self.native and self.pieces:
            rooms.give(self.narrow)

    def losses(
        self, hidden_CD: Tensor, targets_C: Tensor, *, slopes: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of a piece, and if asked for the slopes ∂loss/∂products, in the head's own type."""
        products_CV = self._products(hidden_CD)
        if self.native:
            losses_C = self._kernel(products_CV, targets_C, slopes=slopes)
            return losses_C, products_CV if slopes else None
        logits_CV = self._logits(products_CV)
        bend_CV = self.head.bend(logits_CV) if slopes else None
        losses_C, total_C1 = _losses_(logits_CV, targets_C, self.head.part)
        if not slopes:
            return losses_C, None
        slope_CV = _slope_(logits_CV, total_C1, targets_C, bend_CV, self.head.part)
        return losses_C, self._narrowed(slope_CV)

    def slopes(
        self, hidden_CD: Tensor, targets_C: Tensor, above_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Slopes of a piece times what comes from above: in the head's own type, and as wide as they are known."""
        products_CV = self._products(hidden_CD)
        if self.native:
            self._kernel(products_CV, targets_C, above_C=above_C, slopes=True)
            return products_CV, products_CV
        logits_CV = self._logits(products_CV)
        bend_CV = self.head.bend(logits_CV)
        _, total_C1 = _losses_(logits_CV, targets_C, self.head.part)
        slope_CV = _slope_(logits_CV, total_C1, targets_C, bend_CV, self.head.part)
        slope_CV.mul_(above_C[:, None])
        return self._narrowed(slope_CV), slope_CV

    def inward(self, slope_CV: Tensor, to_CD: Tensor) -> None:
        """Writes the slopes of the hidden states."""
        if self.native:
            native.inward(slope_CV, self.weight_VD, to_CD)
        else:
            torch.mm(slope_CV, self.weight_VD, out=to_CD)

    def _products(self, hidden_CD: Tensor) -> Tensor:
        return torch.mm(hidden_CD, self.weight_VD.t(), out=self.narrow[: hidden_CD.shape[0]])

    def _kernel(self, products_CV: Tensor, targets_C: Tensor, **more: Any) -> Tensor:
        form: dict[str, Any] = {"scale": self.head.scale, "softcap": self.head.softcap}
        return native.losses_(products_CV, targets_C, bias_V=self.bias_V, **form, **more)

    def _logits(self, products_CV: Tensor) -> Tensor:
        """Logits of a piece in the wide type."""
        if self.bias_V is not None:
            products_CV += self.bias_V
        if self.wide is not self.narrow:
            products_CV = self.wide[: products_CV.shape[0]].copy_(products_CV)
        return self.head.logits_(products_CV)

    def _narrowed(self, slope_CV: Tensor) -> Tensor:
        """A slope in the head's own type; the products are used up by then."""
        if slope_CV.dtype == self.narrow.dtype:
            return slope_CV
        return self.narrow[: slope_CV.shape[0]].copy_(slope_CV)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: _Head,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        losses_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=wide)
        trains = any(ctx.needs_input_grad[1:3])
        ahead = ctx.needs_input_grad[0] and not trains
        gradient_ND = torch.empty_like(hidden_ND) if ahead else None
        room = _Room(head, hidden_ND, weight_VD, bias_V, bias_trains=ctx.needs_input_grad[2])
        for part in room.pieces:
            losses_N[part], slope_CV = room.losses(hidden_ND[part], targets_N[part], slopes=ahead)
            if gradient_ND is not None and slope_CV is not None:
                room.inward(slope_CV, gradient_ND[part])
        room.leave()
        ctx.head = head
        ctx.ahead = ahead
        if gradient_ND is not None:
            ctx.save_for_backward(gradient_ND)
        elif trains:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (above_N,) = grads
        if ctx.ahead:
            (gradient_ND,) = ctx.saved_tensors
            scaled = gradient_ND * above_N[:, None].to(gradient_ND.dtype)
            return scaled, None, None, None, None
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        wide = above_N.dtype
        by_hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        by_bias = bias_V.new_zeros(bias_V.shape, dtype=wide) if ctx.needs_input_grad[2] else None
        room = _Room(ctx.head, hidden_ND, weight_VD, bias_V, bias_trains=ctx.needs_input_grad[2])
        for part in room.pieces:
            narrow_CV, slope_CV = room.slopes(hidden_ND[part], targets_N[part], above_N[part])
            if by_bias is not None:
                by_bias += slope_CV.sum(0)
            if by_hidden is not None:
                room.inward(narrow_CV, by_hidden[part])
            if by_weight is not None:
                by_weight += narrow_CV.t() @ hidden_ND[part]
        room.leave()
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight_VD.dtype),
            None if by_bias is None else by_bias.to(bias_V.dtype),
            None,
            None,
        )


def _here(targets_C: Tensor, vocabulary: int, part: Part | None) -> tuple[Tensor, Tensor | None]:
    """The targets' places among the ids that are here, any for others; and which are, None where all are."""
    if part is None:
        return targets_C.clamp(min=0), None
    own_C = targets_C - part.first
    return own_C.clamp(0, vocabulary - 1), (own_C >= 0) & (own_C < vocabulary)


def _losses_(logits_CV: Tensor, targets_C: Tensor, part: Part | None) -> tuple[Tensor, Tensor]:
    """Losses (C,) and the denominators of the softmax (C, 1), whose numerators take the logits' place."""
    own_C, here_C = _here(targets_C, logits_CV.shape[1], part)
    picked_C = logits_CV.gather(1, own_C[:, None])[:, 0]
    most_C1 = logits_CV.amax(dim=-1, keepdim=True)
    most_C1 = most_C1 if part is None else part.most(most_C1)
    total_C1 = logits_CV.sub_(most_C1).exp_().sum(dim=-1, keepdim=True)
    if part is not None and here_C is not None:
        both_C2 = torch.cat([total_C1, picked_C.masked_fill(~here_C, 0.0)[:, None]], dim=1)
        both_C2 = part.total(both_C2)
        total_C1, picked_C = both_C2[:, :1], both_C2[:, 1]
    losses_C = (most_C1 + total_C1.log())[:, 0] - picked_C
    return losses_C.masked_fill_(targets_C == IGNORE, 0.0), total_C1


def _slope_(
    numerators_CV: Tensor,
    total_C1: Tensor,
    targets_C: Tensor,
    bend: Tensor | float | None,
    part: Part | None,
) -> Tensor:
    """∂loss/∂products, in the numerators' place."""
    gradient_CV = numerators_CV.div_(total_C1)
    rows_C = torch.arange(targets_C.shape[0], device=targets_C.device)
    own_C, here_C = _here(targets_C, gradient_CV.shape[1], part)
    gradient_CV[rows_C, own_C] -= 1 if here_C is None else here_C.to(gradient_CV.dtype)
    gradient_CV.masked_fill_((targets_C == IGNORE)[:, None], 0.0)
    return gradient_CV if bend is None else gradient_CV.mul_(bend)
