"""The run's folder: claimed before anything is written, never overwritten without being told."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from afina.errors import RunError

CONFIG = "config.yaml"
PACKAGES = ("afina", "torch", "transformers", "tokenizers", "safetensors", "peft", "datasets")


def refuse_used(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Checks, changing nothing, that a run may have this folder.

    Raises:
        RunError: when it holds something and nobody said what to do with it, or there is nothing to resume.
    """
    if resume:
        if not (out / CONFIG).exists():
            raise RunError("there is no run to resume", got=out, wanted=f"a folder with {CONFIG}")
        return
    if out.is_file():
        raise RunError("the run's folder is a file", got=out, cure="name a new folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise RunError(
            "the output folder is in use",
            got=out,
            cure="name a new folder, or say --overwrite (the run in it is lost) or --resume",
        )
    if not (out / CONFIG).exists():
        raise RunError(
            "the output folder holds something that is not a run, so it is not overwritten",
            got=out,
            cure="name a new folder",
        )


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Makes the folder of a new run; see `refuse_used`."""
    refuse_used(out, resume=resume, overwrite=overwrite)
    if overwrite and not resume and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Versions and machine of this run."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
