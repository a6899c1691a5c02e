"""What verbs write: whole files or none, and progress for whoever watches."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from afina.errors import ConfigError
from afina.places import exists, local


def refuse_unwritable(*paths: str | None, force: bool, flag: str = "--force") -> None:
    """Checks, before anything is loaded, that files may be written; "-" and None are no files.

    Args:
        *paths: as the user names them.
        force: what is there may be replaced.
        flag: how the user says so.

    Raises:
        ConfigError: one is a folder, lies where nothing can be made, or exists and nobody said to replace it; or two
            are the same.
    """
    named = [path for path in paths if path is not None]
    for number, path in enumerate(named):
        if path in named[:number]:
            raise ConfigError("two outputs are one file", got=path, cure="name two files")
        if path != "-":
            try:
                _refuse_file(Path(path), force=force, flag=flag)
            except OSError as error:  # a name too long, a folder that may not be looked into
                raise unwritable(Path(path), error, "name a file elsewhere") from None


def _refuse_file(file: Path, *, force: bool, flag: str) -> None:
    if is_device(file):
        return
    if file.is_dir():
        raise ConfigError("the output is a folder", got=file, wanted="the name of a file")
    if file.exists() and not force:
        raise ConfigError(
            "the output exists", got=file, cure=f"name another file, or say {flag} to replace it"
        )
    # Found by making a file: rights alone do not tell (a read-only disk).
    place = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".afina-"):
            pass
    except OSError as error:
        raise unwritable(
            file, error, f"name a file elsewhere; nothing can be made in {place}"
        ) from None


def refuse_over_inputs(outputs: Iterable[str | None], inputs: Iterable[object]) -> None:
    """Checks that no output takes the place of something that the verb reads, whatever may be replaced.

    A run's folder may get more files; what the run wrote, and all that lies in a model, an adapter or a folder of
    data, stays.

    Args:
        outputs: files as the user names them; "-" and None are none.
        inputs: names of files, folders and models of the hub; None is none.

    Raises:
        ConfigError: one would.
    """
    sources = [local(str(name)) for name in inputs if name is not None]
    for output in outputs:
        if output is None or output == "-" or is_device(Path(output)):
            continue
        file = Path(output)
        source = next((one for one in sources if exists(file) and _holds(one, file)), None)
        if source is not None:
            raise ConfigError(
                "the output would take the place of something that is read",
                got=file if _same(source, file) else f"{file} in {source}",
                cure="name another file",
            )


def _same(source: Path, file: Path) -> bool:
    return exists(source) and source.samefile(file)


def _holds(source: Path, file: Path) -> bool:
    """Whether an existing file is an input, or a part of one."""
    if not exists(source) or _same(source, file):
        return exists(source)
    if not file.resolve().is_relative_to(source.resolve()):
        return False
    if not (source / "config.yaml").is_file():
        return True
    from afina.train.folder import OF_A_RUN  # it needs torch, for which no early error waits

    return file.resolve().relative_to(source.resolve()).parts[0] in OF_A_RUN


def unwritable(file: Path, error: OSError, cure: str) -> ConfigError:
    """The error of an output that cannot be written."""
    return ConfigError(
        "the output cannot be written", got=f"{file} ({error.strerror or error})", cure=cure
    )


def is_device(file: Path) -> bool:
    """Whether writing goes elsewhere than into a file: /dev/null, a pipe."""
    return file.exists() and not file.is_file() and not file.is_dir()


def write_text(path: str, text: str) -> None:
    """Writes a file, and its folder if need be, whole or not at all; "-" is the standard output.

    Raises:
        ConfigError: it cannot be written; says where the text was kept instead.
    """
    if path == "-":
        sys.stdout.write(text)
        return
    file = Path(path)
    try:
        if is_device(file):
            file.write_text(text, encoding="utf-8")
        else:
            _replace(file, text)
    except OSError as error:
        raise unwritable(file, error, _kept(file.name, text)) from None


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _kept(name: str, text: str) -> str:
    """Keeps a text that has no other place, so that finished work is not lost; says where."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="afina-", suffix=f"-{name[-100:]}", delete=False
        ) as file:
            file.write(text)
    except OSError:
        sys.stdout.write(text)
        return "it went to the standard output instead"
    return f"it is kept: mv {file.name} WHERE-IT-FITS"


def write_json(path: str, value: Any) -> None:
    """Writes one JSON value, indented."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: str, rows: Iterable[Any]) -> None:
    """Writes one JSON value a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def note(text: str) -> None:
    """A line for people, beside the results."""
    print(text, file=sys.stderr, flush=True)


def progress() -> Callable[[str, int, int], None] | None:
    """Shows "answers 16/200" in place, or None where nobody watches."""
    if not sys.stderr.isatty():
        return None

    def show(what: str, done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{what} {done}/{total}\033[K", end=end, file=sys.stderr, flush=True)

    return show
