"""Peak memory of this process or of its GPU, in bytes."""

from __future__ import annotations

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int | None:
    """The highest use since the start; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def used_bytes(device: torch.device) -> int | None:
    """The use now; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def free_bytes(device: torch.device) -> int | None:
    """What may still be used; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else None


def _status(key: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(f"{key}:")]
    return int(found[0].split()[1]) * 1024 if found else None
