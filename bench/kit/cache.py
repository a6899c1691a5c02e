"""Finished pieces kept by content: a key changes with whatever could change the result."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from .jobs import Job
from .rows import content_hash

PLACES = ("folder", "model", "rows", "threads")
"""Fields of a job that say where or with how much, not what: they do not enter the key."""

SOURCES = ("*.py", "*.cpp", "*.h")


def files_hash(files: list[Path], root: Path) -> str:
    """sha256 over names (relative to `root`) and contents of files, in short."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def model_hash(folder: str | Path) -> str:
    """Fingerprint of a model or adapter folder: its weights and its configuration."""
    root = Path(folder)
    return files_hash([*root.glob("*config.json"), *root.glob("*.safetensors")], root)


def source_hash(package: str | Path) -> str:
    """Fingerprint of a package's own source: every Python and C++ file below its folder."""
    root = Path(package)
    return files_hash([file for kind in SOURCES for file in root.rglob(kind)], root)


def tool_version(tool: str) -> str:
    """What identifies the code of a tool: the versions of the libraries, or the hash of afina's source tree."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    if tool == "peer":
        return f"{libraries} peft {version('peft')} accelerate {version('accelerate')}"
    import afina

    return f"{libraries} afina {source_hash(Path(str(afina.__file__)).parent)}"


def machine() -> str:
    """What a speed depends on beside the code: the processor's name and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {cores()} cores"


def cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def job_key(job: Job, rows_hash: str, model: str, tool: str, where: str = "") -> str:
    """The key of a job's result.

    Args:
        job: what is done.
        rows_hash: of the rows file.
        model: `model_hash` of the model's folder.
        tool: `tool_version` of the tool.
        where: `machine()` for a speed; empty for a quality, which does not depend on it.
    """
    what = {key: value for key, value in asdict(job).items() if key not in PLACES}
    if where:
        what["threads"] = job.threads
    return content_hash([what, rows_hash, model, tool, where])
