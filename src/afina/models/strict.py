"""That every tensor of a model came from its file: Transformers draws a missing one at random, and only logs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError

HEADS = frozenset({"classifier", "score", "pre_classifier", "classification_head", "pooler"})
"""Parts of names that a checkpoint made for another task lacks for good reason."""


def check_loaded(source: Path, loaded: Mapping[str, Any], *, new_head: bool = False) -> None:
    """Raise unless all tensors were read, apart from a new head's where one is wanted.

    Args:
        source: where they were read from, for the message.
        loaded: what `from_pretrained(..., output_loading_info=True)` says.
        new_head: the task brings a head, or does without one, that the file need not have.

    Raises:
        ModelError: naming some of the tensors that are missing or of another shape.
    """
    missing = sorted(loaded["missing_keys"])
    other = sorted(str(each[0]) for each in loaded["mismatched_keys"])
    if new_head:
        missing, other = (
            [n for n in each if not HEADS & set(n.split("."))] for each in (missing, other)
        )
    if missing or other:
        names = [*missing, *(f"{name} (another shape)" for name in other)]
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ModelError(
            f"{len(names)} tensors of the model are not in its file",
            got=f"{source} without {shown}",
            wanted="every tensor that config.json calls for",
            cure="download the files again, all of one revision; or name the task that they were made for",
        )
