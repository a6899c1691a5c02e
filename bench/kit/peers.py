"""Tools beside the usual peer, each in an environment of its own: where it is, what installs it, which version it is.

Their versions of PyTorch, Transformers and PEFT differ from afina's and from one another's, so none is imported here.
A folder holds one virtual environment for each, by the tool's name; one that is not there is left out, and said.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Other:
    """One tool.

    Attributes:
        key: its folder's name, and that of its worker.
        name: for the table.
        packages: what pip installs.
        versions: packages whose versions say which code it is.
        knobs: of its worker, beside those that every tool has.
    """

    key: str
    name: str
    packages: tuple[str, ...]
    versions: tuple[str, ...]
    knobs: dict[str, Any]


OTHERS = (
    Other("trl", "TRL", ("trl", "peft"), ("trl", "peft", "transformers", "torch"), {}),
    Other(
        "llamafactory",
        "LLaMA-Factory",
        ("llamafactory",),
        ("llamafactory", "trl", "peft", "transformers", "torch"),
        {},
    ),
    Other("litgpt", "litgpt", ("litgpt",), ("litgpt", "lightning", "torch"), {}),
    Other(
        "unsloth",
        "Unsloth",
        ("unsloth",),
        ("unsloth", "unsloth_zoo", "trl", "peft", "transformers", "torch"),
        {},
    ),
)

_VERSIONS = "import sys, importlib.metadata as m; print(' '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


def python_of(other: Other, folder: Path) -> Path:
    """The interpreter of a tool's environment, there or not."""
    return folder / other.key / "bin" / "python"


def version_of(other: Other, folder: Path) -> str | None:
    """The versions of a tool and what it stands on; None where it is not installed."""
    python = python_of(other, folder)
    if not python.exists():
        return None
    asked = subprocess.run(
        [python, "-c", _VERSIONS, *other.versions], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def how_to_install(other: Other, folder: Path) -> str:
    """The line that makes a tool's environment, with the torch that is here: a newer one may be of another kind."""
    place = folder / other.key
    torch = version("torch").partition("+")[0]
    wanted = " ".join((*other.packages, f"torch=={torch}"))
    return f"python -m venv {place} && {place}/bin/pip install {wanted}"
