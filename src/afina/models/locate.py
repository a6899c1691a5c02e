"""From what the user names to a local folder that a model can be loaded from, fetched or converted if need be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelError, nearest
from ..places import exists, local
from ..problems import name_of
from . import demo, gguf, remote
from .folder import check_folder, no_config, not_a_model_file

ALIKE = 0.6
"""How much of two names must agree before one is taken for a slip of the other."""


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
        ConfigError: what is given is no name.
    """
    name = name_of(source, "the model", "a folder, a .gguf file, a demo name or a hub id")
    if revision is not None:
        revision = name_of(revision, "the revision", "a branch, tag or commit of a hub id")
    path = local(name)
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
    return _folder(_fetched(name, revision, token, offline))


def _fetched(
    name: str, revision: str | None, token: str | bool | None, offline: bool | None
) -> Path:
    """The folder of a model of the hub; where there is none, the folders here that may have been meant are named."""
    try:
        return remote.fetch(name, revision=revision, token=token, offline=offline)
    except ModelError as error:
        raise asking(error, nearby(name)) from error


def asking(error: ModelError, near: Sequence[str]) -> ModelError:
    """The error of a name that is nothing, which first asks whether one of these was meant; itself without any."""
    if not near:
        return error
    cure = f"did you mean {' or '.join(near)}?"
    if error.cure:
        cure += f" Else: {error.cure}"
    return ModelError(error.what, got=error.got, wanted=error.wanted, cure=cure)


MODEL = ("config.json",)
TUNED = ("config.yaml", "adapter_config.json")
"""Files that mark a folder as a model; as a run, or an adapter."""


def nearby(name: str, marks: Sequence[str] = MODEL) -> list[str]:
    """What lies here under a name like `name`, which is that of nothing, and has one of the marks.

    The first part of the path that does not exist is what was mistyped; what follows it is looked for below. A .gguf
    file counts as a model.
    """
    wanted = local(name)
    parts = [wanted, *wanted.parents]
    known = next((number for number, path in enumerate(parts) if exists(path)), None)
    if known is None or known == 0:
        return []
    home, missing = parts[known], parts[known - 1].name
    rest = wanted.relative_to(parts[known - 1])
    try:
        names = sorted(path.name for path in home.iterdir())
    except OSError:  # a file, or a folder that may not be looked into
        return []
    found = [home / one / rest for one in nearest(missing, names, len(names) or 1, alike=ALIKE)]
    fit = [
        path
        for path in found
        if (path.suffix == ".gguf" and marks == MODEL) or any(exists(path / m) for m in marks)
    ]
    return [str(path) for path in fit[:3]]


def _cure_of_name(name: str) -> str:
    near = nearby(name)
    if near:
        return f"did you mean {' or '.join(near)}?"
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
