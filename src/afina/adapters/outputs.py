"""Where a computed adapter may be written, and the tokenizer that goes along."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from afina.adapters.card import read_settings
from afina.adapters.layout import TEMPLATES, TOKENIZER
from afina.errors import ConfigError
from afina.places import exists, local
from afina.problems import name_of

MADE_BY = "made by"
"""Under `settings` in `afina.json`: the verb that computed an adapter."""


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a tokenizer's files, its chat templates among them."""
    for name in sorted(TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)


def tokenizer_in(folder: Path) -> Path | None:
    """The folder, if a tokenizer lies in it."""
    return folder if (folder / "tokenizer_config.json").is_file() else None


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    return '"chat_template"' in (folder / "tokenizer_config.json").read_text(encoding="utf-8")


def place_of(out: Any) -> Path:
    """The output's path: a link to a folder is followed, for it is the folder that is replaced."""
    place = local(name_of(out, "the output", "a folder to make"))
    return place.resolve() if place.is_symlink() and place.is_dir() else place


def refuse_out(out: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Checks, changing nothing, that the output may be made.

    Args:
        out: the folder.
        sources: folders that are read.
        overwrite: an adapter that was computed before may be replaced.

    Raises:
        ConfigError: it exists and may not be replaced, or would take the place of a source.
    """
    for source in sources:
        if exists(source) and source.resolve().is_relative_to(out.resolve()):
            raise ConfigError(
                "the output would take the place of what it is made from",
                got=f"{out}, and {source}",
                cure="name another output",
            )
    above = next(folder for folder in out.absolute().parents if exists(folder))
    if not above.is_dir():
        raise ConfigError("the output cannot be made there", got=f"{above} is a file")
    if not exists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    made = out.is_dir() and MADE_BY in read_settings(out)
    if not made:
        raise ConfigError(
            "the output exists, and it is no adapter that was computed here",
            got=out,
            cure="name another; what was trained, or is something else, is never overwritten",
        )
    if not overwrite:
        raise ConfigError(
            "the output exists",
            got=out,
            cure="name another, or replace it: --overwrite, in Python overwrite=True in the settings",
        )
