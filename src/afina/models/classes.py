"""The names of a classifier's classes, in its config, where Transformers and PEFT look for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def class_names(model: Any) -> tuple[str, ...] | None:
    """The names in the order of the classes' numbers; None where nobody gave any (Transformers says LABEL_0 then)."""
    names = getattr(model.config, "id2label", None) or {}
    told = tuple(str(names[number]) for number in sorted(names))
    return None if not told or told[0].startswith("LABEL_") else told


def name_classes(config: Any, names: Sequence[str]) -> None:
    """Writes the names, and so their number, into a model's config."""
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
