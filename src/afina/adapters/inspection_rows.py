"""The places of an adapter's file, and the spectrum of each change: what `inspect` has a row for.

Legend: ΔW = s · B A, the change of a low-rank place; effective rank as in `ops.svd`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afina.adapters.expert_products import of_experts, products_of_experts, starts_of
from afina.adapters.layout import PREFIX
from afina.adapters.peft_experts import ENDS
from afina.adapters.products import EMBEDDING, LINEAR, VALUES, Product, product_of
from afina.errors import AdapterError
from afina.ops import svd

SILENT = 1e-12
"""A change whose norm is below this is called none."""

FACTORS = "ia3_l"
"""Factors that change nothing where they are 1."""

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_ENDING = re.compile(
    r"\.(?P<part>(lora|ia3|ada|prompt|adapter|trainable)[^.]*|[^.]*)(\.(?P<adapter>default))?(\.weight|\.bias)?$"
)
_WRAPPED = re.compile(r"\.(base_layer|token_adapter|(original_module|modules_to_save)(\.[^.]+)?)$")
"""What PEFT sets between a module and a tensor of the base."""


@dataclass(frozen=True)
class Row:
    """One place of an adapter.

    Attributes:
        name: of the module, or of the tensor where it is of none.
        tensors: endings of the keys there.
        parameters: how many numbers.
        norm: of ΔW for a low-rank place, of all experts together; of what factors differ from 1; else of the tensors.
        shape: of ΔW: (out, in), for fused experts (experts, out, in); None for what is no low-rank place.
        rank: r.
        scale: s.
        spectral: the largest singular value of ΔW, of all experts.
        effective: the effective rank of ΔW, of experts their mean.
    """

    name: str
    tensors: tuple[str, ...]
    parameters: int
    norm: float
    shape: tuple[int, ...] | None = None
    rank: int | None = None
    scale: float | None = None
    spectral: float | None = None
    effective: float | None = None

    @property
    def block(self) -> int | None:
        """The first number in the name."""
        found = _NUMBER.search(self.name)
        return None if found is None else int(found[1])

    @property
    def tail(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def groups_of(
    tensors: Mapping[str, Tensor], ending: re.Pattern[str] | None
) -> dict[str, dict[str, Tensor]]:
    """The tensors by the module that they are of.

    Args:
        tensors: by their keys in the file.
        ending: of the keys of the technique's own tensors; None where afina does not know the technique.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        match = (_ENDING if ending is None else ending).search(key)
        name = key if match is None else key[: match.start()]
        if match is None or f"{name}." == PREFIX:  # a tensor of the base, whole, under its own name
            match, name = None, key.rpartition(".")[0] or key
        part = key[len(name) :].lstrip(".")
        name = name if match is not None else _WRAPPED.sub("", name)
        if match is not None and match["adapter"]:
            part = part.replace(f".{match['adapter']}", "", 1)
        while name.startswith(PREFIX):
            name = name.removeprefix(PREFIX)
        # Beside a prompt, PEFT has a shorter beginning.
        found.setdefault(name.removeprefix("base_model."), {})[part] = tensor
    return found


def rows_of(
    name: str,
    group: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: Path,
    strange: list[str],
) -> list[Row]:
    """The rows of one module; what is odd about it is added to `strange`.

    Args:
        name: of the module.
        group: its tensors, by the endings of their keys.
        config: the adapter's.
        folder: the adapter's.
        strange: is added to.
    """
    plain = Row(name, tuple(group), sum(t.numel() for t in group.values()), _norm(group))
    if not all(t.isfinite().all() for t in group.values()):
        return [plain]
    if of_experts(name, config):
        return _of_experts(plain, group, config, folder, strange)
    ends = next((e for e in (LINEAR, EMBEDDING, VALUES) if set(e) <= set(group)), None)
    if ends is None:
        if any("lora_A" in part or "lora_B" in part for part in group):
            strange.append(f"{name}: half of a pair: {', '.join(group)}")
        if set(group) == {FACTORS} and plain.norm < SILENT:
            strange.append(f"{name}: it changes nothing (its factors all 1)")
        return [plain]
    try:
        product = product_of(name, {end: group[end] for end in ends}, config, folder)
    except AdapterError as error:
        strange.append(f"{name}: {error.what}: {error.got}")
        return [plain]
    zero = [end for end in ends if not group[end].any()]
    return [_measured(plain, [product], product.shape, zero, strange)]


def _norm(group: Mapping[str, Tensor]) -> float:
    """Of tensors together, of factors without the 1 that they all have at the start."""
    moved = [t.double() - 1 if part == FACTORS else t.double() for part, t in group.items()]
    return math.sqrt(sum(float(t.square().sum()) for t in moved))


def _of_experts(
    plain: Row,
    group: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: Path,
    strange: list[str],
) -> list[Row]:
    """A row for each tensor of a module of fused experts."""
    found: list[Row] = []
    for start, own in starts_of(plain.name, group, config).items():
        name = f"{plain.name}.{own}" if own else f"{plain.name} {start or 'alone'}".rstrip(".")
        ends = [start + end for end in ENDS]
        if any(end not in group for end in ends):
            strange.append(f"{name}: half of a pair: {', '.join(group)}")
            return [plain]
        a_QI, b_OQ = (group[end] for end in ends)
        try:
            products = products_of_experts(name, a_QI, b_OQ, config, folder)
        except AdapterError as error:
            strange.append(f"{name}: {error.what}: {error.got}")
            return [plain]
        row = Row(name, tuple(ends), a_QI.numel() + b_OQ.numel(), 0.0)
        shape = (len(products), *products[0].shape)
        zero = [end for end in ends if not group[end].any()]
        found.append(_measured(row, products, shape, zero, strange))
    return found


def _measured(
    row: Row,
    products: Sequence[Product],
    shape: tuple[int, ...],
    zero: Sequence[str],
    strange: list[str],
) -> Row:
    """The row with the spectrum of its changes; one that is nothing is strange."""
    spectra = [svd.product_values(p.b_OR, p.a_RI) * abs(p.scale) for p in products]
    norm = float(torch.cat(spectra).square().sum().sqrt())
    if norm < SILENT:
        strange.append(
            f"{row.name}: it changes nothing ({' and '.join(zero) or 'the product'} all 0)"
        )
    return Row(
        row.name,
        row.tensors,
        row.parameters,
        norm,
        shape,
        products[0].rank,
        products[0].scale,
        max(float(values[0]) for values in spectra),
        sum(map(svd.effective_rank, spectra)) / len(spectra),
    )
