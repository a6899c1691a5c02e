"""Shorter rows: masses by hand and by the tiles' log-sum-exp, who stays, many into one, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afina.ops import merging, reference, tiles
from afina.types import Places
from tests.ops.test_tiles_memory import Ledger

B, H, T, D = 3, 4, 11, 6
COUNTS = torch.tensor([11, 7, 2])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real() -> Tensor:
    return torch.arange(T) < COUNTS[:, None]


def by_hand(q: Tensor, k: Tensor, mask: Tensor | None, weights: Tensor, scale: float) -> Tensor:
    """The masses from whole matrices."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return (torch.softmax(scores, -1) * weights[:, None, :, None]).sum(2).mean(1)


# --- the mass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 40, 10**6])
@pytest.mark.parametrize("kind", ["none", "keys", "window", "term"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_mass_and_its_gradients_are_those_of_whole_matrices(
    tile: int, kind: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "TILE_NUMBERS", tile)
    steps = torch.arange(T)
    near = ((steps[:, None] - steps).abs() < 3)[None, None]
    mask = {
        "none": None,
        "keys": real()[:, None, None],
        "window": near & (real()[:, None, None] | (steps[:, None] == steps)),
        "term": drawn(B, 1, T, T, seed=5),
    }[kind]
    q, k = drawn(B, H, T, D).requires_grad_(), drawn(B, key_heads, T, D, seed=1).requires_grad_()
    weights, above = real().double(), drawn(B, T, seed=2)
    found = merging.key_mass(q, k, mask, weights, 0.3)
    wanted = by_hand(q, k, mask, weights, 0.3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    mine = torch.autograd.grad((found * above).sum(), (q, k))
    theirs = torch.autograd.grad((wanted * above).sum(), (q, k))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_mass_is_that_of_the_tiles_log_sum_exp() -> None:
    q, k, v = (drawn(B, H, T, D, seed=n) for n in range(3))
    places, rule = Places.of(torch.zeros(B, dtype=torch.long), COUNTS), tiles.Rule(causal=False)
    weights = real().double()
    _, logsum = tiles.attend(q, k, v, places, rule)
    wanted = tiles.key_mass(q, k, logsum, places, rule, weights_ML=weights) / H
    found = merging.key_mass(q, k, real()[:, None, None], weights, D**-0.5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_masses_sum_to_the_valid_queries_and_padding_has_none() -> None:
    q, k = drawn(B, H, T, D), drawn(B, H, T, D, seed=1)
    found = merging.key_mass(q, k, real()[:, None, None], real(), 0.5)
    torch.testing.assert_close(found.sum(1), COUNTS.double(), rtol=0, atol=1e-12)
    assert (found[~real()] == 0).all()
    # The control: padding counted as keys takes mass, and padding counted as queries gives too much.
    as_keys = merging.key_mass(q, k, None, real(), 0.5)
    assert (as_keys[1, 7:] > 0.01).all()
    as_queries = merging.key_mass(q, k, real()[:, None, None], torch.ones(B, T), 0.5)
    assert as_queries.sum(1).tolist() == pytest.approx([11.0, 11.0, 11.0])


def test_equal_queries_look_at_all_alike() -> None:
    nothing = torch.zeros(1, H, T, D, dtype=torch.float64)
    found = merging.key_mass(nothing, drawn(1, H, T, D), None, torch.ones(1, T), 1.0)
    torch.testing.assert_close(found, torch.ones(1, T).double(), rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_counts_for_nothing() -> None:
    mask = torch.ones(1, 1, T, T, dtype=torch.bool)
    mask[:, :, 4] = False
    weights = torch.ones(1, T)
    weights[:, 4] = 0
    q, k = drawn(1, H, T, D).requires_grad_(), drawn(1, H, T, D, seed=1).requires_grad_()
    for seen in (mask, torch.zeros(1, 1, T, T).masked_fill(~mask, -torch.inf)):
        found = merging.key_mass(q, k, seen, weights, 1.0)
        assert found.sum().item() == pytest.approx(T - 1)
        assert all(g.isfinite().all() for g in torch.autograd.grad(found.square().sum(), (q, k)))


def test_no_matrix_of_all_queries_by_all_keys_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "TILE_NUMBERS", 2**14)
    length = 1024
    with Ledger() as ledger:
        q = torch.zeros(1, 1, length, 4, requires_grad=True)
        merging.key_mass(q, q, None, torch.ones(1, length), 1.0).sum().backward()
        keys, every = torch.ones(1, length, 4), torch.ones(1, length, dtype=torch.bool)
        merging.partners(keys, every, torch.tensor([100]), 1)
    assert ledger.widest <= 2**14 < length * length


# --- who stays -----------------------------------------------------------------------------------------------------


def test_portions_are_rounded_up_and_never_too_small() -> None:
    counts = torch.tensor([10, 7, 2, 1])
    assert merging.portion(counts, 0.5, 1).tolist() == [5, 4, 1, 1]
    assert merging.portion(counts, 0.3, 2).tolist() == [3, 3, 2, 1]
    assert merging.portion(counts, 1.0, 1).tolist() == counts.tolist()
    # 10 · (√0.49)² is 4.8999…, and 100 · 0.07 a little more than 7.
    assert merging.portion(torch.tensor([100]), 0.07, 1).tolist() == [7]


def test_the_highest_are_chosen_and_of_equal_ones_the_first() -> None:
    score = torch.tensor([[1.0, 5.0, 5.0, 2.0], [9.0, 1.0, 1.0, 8.0]])
    among = torch.tensor([[True, True, True, True], [True, True, True, False]])
    found = merging.highest(score, among, torch.tensor([1, 2]))
    assert found.tolist() == [[False, True, False, False], [True, True, False, False]]


def test_columns_are_in_their_order_and_padded() -> None:
    chosen = torch.tensor([[True, False, True, True], [False, False, False, True]])
    index, there = merging.columns_of(chosen)
    assert index.tolist() == [[0, 2, 3], [3, 0, 0]]
    assert there.tolist() == [[True, True, True], [True, False, False]]


# --- many into one -------------------------------------------------------------------------------------------------


def test_the_fused_token_is_the_mean_by_weight() -> None:
    x = drawn(2, 3, D)
    weight = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = merging.fuse(x, weight)
    torch.testing.assert_close(found[0], (x[0, 0] + 3 * x[0, 1]) / 4, rtol=0, atol=1e-15)
    assert (found[1] == 0).all()


def alike(keys: Tensor, counts: Tensor, merged: int, protected: int) -> dict[int, int]:
    """Who goes into whom in one row, by loops."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    free = range(protected, int(counts))
    givers, takers = [c for c in free if c % 2 == 0], [c for c in free if c % 2 == 1]
    best = {g: max(takers, key=lambda t: float(unit[g] @ unit[t])) for g in givers}
    order = sorted(givers, key=lambda g: -float(unit[g] @ unit[best[g]]))
    return {g: best[g] for g in order[:merged]}


@pytest.mark.parametrize("tile", [1, 10**6])
@pytest.mark.parametrize("protected", [1, 2])
def test_the_most_alike_go_into_each_other(
    tile: int, protected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "TILE_NUMBERS", tile)
    keys, merged = drawn(B, T, D, seed=3), torch.tensor([3, 9, 1])
    goes, into = merging.partners(keys, real(), merged, protected)
    for row in range(B):
        wanted = (
            alike(keys[row], COUNTS[row], int(merged[row]), protected) if COUNTS[row] > 2 else {}
        )
        found = {c: int(into[row, c]) for c in range(T) if goes[row, c]}
        assert found == wanted
        stay = [c for c in range(T) if not goes[row, c]]
        assert [int(into[row, c]) for c in stay] == stay
    assert goes.sum(1).tolist() == [3, 3, 0]


def test_merging_keeps_sums_by_size_and_unmerging_gives_each_what_its_group_has() -> None:
    x, size = drawn(2, 5, D), torch.tensor([[1.0, 2, 1, 3, 0], [1.0, 1, 1, 1, 1]]).double()
    column = torch.tensor([[0, 1, 1, 0, 0], [2, 2, 2, 1, 0]])
    merged, sizes = merging.merge(x, size, column, 3)
    torch.testing.assert_close(
        (merged * sizes[..., None]).sum(1), (x * size[..., None]).sum(1), rtol=0, atol=1e-14
    )
    assert sizes.tolist() == [[4, 3, 0], [1, 1, 3]]
    torch.testing.assert_close(merged[0, 1], (2 * x[0, 1] + x[0, 2]) / 3, rtol=0, atol=1e-15)
    assert (merged[0, 2] == 0).all()
    back = merging.unmerge(merged, column)
    for row in range(2):
        for c in range(5):
            assert torch.equal(back[row, c], merged[row, column[row, c]])


# --- and back ------------------------------------------------------------------------------------------------------


def test_reading_and_writing_and_their_gradients() -> None:
    rows, x = drawn(2, 5, 3).requires_grad_(), drawn(2, 3, 3, seed=1).requires_grad_()
    place = torch.tensor([[0, 2, 4], [1, 1, 0]])
    column = torch.tensor([[0, -1, 1, -1, 2], [2, 0, -1, 0, -1]])
    assert torch.equal(merging.read(rows, place)[1, 0], rows[1, 1])
    written = merging.write(rows, x, column)
    assert torch.equal(written[0, 1], rows[0, 1])
    assert torch.equal(written[1, 3], x[1, 0])
    assert torch.autograd.gradcheck(lambda r: merging.read(r, place), (rows,))
    assert torch.autograd.gradcheck(lambda r, y: merging.write(r, y, column), (rows, x))


def test_nothing_of_the_rows_is_kept_for_backward() -> None:
    kept: list[tuple[int, ...]] = []
    rows, x = drawn(2, 5, 3).requires_grad_(), drawn(2, 3, 3).requires_grad_()
    place, column = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        merging.write(rows, x, column)
        merging.read(rows, place)
    assert kept == [(2, 5), (2, 3)]


# --- why not in a causal model -------------------------------------------------------------------------------------


def test_under_a_causal_mask_the_masses_tell_of_later_tokens() -> None:
    q, k = drawn(1, 1, T, D), drawn(1, 1, T, D, seed=1)
    mask = reference.visible(torch.zeros(1, T, dtype=torch.long), causal=True)[:, None]
    before = merging.key_mass(q, k, mask, torch.ones(1, T), 1.0)
    later = q.clone()
    later[:, :, -1] *= -3
    after = merging.key_mass(later, k, mask, torch.ones(1, T), 1.0)
    assert not torch.allclose(before[:, :5], after[:, :5])
    kept = [set(m[0].topk(4).indices.tolist()) for m in (before, after)]
    assert kept[0] != kept[1]
    # Without queries that look at them, the first tokens win whatever they are: H_N - H_j for equal scores.
    nothing = torch.zeros(1, 1, 5, D).double()
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    found = merging.key_mass(nothing, nothing, causal, torch.ones(1, 5), 1.0)
    wanted = torch.tensor([[2.283333, 1.283333, 0.783333, 0.45, 0.2]]).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
