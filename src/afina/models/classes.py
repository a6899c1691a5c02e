"""The names of a classifier's classes, in its config, where Transformers and PEFT look for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


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


def check_names(names: Any, count: int | None) -> tuple[str, ...] | None:
    """The names as given to `load`; None where none were.

    Raises:
        ConfigError: not a list of different texts, or not so many as `count` says.
    """
    if names is None:
        return None
    listed = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    fits = listed and all(isinstance(name, str) and name for name in listed)
    if not fits or len(set(listed)) != len(listed):
        raise ConfigError(
            "labels are the names of the classes, each once",
            got=repr(names)[:80],
            wanted="labels=['yes', 'no']",
        )
    if count is not None and count != len(listed):
        raise ConfigError(
            "num_labels and labels disagree",
            got=f"{count} and {len(listed)} names",
            cure="leave num_labels out",
        )
    return listed


def name_head(
    config: Any, task: str, names: tuple[str, ...] | None, count: int | None
) -> int | None:
    """Writes the names of a head's classes into the config; how many classes it is to have, None for its own number.

    A config that has classes of these names keeps them, for its head was made for them.

    Raises:
        ConfigError: names for a model that has no classes.
    """
    if names is None:
        return count
    if task not in ("classification", "token_classification"):
        raise ConfigError(
            "labels are for a classifier",
            got=f"task={task!r}",
            wanted="task='classification' or 'token_classification'",
        )
    ending = "ForSequenceClassification" if task == "classification" else "ForTokenClassification"
    made_for = (getattr(config, "architectures", None) or [""])[0].endswith(ending)
    own = {str(name) for name in (getattr(config, "id2label", None) or {}).values()}
    if made_for and own.issuperset(names):
        return None
    name_classes(config, names)
    return len(names)
