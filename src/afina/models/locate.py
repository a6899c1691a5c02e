"""From what the user names to a local folder that a model can be loaded from, fetched or converted if need be."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ModelError, nearest
from ..places import exists, local
from . import demo, gguf, remote
from .folder import check_folder, no_config, not_a_model_file


def resolve(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> Path:
    """The local Hugging Face folder of `source`, fetched or converted if need be.

    Raises:
        ModelError: it cannot be found, or holds nothing that afina loads.
    """
    name, path = str(source), local(source)
    of_hub = name not in demo.DEMOS and not exists(path) and not _looks_local(name)
    if revision is not None and not of_hub:
        raise ModelError(
            "only a model of the Hugging Face Hub has revisions",
            got=f"{name} at {revision}",
            wanted="a hub id owner/name",
            cure="leave the revision out",
        )
    if name in demo.DEMOS:
        return demo.fetch(name, offline=bool(offline))
    if exists(path):
        return _folder(path) if path.is_dir() else _file(path)
    if not of_hub:
        raise ModelError(
            "no such file or folder",
            got=name,
            wanted="a Hugging Face folder or a .gguf file",
            cure=_cure_of_name(name),
        )
    _refuse_misspelt_demo(name)
    return _folder(remote.fetch(name, revision=revision, token=token, offline=offline))


def _cure_of_name(name: str) -> str:
    address = re.match(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)", name)
    if address:
        return f"name it as the hub does: {address[1]}"
    if "://" in name:
        return "download it first, and name the file or folder"
    return f"the working directory is {Path.cwd()}: check the path"


def _looks_local(name: str) -> bool:
    """Whether `name` can only be meant as a path."""
    return name.endswith(".gguf") or not remote.HUB_ID.fullmatch(name)


def _refuse_misspelt_demo(name: str) -> None:
    near = nearest(name.lower(), list(demo.DEMOS), most=1)
    if near and "/" not in name:
        raise ModelError(
            "unknown demo model",
            got=name,
            wanted=" or ".join(demo.DEMOS),
            cure=f"did you mean {near[0]}? A model of the Hugging Face Hub is named owner/name",
        )


def _file(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise not_a_model_file(path)
    return gguf.folder_of(path)


def _folder(path: Path) -> Path:
    """`path`, if a model can be loaded from it; if it only holds one GGUF file, that file's folder."""
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return gguf.folder_of(files[0])
        raise no_config(path, files)
    check_folder(path)
    return path
