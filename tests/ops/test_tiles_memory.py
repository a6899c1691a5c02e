"""Tiled attention holds nothing that grows with the square of the length, up to 16,384 tokens.

Most of it is counted on tensors without values (`meta`), so that a length costs nothing; that they are counted as those
with values is checked too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afina.ops import reference
from afina.ops.tiles import TILE_NUMBERS, Rule, attend, key_mass
from afina.types import Places

HEADS, KEY_HEADS, WIDTH = 2, 1, 4
LENGTHS = (2048, 16384)
TILE = 4 * TILE_NUMBERS
"""Four times what it is, for fewer tiles: the longest row has 32."""


class Ledger(TorchDispatchMode):
    """The bytes of all tensors made inside the block that are alive, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self._note(one)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.widest = max(self.widest, storage.nbytes() // tensor.itemsize)
        self.most = max(self.most, sum(self.alive.values()))
        weakref.finalize(storage, self.alive.pop, key, None)


def tensors(length: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def places(length: int, device: str) -> Places:
    first, keys = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    return Places(first, keys + length, 0, 0, length)


def trained(length: int, device: str, rule: Rule) -> None:
    out, _ = attend(*tensors(length, device), places(length, device), rule)
    out.sum().backward()


def massed(length: int, device: str, rule: Rule) -> None:
    q, k, _ = (x.detach() for x in tensors(length, device))
    logsum = torch.zeros(1, HEADS, length, device=device)
    weights = torch.ones(1, length, device=device)
    key_mass(q, k, logsum, places(length, device), rule, weights_ML=weights)


def written_out(length: int, device: str, rule: Rule) -> None:
    segments = torch.zeros(1, length, dtype=torch.int64, device=device)
    out = reference.attention(*tensors(length, device), segments, causal=rule.causal)
    out.sum().backward()


def held(work: Callable[[int, str, Rule], None], length: int, device: str, rule: Rule) -> Ledger:
    gc.collect()
    with Ledger() as ledger:
        work(length, device, rule)
    return ledger


def linear(length: int) -> int:
    """The bytes that are granted: a few tiles, whatever the length, and a few vectors a token."""
    return 4 * (7 * TILE + 100 * length)


@pytest.mark.parametrize("work", [trained, massed])
@pytest.mark.parametrize("more", [{}, {"causal": False}, {"window": 64}, {"softcap": 5.0}])
def test_the_most_that_is_held_grows_with_the_length_alone(
    work: Callable[[int, str, Rule], None], more: dict[str, Any]
) -> None:
    for length in LENGTHS:
        ledger = held(work, length, "meta", Rule(**{"causal": True, "tile_numbers": TILE, **more}))
        assert ledger.widest <= max(TILE, 8 * length)
        assert ledger.most <= linear(length)


def test_attention_that_is_written_out_does_not_pass_for_linear() -> None:
    ledger = held(written_out, LENGTHS[-1], "meta", Rule(True))
    assert ledger.widest == HEADS * LENGTHS[-1] ** 2
    assert ledger.most > 5 * linear(LENGTHS[-1])


@pytest.mark.parametrize("work", [trained, massed])
def test_tensors_without_values_are_counted_as_those_with(
    work: Callable[[int, str, Rule], None],
) -> None:
    rule = Rule(True, tile_numbers=2000)
    real, without = (held(work, 200, device, rule) for device in ("cpu", "meta"))
    assert (real.most, real.widest) == (without.most, without.widest)
    assert real.widest <= 2000


@pytest.mark.parametrize(("length", "device"), [(64, "cpu"), (16384, "meta")])
def test_what_is_saved_for_backward_is_linear(length: int, device: str) -> None:
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes() // t.itemsize
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attend(*tensors(length, device), places(length, device), Rule(True, tile_numbers=TILE))
    # q, k, v, out of 4 numbers and the log-sum-exp: (2 + 1 + 1 + 2) · 4 + 2 a token.
    assert sum(kept.values()) == 26 * length
