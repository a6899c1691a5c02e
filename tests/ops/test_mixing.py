"""Each way of mixing against loops over single values, and against PEFT's functions where these are right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from peft.utils import merge_utils
from torch import Tensor

from afina.ops import mixing

WEIGHTS = (0.7, -0.3, 1.5)


def changes(number: int = 3, shape: tuple[int, ...] = (7, 9)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(number)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def slow_largest(change: Tensor, density: float) -> Tensor:
    """One value after the other, the largest first."""
    flat = change.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda i: -abs(flat[i]))
    kept = set(order[: int(density * len(flat))])
    return torch.tensor(
        [v if i in kept else 0.0 for i, v in enumerate(flat)], dtype=change.dtype
    ).reshape(change.shape)


def slow_mean(weighted: Sequence[Tensor]) -> Tensor:
    columns = zip(*(one.flatten().tolist() for one in weighted), strict=True)
    found: list[float] = []
    for values in columns:
        total = sum(values)
        agreeing = [v for v in values if v * total > 0]
        found.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return torch.tensor(found, dtype=weighted[0].dtype).reshape(weighted[0].shape)


def test_a_weighted_sum() -> None:
    made = changes()
    before = [one.clone() for one in made]
    wanted = sum(w * one for w, one in zip(WEIGHTS, made, strict=True))
    torch.testing.assert_close(mixing.weighted_sum(made, WEIGHTS), wanted)
    assert all(torch.equal(x, y) for x, y in zip(made, before, strict=True))


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.99, 1.0])
def test_the_largest_values(density: float) -> None:
    (change,) = changes(1)
    assert torch.equal(mixing.keep_largest(change, density), slow_largest(change, density))


def test_of_equal_values_the_first_are_kept() -> None:
    change = torch.tensor([1.0, -1.0, 2.0, 1.0, 1.0])
    assert mixing.keep_largest(change, 0.6).tolist() == [1, -1, 2, 0, 0]


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_is_what_the_paper_says(density: float) -> None:
    made = changes()
    found = mixing.ties(made, WEIGHTS, density, seeded())
    trimmed = [slow_largest(one, density) * w for one, w in zip(made, WEIGHTS, strict=True)]
    torch.testing.assert_close(found, slow_mean(trimmed))


def test_ties_equals_pefts_where_weights_are_equal() -> None:
    made = changes()
    theirs = merge_utils.ties(made, torch.tensor([0.8] * 3, dtype=torch.float64), 0.4)
    torch.testing.assert_close(mixing.ties(made, [0.8] * 3, 0.4, seeded()), theirs)


def test_a_change_that_is_subtracted_votes_for_what_it_does() -> None:
    """d and -1 times a larger d: the result is to be negative; PEFT elects plus, and keeps both or none."""
    made = [torch.tensor([1.0]), torch.tensor([3.0])]
    assert mixing.ties(made, [1, -1], 1.0, seeded()).tolist() == [-3]
    theirs = merge_utils.disjoint_merge(
        torch.stack([made[0], -made[1]]),
        merge_utils.calculate_majority_sign_mask(torch.stack(made)),
    )
    assert theirs.tolist() == [-1]


def test_magnitude_prune_equals_pefts() -> None:
    made = changes()
    theirs = merge_utils.magnitude_prune(made, torch.tensor(WEIGHTS, dtype=torch.float64), 0.3)
    torch.testing.assert_close(mixing.magnitude_prune(made, WEIGHTS, 0.3, seeded()), theirs)


def test_dropping_is_seeded_and_keeps_the_expectation() -> None:
    change = torch.ones(200, 200, dtype=torch.float64)
    one, other = (mixing.drop(change, 0.25, seeded()) for _ in range(2))
    assert torch.equal(one, other)
    assert set(one.unique().tolist()) == {0.0, 4.0}
    assert float(one.mean()) == pytest.approx(1, abs=0.03)  # 3.5 standard deviations
    assert not torch.equal(one, mixing.drop(change, 0.25, torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("density", [0.3, 0.9])
def test_dare(density: float) -> None:
    """The same chances again, place by place."""
    made = changes()
    chance = seeded()
    thinned: list[Tensor] = []
    for one, weight in zip(made, WEIGHTS, strict=True):
        rolls = torch.rand(one.shape, generator=chance, dtype=torch.float64).flatten().tolist()
        kept = [
            weight * v / density if roll < density else 0.0
            for v, roll in zip(one.flatten().tolist(), rolls, strict=True)
        ]
        thinned.append(torch.tensor(kept, dtype=torch.float64).reshape(one.shape))
    linear = mixing.dare_linear(made, WEIGHTS, density, seeded())
    torch.testing.assert_close(linear, torch.stack(thinned).sum(0))
    torch.testing.assert_close(
        mixing.dare_ties(made, WEIGHTS, density, seeded()), slow_mean(thinned)
    )


@pytest.mark.parametrize("name", mixing.MIXES)
def test_with_all_values_and_one_change_nothing_is_lost(name: str) -> None:
    (change,) = changes(1)
    found = mixing.MIXES[name]([change], [1.0], 1.0, seeded())
    assert torch.equal(found, change)
