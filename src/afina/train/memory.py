"""Memory of this process or of its GPU, in bytes, and what to do when there is too little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from afina.errors import RunError, counted
from afina.train import ways
from afina.types import Row

STATUS = Path("/proc/self/status")
NO_MEMORY_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
"""How torch's allocator for the CPU, which has no error of its own kind, says it."""


class OutOfMemoryError(RunError):
    """Raised by the loop for a micro-batch that does not fit; the weights are those of the step before.

    Args:
        step: counted from 1.
        rows: of the micro-batch.
        way: how a run that was saved goes on.
        torn: but some weights had moved already.
    """

    def __init__(
        self, step: int, rows: Sequence[Row], way: str = "", *, torn: bool = False
    ) -> None:
        self.step, self.rows, self.torn = step, tuple(rows), torn
        longest = max(rows, key=lambda row: len(row.tokens))
        tokens = sum(len(row.tokens) for row in rows)
        if len(rows) > 1:
            smaller = ways.setting("micro_tokens", max(1, tokens // 2))
            cure = f"smaller micro-batches, which learn the same: {smaller}"
        else:
            cure = (
                "shorter rows: --set data.max_tokens=N --set data.over_long=truncate (in Python "
                f"DataSettings(max_tokens=N, over_long='truncate')); or {ways.loaded_as('bf16')}; or a "
                "smaller model"
            )
        where = f" ({longest.source})" if longest.source else ""
        super().__init__(
            f"step {step}: too little memory for one forward and backward pass",
            got=f"{counted(len(rows), 'row')} with {tokens:,} tokens, the longest{where} with "
            f"{len(longest.tokens):,}",
            cure=cure + way,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not get memory, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY_ON_CPU in str(error)


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
