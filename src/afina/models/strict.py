"""That every tensor of a model came from its file: Transformers draws a missing one at random, and only logs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ModelError, counted

log = logging.getLogger(__name__)

HEADS = frozenset(
    {"classifier", "score", "pre_classifier", "classification_head", "pooler", "head"}
)
"""Parts of names that a checkpoint made for another task lacks for good reason."""


def check_loaded(
    source: Path, loaded: Mapping[str, Any], *, new_head: bool = False, model: Any = None
) -> None:
    """Raise unless all tensors were read, apart from a new head's where one is wanted.

    Args:
        source: where they were read from, for the message.
        loaded: what `from_pretrained(..., output_loading_info=True)` says.
        new_head: the task brings a head, or does without one, that the file need not have.
        model: what was loaded; with it, blocks that the file has and the model has not are refused too.

    Raises:
        ModelError: naming some of the tensors that are missing, of another shape, or left over.
    """
    missing = sorted(loaded["missing_keys"])
    other = {str(name): shapes for name, *shapes in loaded["mismatched_keys"]}
    if new_head:
        missing = [name for name in missing if not HEADS & set(name.split("."))]
        other = {name: how for name, how in other.items() if not HEADS & set(name.split("."))}
    if missing or other:
        names = [*missing, *(f"{name} ({_shapes(other[name])})" for name in sorted(other))]
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ModelError(
            f"{counted(len(names), 'tensor')} of the model {'is' if len(names) == 1 else 'are'} not in its file",
            got=f"{source} without {shown}",
            wanted="every tensor that config.json calls for",
            cure="download the files again, all of one revision; or name the task that they were made for",
        )
    left = sorted(loaded.get("unexpected_keys", ()))
    beyond = [name for name in left if _beyond(name, _depths(model))] if model is not None else []
    if beyond:
        raise ModelError(
            "config.json calls for fewer blocks than the weights have",
            got=f"{source}: {beyond[0]} and {counted(len(beyond) - 1, 'more tensor')} without a place",
            wanted="config.json and weights of one model",
            cure="copy config.json of the original model",
        )
    if left and not new_head:  # where a head was left out on purpose, its tensors are
        log.warning(
            "%s: %s without a place in the model, left out: %s",
            source,
            counted(len(left), "tensor"),
            ", ".join(left[:3]),
        )


def _shapes(shapes: Sequence[Any]) -> str:
    got, wanted = (tuple(shape) for shape in shapes[:2]) if len(shapes) > 1 else ((), ())
    return f"{got} where the config says {wanted}" if got or wanted else "another shape"


def _depths(model: Any) -> dict[str, int]:
    """The number of modules in each numbered list of the model, by its name."""
    return {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }


def _beyond(name: str, depths: Mapping[str, int]) -> bool:
    """Whether a tensor belongs to a block behind the last one of a list."""
    for listed, depth in depths.items():
        head, found, tail = name.partition(f"{listed}.")
        number = tail.partition(".")[0]
        if found and (not head or head.endswith(".")) and number.isdecimal():
            return int(number) >= depth
    return False
