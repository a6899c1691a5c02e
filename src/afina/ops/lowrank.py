"""A low-rank path beside a frozen map, with its own backward.

    h = drop(x) Aᵀ,    y += s · h Bᵀ

    dh = s · dy B,   dB = s · dyᵀ h,   dA = dhᵀ drop(x),   dx += drop(dh A)

The change is added into the base's own output, in place. Saved for backward are x, which the neighbours of a map share,
and h, which is r numbers a token; the mask of dropout is drawn again from its seed. Maps that share their input (query,
key and value; gate and up) pass their As together, and x is read once for all of them.

Legend: N tokens, I and O widths of input and output, R rank (of all maps together in a shared projection), s scale.

Source: the chain rule, by hand; LoRA as in Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Within = tuple[int, int]
"""Where an input that is a part begins in the whole one, and how wide that is."""


def low_rank_add(
    x: Tensor,
    y: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scaling: float,
    *,
    dropout: float = 0.0,
    within: Within | None = None,
) -> Tensor:
    """`y` + s · B (A drop(x)), in `y`'s own memory where `y` may be written.

    Args:
        x: (..., I), the map's input.
        y: (..., O), the map's output; must not be used elsewhere, and its producer must not need it in backward.
        a_RI: any dtype; computed in x's.
        b_OR: any dtype; computed in x's.
        scaling: s.
        dropout: share of the input that A does not see; 0 when not training.
        within: `x` is a part of the input, and the mask that part of the whole's; None is all of it.

    Returns:
        (..., O).
    """
    (h,) = project(x, [a_RI], dropout=dropout, within=within)
    return expand_add(h, y, b_OR, scaling)


def project(
    x: Tensor, downs: Sequence[Tensor], *, dropout: float = 0.0, within: Within | None = None
) -> list[Tensor]:
    """drop(x) Aᵀ for maps that share their input, as one product.

    Args:
        x: (..., I).
        downs: each A, (r, I).
        dropout: as in `low_rank_add`; one mask for all.
        within: as there.

    Returns:
        One (..., r) for each A.
    """
    if torch.compiler.is_compiling() or not _plain(x, *downs):
        dropped = _dropped(x, dropout, within) if dropout else x
        return [F.linear(dropped, a_RI.to(x.dtype)) for a_RI in downs]
    # The seed comes from torch's own generator, so that recomputation, which restores it, gets the same mask.
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    h = _call(_Project, x, (dropout, seed, within), *downs)
    return [h] if len(downs) == 1 else _split(h, downs, -1)


def expand_add(h: Tensor, y: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """`y` + s · h Bᵀ, in `y`'s own memory where `y` may be written.

    Args:
        h: (..., R).
        y: (..., O), see `low_rank_add`.
        b_OR: any dtype; computed in y's.
        scaling: s.
    """
    writable = _in_place and y.is_contiguous() and not (y.is_leaf and y.requires_grad)
    # A compiled graph fuses the addition by itself.
    if (
        torch.compiler.is_compiling()
        or not _plain(h, y, b_OR)
        or not writable
        or h.dtype != y.dtype
    ):
        return y + (F.linear(h * scaling, b_OR.to(h.dtype))).to(y.dtype)
    return _call(_ExpandAdd, y, h, b_OR, scaling)


@contextmanager
def out_of_place() -> Generator[None, None, None]:
    """Inside the block no output of a map is written into: for whoever keeps it."""
    global _in_place
    before, _in_place = _in_place, False
    try:
        yield
    finally:
        _in_place = before


_in_place = True


def dropout_mask(x: Tensor, dropout: float, seed: int, within: Within | None = None) -> Tensor:
    """What `x` is multiplied by: 0 with chance `dropout`, else 1 / (1 − dropout); a function of the seed.

    Of a part of an input it is that part of the whole's, so that processes with the parts drop what one would.
    """
    first, whole = within or (0, x.shape[-1])
    generator = torch.Generator(device=x.device).manual_seed(seed)
    kept = torch.empty((*x.shape[:-1], whole), dtype=x.dtype, device=x.device)
    kept.bernoulli_(1 - dropout, generator=generator)
    return kept[..., first : first + x.shape[-1]].div_(1 - dropout)


def _dropped(x: Tensor, dropout: float, within: Within | None) -> Tensor:
    """drop(x), drawn by torch itself."""
    if within is None:
        return F.dropout(x, dropout)
    first, whole = within
    kept = F.dropout(x.new_ones((*x.shape[:-1], whole)), dropout)
    return x * kept[..., first : first + x.shape[-1]]


def joined(downs: Sequence[Tensor]) -> Tensor:
    """The As below one another (R, I); without a copy where they lie so in memory already."""
    first = downs[0]
    if len(downs) == 1:
        return first
    place = first.storage_offset()
    for a_RI in downs:
        same = a_RI.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or a_RI.storage_offset() != place or not a_RI.is_contiguous():
            return torch.cat(list(downs))
        place += a_RI.numel()
    rows = sum(a_RI.shape[0] for a_RI in downs)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _plain(*tensors: Tensor) -> bool:
    """Whether all are ordinary tensors: a distributed one goes the slower way, which knows how to place it."""
    return all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*args)  # pyright: ignore[reportUnknownMemberType]


def _split(x: Tensor, downs: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Cut into as many ranks as each A has."""
    return list(torch.split(x, [a_RI.shape[0] for a_RI in downs], dim=dim))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, drawn: tuple[float, int, Within | None], *downs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *downs)
        ctx.drawn = drawn
        seen = x * dropout_mask(x, *drawn) if drawn[0] else x
        h_NR = _flat(seen) @ joined(downs).to(x.dtype).t()
        return h_NR.view(*x.shape[:-1], h_NR.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *downs = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        dh_NR = _flat(grads[0])
        mask = dropout_mask(x, *ctx.drawn) if ctx.drawn[0] else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dh_NR @ joined(downs).to(x.dtype)).view_as(x)
            dx = dx if mask is None else dx.mul_(mask)
        needed = ctx.needs_input_grad[2:]
        if not any(needed):
            return dx, None, *(None for _ in downs)
        seen = x if mask is None else x * mask
        parts = _split(dh_NR.t() @ _flat(seen), downs, 0)
        given = [d.to(a.dtype) if n else None for d, a, n in zip(parts, downs, needed, strict=True)]
        return dx, None, *given


class _ExpandAdd(torch.autograd.Function):
    # The output is the first argument: where it is a view (of GPT-2's maps it is), autograd takes the first gradient
    # that backward gives for that of what is written.
    @staticmethod
    def forward(ctx: Any, y: Tensor, h: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(h, b_OR)
        ctx.scaling = scaling
        y.view(-1, y.shape[-1]).addmm_(_flat(h), b_OR.to(h.dtype).t(), alpha=scaling)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, b_OR = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        (dy,) = grads
        dy_NO = _flat(dy)
        dh = db = None
        if ctx.needs_input_grad[1]:
            dh = (dy_NO @ b_OR.to(dy.dtype)).mul_(ctx.scaling).view_as(h)
        if ctx.needs_input_grad[2]:
            db = (dy_NO.t() @ _flat(h)).mul_(ctx.scaling).to(b_OR.dtype)
        return dy, dh, db, None
