"""The floor of a step: the time of the matrix products that no way of training the model on its rows can leave out.

They are those of the frozen linears of the blocks, forward and backward to their inputs, over all tokens of the step in
one line, and those of the head, forward and backward, over the positions that are trained. They are made by
`torch.mm` with the model's own weights, in its format, into memory that is there from the beginning: what the products
took and gave back after each step would have to be mapped again in the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .meter import now_s

TIMES = 3
"""How often the products of a step are made; the median counts."""


class Floor:
    """Times steps, and after each the products of its shapes.

    Args:
        weights: (O, I), of the linears of the blocks.
        head: (V, D).
        sizes: tokens and trained positions of each step.
    """

    def __init__(
        self, weights: Sequence[Tensor], head: Tensor, sizes: Sequence[tuple[int, int]]
    ) -> None:
        self.weights, self.head, self.sizes = weights, head, sizes
        most = [max(each) for each in zip(*sizes, strict=True)]
        self.products = {weight.shape: _Products(weight, most[0]) for weight in weights}
        self.of_head = _Products(head, most[1])
        self.floor_s: list[float] = []
        self.step_s: list[float] = []
        self.before_s = now_s()

    def after_step(self, step: int) -> None:
        """Notes what the step took since the last products, and makes its own."""
        self.step_s.append(now_s() - self.before_s)
        tokens, trained = self.sizes[step]
        took: list[float] = []
        with torch.no_grad():
            for _ in range(TIMES):
                began = now_s()
                for weight in self.weights:
                    self.products[weight.shape].multiply(weight, tokens)
                self.of_head.multiply(self.head, trained)
                took.append(now_s() - began)
        self.floor_s.append(statistics.median(took))
        self.before_s = now_s()

    def result(self) -> dict[str, Any]:
        """Seconds of each step, and of its products."""
        return {"step_s": self.step_s, "floor_s": self.floor_s}


class _Products:
    """Input, output and their gradients of linears of one shape, for so many tokens at most."""

    def __init__(self, weight: Tensor, tokens: int) -> None:
        out, width = weight.shape
        self.x = torch.randn(tokens, width, dtype=weight.dtype)
        self.y = torch.randn(tokens, out, dtype=weight.dtype)
        self.z, self.dx = torch.zeros_like(self.y), torch.zeros_like(self.x)

    def multiply(self, weight: Tensor, tokens: int) -> None:
        """Forward and backward of so many tokens."""
        torch.mm(self.x[:tokens], weight.t(), out=self.z[:tokens])
        torch.mm(self.y[:tokens], weight, out=self.dx[:tokens])


def floor_of(model: Any, sizes: Sequence[tuple[int, int]]) -> Floor:
    """The floor of a causal model with linears in its blocks.

    Args:
        model: with its adapters or without.
        sizes: see `Floor`.
    """
    from afina import seams

    weights = [
        site.module.get_parameter("weight").detach()
        for site in seams.map_sites(model)
        if site.block is not None and site.kind == "linear"
    ]
    head = model.get_output_embeddings().weight.detach()
    return Floor(weights, head, sizes)
