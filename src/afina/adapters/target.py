"""Which model and adapter a name means: a run's folder, an adapter's, a checkpoint's, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afina.config.document import read_file
from afina.errors import AdapterError, ModelError, RunError
from afina.places import exists, local
from afina.problems import name_of

MOST = 5
"""Folders that an error names."""


@dataclass(frozen=True)
class Target:
    """What a verb works on.

    Attributes:
        base: the model, as `afina.load` takes it.
        adapter: a folder in PEFT's format; None is the model alone.
        run: the run folder, when one was given, or the adapter lies in one.
        revision: of a model on the hub.
    """

    base: str
    adapter: Path | None = None
    run: Path | None = None
    revision: str | None = None


def resolve_run(name: str) -> Target:
    """The model and adapter that a run folder, an adapter folder or a model's name means.

    Raises:
        RunError: a run folder without an adapter, or whose configuration names no model.
        AdapterError: an adapter that does not say what its base is.
        ModelError: a folder that is none of the three.
        ConfigError: an empty name.
    """
    folder = local(name_of(name, "the model", "a run, an adapter or a model"))
    if not exists(folder):
        return Target(name)
    if (folder / "config.yaml").is_file():
        return _of_run(folder)
    for place in (folder, folder / "adapter"):  # the second of a checkpoint
        if (place / "adapter_config.json").is_file():
            return _of_adapter(place)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            "the folder is neither a run, nor an adapter, nor a model",
            got=name,
            wanted="config.yaml (a run), adapter_config.json (an adapter) or config.json (a model)",
            cure=_cure_of(folder),
        )
    return Target(str(folder))


def inner_adapter(folder: Path) -> str | None:
    """The advice to name an adapter that lies in the folder; None where there is none.

    PEFT saves an adapter that is not called "default" in a folder of its name.
    """
    named = sorted(str(path.parent) for path in folder.glob("*/adapter_config.json"))
    return f"name the adapter in it: {' or '.join(named[:MOST])}" if named else None


def _cure_of(folder: Path) -> str:
    """What to name instead, or to put right, by what lies in a folder that is none of the three."""
    from afina.models.folder import cure_of

    return inner_adapter(folder) or cure_of(folder, sorted(folder.glob("*.gguf")))


def _of_run(folder: Path) -> Target:
    settings = read_file(folder / "config.yaml").value
    base = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(base, str):
        raise RunError("the run's configuration names no model", got=folder / "config.yaml")
    if (folder / "model" / "config.json").is_file():  # full fine-tuning keeps the whole model
        return Target(str(folder / "model"), None, folder)
    adapter = folder / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        raise RunError(
            "the run has no adapter yet",
            got=folder,
            wanted=f"{adapter}/adapter_config.json",
            cure=f"let it train to its end: afina train --resume -o {folder} (in Python "
            "RunOptions(resume=True))",
        )
    return Target(located(base, folder), adapter, folder, settings.get("revision"))


def located(base: str, folder: Path) -> str:
    """The base model of the run or adapter in `folder`, findable from the working directory.

    A run started with a relative path names its base as seen from where it was started. What is not there from the
    working directory is looked for from the folder and each folder above it; a base found nowhere stays as it is
    named, for it may be on the hub.
    """
    named = local(base)
    if named.is_absolute() or _is_model(named):
        return base
    home = folder.resolve()
    found = (place / named for place in (home, *home.parents))
    return next((str(path) for path in found if _is_model(path)), base)


def _is_model(path: Path) -> bool:
    if not exists(path):
        return False
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() or any(path.glob("*.gguf"))


def _of_adapter(folder: Path) -> Target:
    from afina.adapters.layout import (
        CONFIG,
        read_json,
    )  # it needs torch, which `--help` must not wait for

    settings = read_json(folder / CONFIG, CONFIG)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not base or not isinstance(base, str):
        raise AdapterError(
            "the adapter does not say which model it belongs to",
            got=f"{folder / CONFIG}: base_model_name_or_path {str(base)[:80]!r}",
            wanted="the name of a model",
        )
    return Target(
        located(base, folder),
        folder,
        _run_of(folder),
        revision if isinstance(revision, str) else None,
    )


def _run_of(adapter: Path) -> Path | None:
    """The run that an adapter lies in: RUN/adapter, or RUN/checkpoints/STEP/adapter."""
    if adapter.name != "adapter":
        return None
    for run in (adapter.parent, adapter.parent.parent.parent):
        if (run / "config.yaml").is_file():
            settings = read_file(run / "config.yaml").value
            if isinstance(settings, dict) and "model" in settings and "data" in settings:
                return run
    return None
