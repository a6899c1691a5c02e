"""A decoder block of the Llama kind as one operation: its forward pass, and its backward pass by hand.

    q, k, v = rot(h W_q), rot(h W_k), h W_v       with h = norm(x)
    x' = x + attention(q, k, v) W_o
    y = x' + (silu(h' W_g) * h' W_u) W_d          with h' = norm(x')

Each map may have a low-rank path beside it, z = W x + s B (A x), which trains, and lengths for the rows of both,
(m / n) ∘ z, of which m trains and n is a constant (DoRA). Of the block's own weights those train that ask for a
gradient. Kept for backward are x, q, k, v, the attention's result and its log-sum-exp, x', h' W_g, h' W_u, r numbers a
token for each path, and z of q, k, v, o and d where they have lengths; norms and the gate's product are computed again.
A product of a map and its path is one product, rounded once.

Legend: T tokens of a packed line, D width, I inner width, H heads, K key heads, R rank.

Source: the chain rule, by hand; the model's own forward is Touvron et al. 2023, arXiv 2302.13971.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from afina.ops import native
from afina.ops.native.attention import attend, attend_back
from afina.ops.native.gemm import gemm, padded, part
from afina.ops.native.rooms import rooms
from afina.ops.packed import stored
from afina.types import Runs


@dataclass(frozen=True)
class Lengths:
    """Lengths of a map's rows.

    Attributes:
        m_O: to be; fp32, and not 0.
        n_O: that map and path have; fp32.
        gain_O: m / n.
    """

    m_O: Tensor
    n_O: Tensor
    gain_O: Tensor


@dataclass(frozen=True)
class Map:
    """A map and the path beside it.

    Attributes:
        weight_OI: bf16, or in few bits for products in bf16.
        bias_O: bf16, where there is one.
        a_RI, b_OR: of the path, fp32; None where there is none.
        scaling: s.
        lengths: of the rows of map and path; None leaves them as they are.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    a_RI: Tensor | None
    b_OR: Tensor | None
    scaling: float
    lengths: Lengths | None = None

    @property
    def out(self) -> int:
        """Width of its output."""
        return self.weight_OI.shape[0]

    @property
    def learnt(self) -> list[Tensor]:
        """What trains: A and B where there is a path, lengths, then its own weights that ask for a gradient."""
        m_O = None if self.lengths is None else self.lengths.m_O
        path = [x for x in (self.a_RI, self.b_OR, m_O) if x is not None]
        own = [x for x in (self.weight_OI, self.bias_O) if x is not None and x.requires_grad]
        return path + own


@dataclass(frozen=True)
class Block:
    """What a block consists of.

    Attributes:
        q, k, v, o, gate, up, down: its maps.
        first_norm_D, second_norm_D: bf16 weights.
        first_eps, second_eps: of the norms.
        heads, key_heads: numbers of them.
        scale: of the scores.
    """

    q: Map
    k: Map
    v: Map
    o: Map
    gate: Map
    up: Map
    down: Map
    first_norm_D: Tensor
    second_norm_D: Tensor
    first_eps: float
    second_eps: float
    heads: int
    key_heads: int
    scale: float

    @property
    def maps(self) -> tuple[Map, ...]:
        """All of them."""
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down

    @property
    def learnt(self) -> list[Tensor]:
        """What trains: of each map, and the norms' weights."""
        norms = (x for x in (self.first_norm_D, self.second_norm_D) if x.requires_grad)
        return [*(x for m in self.maps for x in m.learnt), *norms]


@dataclass(frozen=True)
class Line:
    """What is the same for all blocks of a pass: positions' angles (T, width of a head), bf16, and the rows' runs."""

    cosine_TW: Tensor
    sine_TW: Tensor
    runs: Runs


def block(x_TD: Tensor, of: Block, line: Line) -> Tensor:
    """The block's output (T, D) for the line `x_TD`, both bf16; differentiable in x and what trains."""
    function = cast("Callable[..., Tensor]", _Block.apply)  # pyright: ignore[reportUnknownMemberType]
    learnt = of.learnt
    differs = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, *learnt))
    return function(x_TD, of, line, differs, *learnt)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, of: Block, line: Line, differs: bool, *learnt: Tensor
    ) -> Tensor:
        tokens = x.shape[0]
        h, rstd = _norm(x, of.first_norm_D, of.first_eps)
        widths = [of.q.out, of.k.out, of.v.out]
        qkv = rooms.take(tokens, sum(widths))
        q, k, v = _columns(qkv, widths)
        # Of gate and up, what lies behind the lengths is kept, and says as much.
        raws = [_raw(m, tokens, differs) for m in (of.q, of.k, of.v, of.o, of.down)]
        lows = [
            _apply(m, h, y, raw=raw)
            for m, y, raw in zip((of.q, of.k, of.v), (q, k, v), raws[:3], strict=True)
        ]
        _rotate(qkv, line, of.heads + of.key_heads, 1.0)
        seen = rooms.take(tokens, of.q.out)
        logsum = torch.empty(tokens, of.heads)
        attend(q, k, v, seen, logsum, line.runs, of.heads, of.key_heads, of.scale)
        middle = rooms.take(tokens, x.shape[1])
        lows.append(_apply(of.o, seen, middle, x, raws[3]))
        second = _norm(middle, of.second_norm_D, of.second_eps, h)[1]
        inner = of.gate.out
        both = rooms.take(tokens, 2 * inner)
        gate, up = both[:, :inner], both[:, inner:]
        lows.append(_apply(of.gate, h, gate))
        lows.append(_apply(of.up, h, up))
        product = rooms.take(tokens, inner)
        _call("afina_gate", gate, up, 2 * inner, tokens, inner, product)
        y = torch.empty_like(x)
        lows.append(_apply(of.down, product, y, middle, raws[4]))
        rooms.give(h, product)
        if not differs:
            rooms.give(qkv, seen, middle, both)
            return y
        ctx.of, ctx.line, ctx.lows, ctx.raws = of, line, lows, raws
        ctx.kept = (qkv, seen, middle, both)
        ctx.numbers = (logsum, rstd, second)
        ctx.save_for_backward(x, *learnt)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError("a block's backward was asked for twice: what it kept is gone")
        of, line, lows = cast("Block", ctx.of), cast("Line", ctx.line), ctx.lows
        raws = cast("list[Tensor | None]", ctx.raws)
        qkv, seen, middle, both = ctx.kept
        logsum, rstd, second = ctx.numbers
        x, *_ = cast(
            "tuple[Tensor, ...]", ctx.saved_tensors
        )  # raises where a path changed meanwhile
        above = grads[0].contiguous()
        tokens, inner = x.shape[0], of.gate.out
        slopes: dict[int, list[Tensor]] = {}

        # the gated half
        by_down, down_m = _lengths_back(of.down, above, raws[4])
        down = _lower(of.down, by_down)
        by_product = rooms.take(tokens, inner)
        _inward(by_product, [(of.down, by_down, down)])
        gate, up = both[:, :inner], both[:, inner:]
        by_both = rooms.take(tokens, 2 * inner)
        by_gate, by_up = by_both[:, :inner], by_both[:, inner:]
        product = rooms.take(tokens, inner)
        _call(
            "afina_gate_back",
            *(by_product, gate, up, 2 * inner, tokens, inner, by_gate, by_up, product),
        )
        slopes[6] = _slopes([of.down], [by_down], [down], [lows[6]], [down_m], product)
        ms = [
            _lengths_back(m, dy, y, dy, behind=True)[1]
            for m, dy, y in ((of.gate, by_gate, gate), (of.up, by_up, up))
        ]
        lower = [_lower(of.gate, by_gate), _lower(of.up, by_up)]
        h = _norm(middle, of.second_norm_D, of.second_eps)[0]
        slopes[4] = _slopes([of.gate, of.up], [by_gate, by_up], lower, lows[4:6], ms, h)
        by_h = rooms.take(*x.shape)
        _inward(by_h, [(of.gate, by_gate, lower[0]), (of.up, by_up, lower[1])])
        norms = _norm_slope(by_h, middle, of.second_norm_D, second)
        by_middle = rooms.take(*x.shape)
        _norm_back(by_h, middle, of.second_norm_D, second, above, by_middle)
        rooms.give(by_product, by_both, product)

        # attention
        by_o, o_m = _lengths_back(of.o, by_middle, raws[3])
        low = _lower(of.o, by_o)
        by_seen = rooms.take(*seen.shape)
        _inward(by_seen, [(of.o, by_o, low)])
        slopes[3] = _slopes([of.o], [by_o], [low], [lows[3]], [o_m], seen)
        widths = [of.q.out, of.k.out, of.v.out]
        by_qkv = rooms.take(*qkv.shape)
        parts = _columns(by_qkv, widths)
        (q, k, v), (by_q, by_k, by_v) = _columns(qkv, widths), parts
        back = (line.runs, of.heads, of.key_heads, of.scale)
        attend_back(q, k, v, seen, logsum, by_seen, by_q, by_k, by_v, *back)
        _rotate(by_qkv, line, of.heads + of.key_heads, -1.0)
        ms = [
            _lengths_back(m, dy, raw, dy)[1]
            for m, dy, raw in zip((of.q, of.k, of.v), parts, raws[:3], strict=True)
        ]
        lower = [_lower(m, dy) for m, dy in zip((of.q, of.k, of.v), parts, strict=True)]
        _norm(x, of.first_norm_D, of.first_eps, h)
        slopes[0] = _slopes([of.q, of.k, of.v], parts, lower, lows[:3], ms, h)
        by_x = None
        if ctx.needs_input_grad[0] or of.first_norm_D.requires_grad:
            _inward(by_h, list(zip((of.q, of.k, of.v), parts, lower, strict=True)))
            norms = _norm_slope(by_h, x, of.first_norm_D, rstd) + norms
            by_x = torch.empty_like(x)
            _norm_back(by_h, x, of.first_norm_D, rstd, by_middle, by_x)
        spare = [x for x in raws if x is not None]
        spare += [x for x, given in ((by_down, above), (by_o, by_middle)) if x is not given]
        rooms.give(h, by_h, by_middle, by_seen, by_qkv, *spare, *ctx.kept)
        ctx.kept = ctx.lows = ctx.raws = None
        found = [slope for at in sorted(slopes) for slope in slopes[at]]
        return by_x, None, None, None, *found, *norms


def _columns(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return list(torch.split(x, list(widths), dim=1))


def _rows(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    return list(torch.split(x, list(counts)))


def _raw(m: Map, tokens: int, differs: bool) -> Tensor | None:
    """Room for what a map gives before its lengths, where that is needed in backward."""
    return rooms.take(tokens, m.out) if differs and m.lengths is not None else None


def _apply(
    m: Map, x: Tensor, y: Tensor, residual: Tensor | None = None, raw: Tensor | None = None
) -> Tensor | None:
    """Writes the map of x into y, onto a residual; returns A x where there is a path, padded with zeros."""
    gain = None if m.lengths is None else m.lengths.gain_O
    how: dict[str, Any] = {
        "gain_N": gain,
        "raw_MN": raw,
        "bias_N": m.bias_O,
        "residual_MN": residual,
    }
    if m.a_RI is None or m.b_OR is None:
        gemm(y, part(x, stored(m.weight_OI)), **how)
        return None
    low = gemm(x.new_empty(x.shape[0], padded(m.a_RI.shape[0])), part(x, m.a_RI))
    path = part(low, m.b_OR, scale=m.scaling)
    gemm(y, part(x, stored(m.weight_OI)), path, **how)
    return low


def _lengths_back(
    m: Map, by_y: Tensor, z: Tensor | None, to: Tensor | None = None, *, behind: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradients of what lies before a map's lengths, and of these; `by_y` and None where it has none.

    Args:
        m: the map.
        by_y: of its output.
        z: what lies before the lengths.
        to: where the first is written, which may be `by_y`; None is a room of its own.
        behind: z is what lies behind them, of a map without a bias.
    """
    if m.lengths is None or z is None:
        return by_y, None
    by_z = rooms.take(*by_y.shape) if to is None else to
    sums = torch.empty(m.out)
    sizes = (by_y.shape[0], m.out)
    _call(
        "afina_gain_back",
        *(by_y, by_y.stride(0), z, z.stride(0), m.lengths.gain_O, *sizes, by_z, by_z.stride(0)),
        sums,
    )
    return by_z, sums / (m.lengths.m_O.detach() if behind else m.lengths.n_O)


def _lower(m: Map, by_y: Tensor) -> Tensor | None:
    """s dy B, padded with zeros."""
    if m.b_OR is None:
        return None
    to = by_y.new_empty(by_y.shape[0], padded(m.b_OR.shape[1]))
    return gemm(to, part(by_y, m.b_OR, by_rows=True, scale=m.scaling))


def _inward(to: Tensor, maps: Sequence[tuple[Map, Tensor, Tensor | None]]) -> None:
    """The gradient of the input that some maps share, from those of their outputs and lower ends."""
    parts = [part(by_y, stored(m.weight_OI), by_rows=True) for m, by_y, _ in maps]
    for m, _, low in maps:
        if low is not None and m.a_RI is not None:
            parts.append(part(low, m.a_RI, by_rows=True))
    gemm(to, *parts)


def _slopes(
    maps: Sequence[Map],
    by_outs: Sequence[Tensor],
    by_lows: Sequence[Tensor | None],
    lows: Sequence[Tensor | None],
    by_ms: Sequence[Tensor | None],
    x: Tensor,
) -> list[Tensor]:
    """The gradients of what trains of some maps that share the input x, in the maps' order."""
    ranks = [0 if m.a_RI is None else m.a_RI.shape[0] for m in maps]
    tokens = padded(x.shape[0])
    turned = x.new_empty(sum(ranks), tokens)
    at = 0
    for rank, by_low in zip(ranks, by_lows, strict=True):
        if by_low is not None:
            _turn(by_low, turned[at : at + rank])
        at += rank
    by_a = torch.empty(sum(ranks), x.shape[1])
    if any(ranks):
        gemm(by_a, part(turned, x, by_rows=True))
    found: list[Tensor] = []
    every = zip(ranks, maps, by_outs, lows, by_ms, _rows(by_a, ranks), strict=True)
    for rank, m, by_y, low, by_m, own in every:
        if low is not None:
            _turn(low, turned[:rank])
            to = torch.empty(rank, m.out)
            by_b = gemm(to, part(turned[:rank], by_y, by_rows=True), alpha=m.scaling)
            found += [own, by_b.t()]
        if by_m is not None:
            found.append(by_m)
        if m.weight_OI.requires_grad:
            across = rooms.take(m.out, tokens)
            _turn(by_y, across)
            found.append(gemm(torch.empty_like(m.weight_OI), part(across, x, by_rows=True)))
            rooms.give(across)
        if m.bias_O is not None and m.bias_O.requires_grad:
            found.append(_sums(m.bias_O, by_y, None, None))
    return found


def _norm_slope(by_h: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> list[Tensor]:
    """The gradient of a norm's weight, where it trains."""
    return [_sums(weight, by_h, x, rstd)] if weight.requires_grad else []


def _sums(like: Tensor, by_y: Tensor, x: Tensor | None, rstd: Tensor | None) -> Tensor:
    """Sums over tokens of each column: of dy, or of dy times the normed x."""
    to = torch.empty_like(like)
    made = [native.address(v) for v in (x, rstd)]
    kernel: Any = native.library()
    kernel.afina_sums(
        *(native.address(by_y), c_int64(by_y.stride(0)), *made),
        *(c_int64(by_y.shape[0]), c_int64(by_y.shape[1]), native.address(to)),
    )
    return to


def _turn(x_TC: Tensor, to_CT: Tensor) -> None:
    """The first columns of x as rows, with zeros behind the tokens."""
    _call(
        "afina_turned", x_TC, x_TC.stride(0), x_TC.shape[0], to_CT.shape[0], to_CT, to_CT.shape[1]
    )


def _norm(x: Tensor, weight: Tensor, eps: float, to: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The normed x, in `to` or a room of its own, and the inverse of its size."""
    h = rooms.take(*x.shape) if to is None else to
    rstd = torch.empty(x.shape[0])
    _call("afina_norm", x, weight, eps, *x.shape, h, rstd)
    return h, rstd


def _norm_back(
    by_h: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, above: Tensor, to: Tensor
) -> None:
    """`above` and what comes back through the norm."""
    _call("afina_norm_back", by_h, x, weight, rstd, above, *x.shape, to)


def _rotate(qkv: Tensor, line: Line, heads: int, sign: float) -> None:
    """Turns queries and keys by their positions, in place; back with -1."""
    cosine = line.cosine_TW
    sizes = (qkv.shape[0], heads, cosine.shape[1])
    _call("afina_rotate", qkv, qkv.stride(0), cosine, line.sine_TW, *sizes, sign)


def _call(name: str, *values: Tensor | int | float) -> None:
    """A kernel by its name: a tensor is its address, an int 64 bits, a float double."""
    made: list[Any] = [
        native.address(v)
        if isinstance(v, Tensor)
        else c_double(v)
        if isinstance(v, float)
        else c_int64(v)
        for v in values
    ]
    kernel: Any = getattr(native.library(), name)
    kernel(*made)
