"""How the next token is chosen: filters on the logits, and a draw that belongs to the row and not to its batch.

Sampling is by the Gumbel-max trick: `argmax(log p + g)` with independent Gumbel noise `g` draws exactly from `p`
(Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014, section 2). Each row has its own generator, so a
prompt's answer does not change with the prompts beside it, and the global random state is never touched.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from afina.config import GenerateSettings


def filtered(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits to sample from: divided by the temperature, then cut to `top_k`, then to `top_p`.

    Args:
        logits_BV: of the next token.
        temperature: above 0.
        top_k: how many of the likeliest tokens stay; 0 keeps all.
        top_p: the likeliest tokens stay until they hold this much probability (Holtzman et al. 2020, section 3.1);
            the token that crosses the line stays too, so at least one always does.

    Returns:
        A tensor of the same shape; what was cut is minus infinity.
    """
    kept_BV = logits_BV / temperature
    if 0 < top_k < kept_BV.shape[-1]:
        least_B1 = kept_BV.topk(top_k, dim=-1).values[:, -1:]
        kept_BV = kept_BV.masked_fill(kept_BV < least_B1, -torch.inf)
    if top_p < 1:
        sorted_BV, order_BV = kept_BV.sort(dim=-1, descending=True)
        p_BV = sorted_BV.softmax(dim=-1)
        # What lies before a token decides; so the first is never cut.
        cut_BV = p_BV.cumsum(dim=-1) - p_BV >= top_p
        kept_BV = kept_BV.masked_fill(cut_BV.scatter(-1, order_BV, cut_BV), -torch.inf)
    return kept_BV


def seed_of_row(seed: int, row: int) -> int:
    """A 63-bit seed for one row: near seeds and near rows give unrelated draws."""
    digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Draw(LogitsProcessor):
    """Scores whose largest entry is a draw from the filtered distribution, one independent stream a row.

    Args:
        settings: temperature (above 0), top_k, top_p and seed.
        rows: the number of each row of the batch among all prompts; it chooses the row's stream.
    """

    def __init__(self, settings: GenerateSettings, rows: Sequence[int]) -> None:
        self.settings = settings
        self.generators = [
            torch.Generator().manual_seed(seed_of_row(settings.seed, row)) for row in rows
        ]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) with the filters applied and the noise added."""
        settings = self.settings
        kept_BV = filtered(
            scores,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        width = scores.shape[-1]
        # Minus the logarithm of an exponential draw is Gumbel noise; drawn on the CPU so that devices agree.
        noise_BV = torch.stack(
            [torch.empty(width).exponential_(generator=own) for own in self.generators]
        )
        noise_BV = noise_BV.clamp_min(torch.finfo(noise_BV.dtype).tiny).log()
        return kept_BV - noise_BV.to(kept_BV.device, kept_BV.dtype)
