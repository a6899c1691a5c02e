"""The rounded base that an adapter was trained beside: what its record says, and how its weights are made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from afina.adapters.layout import RECORD, read_json, recorded
from afina.errors import AdapterError
from afina.ops.packed import PackedWeight, dense
from afina.techniques.quantize import COMPUTE, Quantize, found_in

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Rounded:
    """A base whose weights were quantised.

    Attributes:
        technique: how.
        dtype: of the weights that were quantised, which is also that of their values in the products.
    """

    technique: Quantize
    dtype: torch.dtype

    def values(self, weight: Tensor, name: str) -> Tensor:
        """The weight as the training computed with it, in `dtype`.

        Args:
            weight: the base's own, any floating-point type.
            name: of it, for errors.
        """
        return dense(self.technique.packed(weight.to(self.dtype), name))

    def each(self, model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
        """What becomes of each weight of a base, by name; the model may be on the meta device."""
        return {name: partial(self.values, name=name) for name in self.technique.weights(model)}

    def weights(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the weights, for `models.packing`."""
        return self.technique.weights(model)

    def packed(self, weight: Tensor, name: str) -> nn.Parameter:
        """The packed weight that has these values, whatever type the base is loaded in this time."""
        if weight.dtype == self.dtype:
            return self.technique.packed(weight, name)
        names = {dtype: key for key, dtype in COMPUTE.items()}
        compute = self.technique.compute_dtype or names.get(self.dtype)
        exact = self.technique.model_copy(update={"compute_dtype": compute})
        made = exact.packed(weight.to(self.dtype), name)
        return nn.Parameter(made.to(weight.dtype), requires_grad=False)

    def __str__(self) -> str:
        """In words, for notes."""
        kind = self.technique.kind
        return f"its weights rounded to {kind} (from {NAMES[self.dtype]}), and computed back"


def dtype_in(model: nn.Module) -> str | None:
    """The type that a model's quantised weights stand for, as the record has it; None where none is quantised."""
    if found_in(model) is None:
        return None
    return NAMES[next(p.dtype for p in model.parameters() if isinstance(p, PackedWeight))]


def read_rounded(folder: Path) -> Rounded | None:
    """The rounded base of the adapter in `folder`; None where it was trained on a whole one, or nothing is recorded.

    Raises:
        AdapterError: the record cannot be read.
    """
    folder = recorded(folder)
    if not (folder / RECORD).is_file():
        return None
    found = read_json(folder / RECORD, "the adapter's record")
    listed: Any = found.get("techniques")
    settings = [
        each[Quantize.key]
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict) and Quantize.key in each
    ]
    if not settings:
        return None
    base = found.get("base")
    dtype = base.get("quantised_from") if isinstance(base, dict) else None
    try:
        technique = Quantize.model_validate(settings[0]).rounding
    except ValidationError as error:
        raise _unreadable(folder, error.errors()[0]["msg"]) from None
    if dtype not in DTYPES:
        raise _unreadable(folder, f"quantised from {dtype!r}")
    return Rounded(technique, DTYPES[dtype])


def differences(model: nn.Module, folder: Path) -> tuple[str, ...]:
    """What to note where an adapter meets another rounding of its base than it was trained beside.

    Args:
        model: the base.
        folder: of the adapter; nothing is known of one without a record.
    """
    if not (recorded(folder) / RECORD).is_file():
        return ()
    rounded, here = read_rounded(folder), found_in(model)
    then = None if rounded is None else rounded.technique
    if _rounding(then) == _rounding(here):
        return ()
    told = {
        technique: "whole" if technique is None else f"in {technique.kind}"
        for technique in (then, here)
    }
    way = f"quantize={then.call}" if then is not None else "nothing for quantize"
    return (
        f"it was trained beside its base {told[then]}, and this one is {told[here]}, quantised otherwise: it answers a "
        f"little otherwise too; load the base with {way}",
    )


def _rounding(technique: Quantize | None) -> Quantize | None:
    """What decides on the values of a quantised base."""
    return None if technique is None else technique.model_copy(update={"compute_dtype": None})


def _unreadable(folder: Path, got: str) -> AdapterError:
    return AdapterError(
        "the adapter's record does not say how its base was quantised",
        got=f"{folder / RECORD}: {got}",
        wanted="what afina wrote",
        cure="take the file from where the adapter came from, or the version of afina that wrote it",
    )
