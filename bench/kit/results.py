"""Finished results as small files that git keeps, so that a table is completed in parts and on any machine."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .cache import machine
from .jobs import write_json

ROOT = Path(__file__).parents[2]


class Results:
    """A folder of result files, each with the job that it answers and where and by what code it was made.

    A file is `{"key", "job", "commit", "machine", "versions", "result"}`; its name is for people.

    Args:
        folder: of the files; made when the first is written.
        cached: take a result by its job alone, whatever rows and model it was made with: they need not be here.
    """

    def __init__(self, folder: Path, *, cached: bool = False) -> None:
        self.folder, self.cached = folder, cached

    def read(self, name: str, job: dict[str, Any], key: str) -> dict[str, Any] | None:
        """The result of that job; None when it is not there.

        Args:
            name: of the file, without its ending.
            job: what was asked for.
            key: changes with whatever could change the result.
        """
        file = self.folder / f"{name}.json"
        if not file.exists():
            return None
        kept = json.loads(file.read_text("utf-8"))
        fits = kept["job"] == job if self.cached else kept["key"] == key
        return kept["result"] if fits else None

    def write(
        self, name: str, job: dict[str, Any], key: str, result: dict[str, Any], by: str
    ) -> None:
        """Keeps a result in the place of any other of that name.

        Args:
            name, job, key: as of `read`.
            result: numbers by name.
            by: the commit of the code that made it.
        """
        body = {
            "key": key,
            "job": job,
            "commit": by,
            "machine": machine(),
            "versions": versions(),
            "result": result,
        }
        write_json(self.folder / f"{name}.json", body)


def versions() -> dict[str, str]:
    """Of Python and the libraries that compute."""
    found = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **found}


def commit() -> str:
    """The commit of this work tree, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"
