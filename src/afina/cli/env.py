"""`afina env`: what a report of a problem needs, and what this machine is good at."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from afina.cli.common import print_json

EXAMPLES = ("afina env", "afina env --json")

PACKAGES = (
    "afina", "torch", "transformers", "tokenizers", "safetensors", "datasets", "gguf", "pydantic", "peft",
)  # fmt: skip
"""Packages whose versions decide what a run does (peft: only for exchanging adapters)."""

CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
"""Those, of all that a CPU lists, that change which kernels are fast."""


def facts() -> dict[str, Any]:
    """Versions, devices, threads, CPU and cache, as plain values; sizes in bytes."""
    import torch

    from afina.cli import compiled
    from afina.models import cache, precision

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [
            f"cuda:{n} {torch.cuda.get_device_name(n)}" for n in range(torch.cuda.device_count())
        ]
    if torch.backends.mps.is_available():
        devices.append("mps")
    chosen = precision.choose("cuda" if torch.cuda.is_available() else "cpu")
    model, features = _cpu()
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": devices,
        "cpu": model,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": {
            "base": str(chosen.base).removeprefix("torch."),
            "compute": str(chosen.compute).removeprefix("torch."),
            "reason": chosen.reason,
        },
        "memory_bytes": _memory_bytes(),
        "cache": str(cache.root()),
        "compiled": str(compiled.folder()),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name
            in (
                "HF_HOME",
                "HF_HUB_OFFLINE",
                "AFINA_CACHE",
                "CUDA_VISIBLE_DEVICES",
                "OMP_NUM_THREADS",
                "TORCHINDUCTOR_CACHE_DIR",
            )
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> tuple[str, list[str]]:
    """The CPU's name and its features of interest; Linux says both in one file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (said.get("flags") or said.get("Features") or "").split()
    return said.get("model name", platform.machine()), [f for f in CPU_FEATURES if f in flags]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def command(as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """Show versions, devices and what this machine is good at."""
    found = facts()
    if as_json:
        print_json(found)
        return
    for name, shown in _lines(found).items():
        print(f"{name:<12}  {shown}")


def _lines(found: dict[str, Any]) -> dict[str, str]:
    chosen, memory = found["precision"], found["memory_bytes"]
    lines = {name: text or "not installed" for name, text in found["versions"].items()}
    return {
        **lines,
        "python": found["python"],
        "system": found["system"],
        "devices": ", ".join(found["devices"]),
        "cpu": f"{found['cpu']} ({', '.join(found['cpu_features']) or 'no special features'})",
        "threads": f"{found['threads']} of {found['cores']} cores",
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "unknown",
        "precision": f"weights {chosen['base']}, computed in {chosen['compute']}: {chosen['reason']}",
        "cache": found["cache"],
        "compiled": f"{found['compiled']} (compiled blocks, for the runs to come)",
        **found["variables"],
    }
