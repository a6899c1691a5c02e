"""Data settings that could have no effect: a promise not kept, such as a split of a file that has none.

Only settings that were changed are asked about, and one source that a setting is for is enough: training and validation
rows are read by the same settings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from afina.data.readers import kind
from afina.data.settings import DataSettings
from afina.data.sources import may_be_hub
from afina.errors import ConfigError
from afina.places import exists, local
from afina.problems import raise_all
from afina.types import Row

READING = {"format", "columns", "max_rows", "on_bad_row"}
"""Settings that change what any source gives but prepared rows."""

FOR: dict[str, str] = {
    "subset": "a data set of the hub",
    "revision": "a data set of the hub",
    "split": "a data set of the hub, or a folder with a file for each split",
    "txt": "a .txt file",
    **dict.fromkeys(sorted(READING), "data that is read, and these rows are prepared already"),
}
"""Setting -> what it is for."""

TURNLESS = ("text", "text_label", "tokens_tags")
"""Formats without turns, which no chat template is asked to write."""


def refuse_idle_data(
    sources: Sequence[Any], settings: DataSettings, formats: Collection[str] = ()
) -> None:
    """Raises for data settings that could have no effect.

    Args:
        sources: all that is read by these settings, as `afina.data.sources.read` takes it, or prepared rows.
        settings: of the data.
        formats: of the sources, where they are known.

    Raises:
        ConfigError: naming each such setting.
    """
    heeded = {name for source in sources for name in heeded_by(source)}
    problems: list[Any] = [
        _idle(settings, name, f"it is for {what}")
        for name, what in FOR.items()
        if name not in heeded and _changed(settings, name)
    ]
    if settings.seed and not settings.val_fraction:
        problems.append(
            _idle(settings, "seed", "it chooses the rows that data.val_fraction holds out")
        )
    if formats and set(formats).issubset(TURNLESS):
        if settings.train_on == "last":
            problems.append(_idle(settings, "train_on", "a text has no turns"))
        if settings.template == "chat":
            problems.append(_idle(settings, "template", "no chat template writes a text"))
    raise_all(problems)


def heeded_by(source: Any) -> set[str]:
    """Which of the settings in `FOR` can change what this source gives."""
    if isinstance(source, str | Path):
        return READING | _heeded_by_path(source)
    if not isinstance(source, Sequence):
        return set(FOR)  # what may give each item once is not asked
    given: list[Any] = list(source)
    if given and all(isinstance(one, Row) for one in given):
        return set()
    return READING.union(*(_heeded_by_path(one) for one in given if isinstance(one, str | Path)))


def _heeded_by_path(source: str | Path) -> set[str]:
    path = local(source)
    if not exists(path):
        return {"subset", "revision", "split"} if may_be_hub(str(source)) else set(FOR)
    if not path.is_dir():
        return {"txt"} if kind(path) == ".txt" else set()
    if (path / "state.json").exists():  # one saved table
        return set()
    texts = any(kind(file) == ".txt" for file in path.rglob("*"))
    return {"split", "txt"} if texts else {"split"}


def _changed(settings: DataSettings, name: str) -> bool:
    return getattr(settings, name) != getattr(DataSettings(), name)


def _idle(settings: DataSettings, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"data.{name} would do nothing: {why}",
        got=f"data.{name}={getattr(settings, name)}",
        cure="leave it out",
    )
