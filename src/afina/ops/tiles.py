"""Exact attention in tiles, forward and backward, that never holds a matrix of all queries by all keys.

    S = cap(scale · Q Kᵀ) + mask,   L = logsumexp_j S,   P = exp(S − L),   O = drop(P) V
    dV = drop(P)ᵀ dO,   dP = drop(dO Vᵀ),   dS = P ∘ (dP − rowsum(dO ∘ O)),   dQ = scale · dS K,   dK = scale · dSᵀ Q

A tile is a few queries by all the keys that they can see, so each row of P is whole and no running maximum is needed.
Backward keeps Q, K, V, O and L, all linear in the length, and computes P again. A head's queries are laid below those
of its neighbours that share a key head, so grouped queries are one matrix product and no key is copied.

On the way the attention mass of each key can be had: c_j = Σ_i w_i P_ij, which sums to the weights of the queries.

Legend: M rows, H query heads, K key heads, G = H / K, L queries, S keys, D width of a head; l queries of a tile.

Source: Dao et al. 2022, arXiv 2205.14135 (L, and dS from O); Dao 2023, arXiv 2307.08691. Column sums from L:
c_j = Σ_i exp(S_ij − L_i).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from afina.types import Places

TILE_NUMBERS = 4 * 2**20
"""Scores that a tile may hold, over all rows and heads."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees, and how scores are made.

    Query i of row m stands at place `first_M[m] + i` of its row, key j at place j.

    Attributes:
        causal: no later key is seen.
        scale: factor of the scores; 1/sqrt(D) when None.
        window: keys at a distance of `window` or more are not seen.
        softcap: scores become softcap·tanh(score / softcap).
        dropout: share of the attention weights that is dropped.
        seed: of the dropout's mask.
        tile_numbers: bound of a tile.
    """

    causal: bool
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    tile_numbers: int = TILE_NUMBERS


def attend(
    q_MHLD: Tensor, k_MKSD: Tensor, v_MKSD: Tensor, rows: Places, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of its softmax's denominators; differentiable in q, k and v.

    Args:
        q_MHLD: queries.
        k_MKSD: keys; their heads divide the queries'.
        v_MKSD: values.
        rows: where they stand.
        rule: what is seen.

    Returns:
        out (M, H, L, D), in q's dtype; zero where a query sees no key. log-sum-exp (M, H, L), in fp32 or wider;
        −inf there.
    """
    function = cast("Callable[..., tuple[Tensor, Tensor]]", _Attend.apply)  # pyright: ignore[reportUnknownMemberType]
    return function(q_MHLD, k_MKSD, v_MKSD, rows, rule)


@torch.no_grad()
def key_mass(
    q_MHLD: Tensor,
    k_MKSD: Tensor,
    logsum_MHL: Tensor,
    rows: Places,
    rule: Rule,
    *,
    weights_ML: Tensor | None = None,
) -> Tensor:
    """What share of the queries' attention each key gets, summed over heads and queries: Σ_h Σ_i w_i P_hij.

    Args:
        q_MHLD: queries, as given to `attend`.
        k_MKSD: keys, likewise.
        logsum_MHL: the second result of `attend`.
        rows: likewise.
        rule: likewise; dropout does not count.
        weights_ML: of the queries (1 for those that count, 0 for the others); all 1 when None.

    Returns:
        (M, S), in fp32 or wider.
    """
    shape = _Shape.of(q_MHLD, k_MKSD)
    queries, keys = shape.fold_q(q_MHLD), shape.fold_k(k_MKSD)
    logsum = shape.fold_l(logsum_MHL)
    mass_MS = logsum_MHL.new_zeros(shape.m, shape.s)
    for tile in _tiles(shape, rows, rule):
        scores = _scores(queries[:, :, tile.q], keys[:, tile.k], shape, rows, rule, tile)[0]
        probabilities = _probabilities(scores, logsum[:, :, tile.q])
        if weights_ML is not None:
            weight = weights_ML[:, tile.q].repeat_interleave(shape.kv, 0)[:, None, :, None]
            probabilities = probabilities * weight
        mass_MS[:, tile.k] += probabilities.sum((1, 2)).view(shape.m, shape.kv, -1).sum(1)
    return mass_MS


@dataclass(frozen=True)
class _Shape:
    m: int
    kv: int
    g: int
    length: int
    s: int
    d: int

    @staticmethod
    def of(q_MHLD: Tensor, k_MKSD: Tensor) -> _Shape:
        m, h, length, d = q_MHLD.shape
        kv, s = k_MKSD.shape[1:3]
        if h % kv:
            raise ValueError(f"{kv} key heads do not divide {h} query heads")
        return _Shape(m, kv, h // kv, length, s, d)

    def fold_q(self, x_MHLD: Tensor) -> Tensor:
        """(M, H, L, D) -> (M·K, G, L, D)."""
        return x_MHLD.reshape(self.m * self.kv, self.g, self.length, -1)

    def fold_l(self, x_MHL: Tensor) -> Tensor:
        """(M, H, L) -> (M·K, G, L)."""
        return x_MHL.reshape(self.m * self.kv, self.g, self.length)

    def fold_k(self, x_MKSD: Tensor) -> Tensor:
        """(M, K, S, D) -> (M·K, S, D)."""
        return x_MKSD.reshape(self.m * self.kv, self.s, -1)

    def unfold_q(self, x: Tensor) -> Tensor:
        """The inverse of `fold_q`."""
        return x.view(self.m, self.kv * self.g, self.length, *x.shape[3:])

    def unfold_k(self, x: Tensor) -> Tensor:
        """The inverse of `fold_k`."""
        return x.view(self.m, self.kv, self.s, self.d)


@dataclass(frozen=True)
class _Tile:
    q: slice
    k: slice
    number: int


def _tiles(shape: _Shape, rows: Places, rule: Rule) -> Iterator[_Tile]:
    """Runs of queries, each with the keys that at least one of them may see."""
    heads = shape.m * shape.kv * shape.g
    size = max(1, min(shape.length, rule.tile_numbers // max(1, heads * shape.s)))
    for number, start in enumerate(range(0, shape.length, size)):
        stop = min(start + size, shape.length)
        low, high = 0, shape.s
        if rule.causal:
            high = min(high, rows.first_most + stop)
        if rule.window is not None:
            low = max(0, rows.first_least + start - rule.window + 1)
            if not rule.causal:
                high = min(high, rows.first_most + stop - 1 + rule.window)
        yield _Tile(slice(start, stop), slice(min(low, high), high), number)


def seen(places: Places, rule: Rule, queries: int, keys: slice, part: slice) -> Tensor | None:
    """Which keys of a range each query of a range sees, (M, l, s) booleans; None where all is seen.

    Args:
        places: where rows stand.
        rule: what is seen.
        queries: of a row.
        keys: the range of keys.
        part: the range of queries.
    """
    low, high = keys.start, keys.stop
    start, stop = part.start, min(part.stop, queries)
    all_before = not rule.causal or places.first_least + start >= high - 1
    far = max(places.first_most + stop - 1 - low, high - 1 - places.first_least - start)
    near = rule.window is None or far < rule.window
    if places.keys_least >= high and all_before and near:
        return None
    device = places.first_M.device
    key_s = torch.arange(low, high, device=device)
    query_Ml1 = (places.first_M[:, None] + torch.arange(start, stop, device=device))[:, :, None]
    found = (key_s < places.keys_M[:, None, None]).expand(-1, stop - start, -1)
    if rule.causal:
        found = found & (key_s <= query_Ml1)
    if rule.window is not None:
        found = found & ((query_Ml1 - key_s).abs() < rule.window)
    return found


def _scores(
    q: Tensor, k: Tensor, shape: _Shape, rows: Places, rule: Rule, tile: _Tile
) -> tuple[Tensor, Tensor | None]:
    """Scores (M·K, G, l, s) in the wide type, −inf where not seen; and the slope of the cap, where there is one."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = shape.d**-0.5 if rule.scale is None else rule.scale
    products = q.reshape(q.shape[0], -1, shape.d) @ k.transpose(1, 2)
    scores = products.to(wide).mul_(scale).view(*q.shape[:3], k.shape[1])
    slope = None
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(rule.softcap)
    visible = seen(rows, rule, shape.length, tile.k, tile.q)
    if visible is not None:
        hidden = ~visible.repeat_interleave(shape.kv, 0)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    return scores, slope


def _probabilities(scores: Tensor, logsum: Tensor) -> Tensor:
    """exp(scores − logsum), in the scores' place; zero in the rows of queries that see nothing."""
    blind = logsum == -torch.inf
    return scores.sub_(logsum.masked_fill(blind, 0.0)[..., None]).exp_()


def _kept(probabilities: Tensor, rule: Rule, tile: _Tile) -> Tensor:
    """The mask of dropout, scaled; a function of seed and tile."""
    generator = torch.Generator(device=probabilities.device)
    generator.manual_seed((rule.seed + 0x9E3779B97F4A7C15 * (tile.number + 1)) % 2**63)
    kept = torch.empty_like(probabilities).bernoulli_(1 - rule.dropout, generator=generator)
    return kept.div_(1 - rule.dropout)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_MHLD: Tensor, k_MKSD: Tensor, v_MKSD: Tensor, rows: Places, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        shape = _Shape.of(q_MHLD, k_MKSD)
        queries, keys, values = shape.fold_q(q_MHLD), shape.fold_k(k_MKSD), shape.fold_k(v_MKSD)
        wide = torch.promote_types(q_MHLD.dtype, torch.float32)
        out = torch.empty_like(queries)
        logsum = queries.new_empty(queries.shape[:3], dtype=wide)
        for tile in _tiles(shape, rows, rule):
            scores, _ = _scores(queries[:, :, tile.q], keys[:, tile.k], shape, rows, rule, tile)
            logsum[:, :, tile.q] = torch.logsumexp(scores, -1)
            weights = _probabilities(scores, logsum[:, :, tile.q])
            if rule.dropout:
                weights.mul_(_kept(weights, rule, tile))
            flat = weights.to(values.dtype).view(queries.shape[0], -1, weights.shape[-1])
            out[:, :, tile.q] = (flat @ values[:, tile.k]).view(*weights.shape[:3], -1)
        ctx.save_for_backward(queries, keys, values, out, logsum)
        ctx.shape, ctx.rows, ctx.rule = shape, rows, rule
        result = shape.unfold_q(out), shape.unfold_q(logsum)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out, logsum = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        shape, rows, rule = ctx.shape, ctx.rows, ctx.rule
        above = shape.fold_q(grads[0])
        wide = logsum.dtype
        inner = (above.to(wide) * out.to(wide)).sum(-1)
        by_q = torch.empty_like(queries)
        by_k = torch.zeros_like(keys, dtype=wide)
        by_v = torch.zeros_like(values, dtype=wide)
        scale = shape.d**-0.5 if rule.scale is None else rule.scale
        for tile in _tiles(shape, rows, rule):
            query, key, value = queries[:, :, tile.q], keys[:, tile.k], values[:, tile.k]
            scores, slope = _scores(query, key, shape, rows, rule, tile)
            weights = _probabilities(scores, logsum[:, :, tile.q])
            grad = above[:, :, tile.q].reshape(queries.shape[0], -1, shape.d)
            by_weight = (grad @ value.transpose(1, 2)).to(wide).view_as(weights)
            dropped = weights
            if rule.dropout:
                kept = _kept(weights, rule, tile)
                by_weight.mul_(kept)
                dropped = weights * kept
            narrow = dropped.to(values.dtype).view(queries.shape[0], -1, weights.shape[-1])
            by_v[:, tile.k] += narrow.transpose(1, 2) @ grad
            by_score = by_weight.sub_(inner[:, :, tile.q, None]).mul_(weights).mul_(scale)
            if slope is not None:
                by_score.mul_(slope)
            narrow = by_score.to(queries.dtype).view_as(narrow)
            by_q[:, :, tile.q] = (narrow @ key).view_as(query)
            by_k[:, tile.k] += narrow.transpose(1, 2) @ query.reshape(grad.shape)
        return (
            shape.unfold_q(by_q),
            shape.unfold_k(by_k.to(keys.dtype)),
            shape.unfold_k(by_v.to(values.dtype)),
            None,
            None,
        )
