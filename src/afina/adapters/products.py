"""The low-rank change of one place of an adapter, read from its tensors and the configuration.

    ΔW = s · B A

Legend: B (out × r), A (r × in), s the scale, as the configuration and its patterns say.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from afina.adapters.kinds import Config, Parts
from afina.adapters.layout import CONFIG
from afina.adapters.peft_lora import pattern
from afina.errors import AdapterError
from afina.techniques.adalora import RANK_SHIFT

LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
VALUES = ("lora_A", "lora_B", "lora_E")
"""AdaLoRA's: A, B, and the values (r, 1) between them."""

INSTEAD = (
    "merge each into a model, and make a LoRA of the difference: afina merge, then afina extract"
)
"""What helps where a change is none that can be added as factors."""


@dataclass(frozen=True)
class Product:
    """s · B A.

    Attributes:
        b_OR: (out, r).
        a_RI: (r, in).
        scale: s.
        embedding: it lies beside an embedding: in is the vocabulary, out the width.
    """

    b_OR: Tensor
    a_RI: Tensor
    scale: float = 1.0
    embedding: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a_RI.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the change: (out, in)."""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    def dense(self) -> Tensor:
        """The change written out, (out, in), in fp64."""
        return self.scale * (self.b_OR.double() @ self.a_RI.double())

    def tensors(self) -> dict[str, Tensor]:
        """A and B by the endings of their keys; the scale must be 1."""
        ends = EMBEDDING if self.embedding else LINEAR
        return dict(zip(ends, (self.a_RI, self.b_OR), strict=True))


def product_of(name: str, parts: Parts, config: Config, folder: Path) -> Product:
    """The change of one place.

    Args:
        name: of the module, as the configuration calls it.
        parts: its tensors, by the endings of their keys.
        config: the adapter's.
        folder: the adapter's, for errors.

    Raises:
        AdapterError: a tensor is lacking or has a shape that fits nothing, or rank or alpha are in doubt.
    """
    ends = next((e for e in (LINEAR, EMBEDDING, VALUES) if set(e) == set(parts)), None)
    if ends is None:
        raise AdapterError(
            "a place of the adapter is no product of A and B alone",
            got=f"{folder}: {name} with {', '.join(sorted(parts))}",
            wanted=" and ".join(LINEAR),
            cure=INSTEAD,
        )
    a_RI, b_OR = parts[ends[0]], parts[ends[1]]
    if a_RI.dim() != 2 or b_OR.dim() != 2 or a_RI.shape[0] != b_OR.shape[1]:
        raise AdapterError(
            "the factors of one place do not fit each other",
            got=f"{folder}: {name}, A {tuple(a_RI.shape)}, B {tuple(b_OR.shape)}",
            wanted="A (r, in) and B (out, r)",
        )
    rank = a_RI.shape[0]
    if rank == 0:
        raise AdapterError("the factors of one place are empty", got=f"{folder}: {name}")
    if ends == VALUES:
        alpha, first = (_number(config.get(key), key, folder) for key in ("lora_alpha", "init_r"))
        return Product(b_OR, a_RI * parts[VALUES[2]], alpha / (first + RANK_SHIFT))
    alpha = alpha_of(name, rank, config, folder)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Product(b_OR, a_RI, scale, ends == EMBEDDING)


def patterns_of(name: str, key: str, default: Any, config: Config, folder: Path) -> list[Any]:
    """The values that a table of the configuration has for a place.

    Args:
        name: of the place, as the configuration calls it.
        key: of the table.
        default: where it has none.
        config: the adapter's.
        folder: the adapter's, for errors.

    Raises:
        AdapterError: it is no table, or its names are no regular expressions.
    """
    try:
        return pattern(config.get(key), name, default)
    except (re.error, AttributeError) as error:  # no table, or no expressions in it
        raise AdapterError(
            "the patterns of ranks or alphas are none", got=f"{folder / CONFIG}: {error}"
        ) from None


def alpha_of(name: str, rank: int, config: Config, folder: Path) -> float:
    """The alpha of a place whose factors have this rank.

    Raises:
        AdapterError: the configuration says another rank, or more than one alpha.
    """
    ranks = patterns_of(name, "rank_pattern", config.get("r"), config, folder)
    alphas = patterns_of(name, "alpha_pattern", config.get("lora_alpha"), config, folder)
    if rank not in ranks:
        raise AdapterError(
            "a rank in the file and in the configuration differ",
            got=f"{folder}: {name}, file {rank}, configuration {' or '.join(map(str, ranks))}",
        )
    if len(alphas) > 1:
        raise AdapterError(
            "several patterns of alpha_pattern name one place",
            got=f"{folder}: {name}, {' or '.join(map(str, alphas))}",
            cure="the first counted in training, and PEFT sorts them when it saves: keep the one that counted",
        )
    return _number(alphas[0], "an alpha", folder)


def _number(value: Any, what: str, folder: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{what} is no number", got=f"{folder / CONFIG}: {value!r}")
    return float(value)
