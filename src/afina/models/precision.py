"""In which number format the frozen base lives and computes on a device, and why.

Adapter weights are fp32 everywhere. A bf16 base halves memory and is faster where the hardware multiplies bf16 itself;
a CPU that only emulates it is several times slower than in fp32.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError, ModelError, nearest

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}

CLOSE = 0.8
"""How alike two names must be for a slip of the keyboard: bfloat and bfloat16 are, fp8 and fp16 are not."""

CPU_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
"""Flags of /proc/cpuinfo that mean bf16 products in hardware, and what the extension is called."""


@dataclass(frozen=True)
class Precision:
    """The choice for one device.

    Attributes:
        base: dtype of the frozen weights.
        compute: dtype of the activations.
        reason: why, for the log.
    """

    base: torch.dtype
    compute: torch.dtype
    reason: str

    def __str__(self) -> str:
        """One line for the log."""
        names = [str(each).removeprefix("torch.") for each in (self.base, self.compute)]
        return f"base {names[0]}, computed in {names[1]}: {self.reason}"


def choose(
    device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Precision:
    """The precision for `device`; `dtype` (a torch dtype, or "bf16", "fp32", …) overrides.

    Args:
        device: as torch names it; None is `default_device()`.
        dtype: None or "auto" lets the device decide.

    Raises:
        ConfigError: unknown dtype.
        ModelError: unknown device, or one that is not in this machine.
    """
    if dtype is not None and dtype != "auto":
        chosen = parse_dtype(dtype)
        return Precision(chosen, chosen, "set by the user")
    place = parse_device(device)
    if place.type == "cpu":
        fast = fast_bf16()
        if fast is None:
            reason = "this CPU has no fast bf16 (neither AMX nor AVX512-BF16)"
            return Precision(torch.float32, torch.float32, reason)
        return Precision(torch.bfloat16, torch.bfloat16, f"this CPU multiplies bf16 with {fast}")
    if place.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision(torch.float32, torch.float32, "this GPU has no bf16")
    return Precision(torch.bfloat16, torch.bfloat16, f"a {place.type} device multiplies bf16")


def parse_dtype(
    dtype: str | torch.dtype,
    *,
    wanted: str = "auto, fp32, bf16, fp16 or fp64",
    default: str = "to let the device decide",
) -> torch.dtype:
    """A torch dtype from itself or from its name.

    Args:
        dtype: see above.
        wanted: the names to choose from, for the error.
        default: what it is left out for.

    Raises:
        ConfigError: not a float format that a model can live in.
    """
    name = str(dtype).removeprefix("torch.").lower()
    if name not in DTYPES:
        near = nearest(name, list(DTYPES), most=1, alike=CLOSE)
        raise ConfigError(
            "unknown dtype",
            got=dtype,
            wanted=wanted,
            cure=f"did you mean {near[0]}? Or leave it out {default}"
            if near
            else f"leave it out {default}",
        )
    return DTYPES[name]


def parse_device(device: str | torch.device | None) -> torch.device:
    """A device of this machine.

    Raises:
        ModelError: torch does not know it, or it is not there.
    """
    if device is None:
        return default_device()
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError("unknown device", got=device, wanted="cpu, cuda, cuda:1, …") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            "no such device here",
            got=device,
            wanted=_devices(torch.cuda.device_count()),
            cure="leave the device out, or install a torch build for your GPU",
        )
    return place


def _devices(of_cuda: int) -> str:
    """What there is to choose from, in words."""
    if not of_cuda:
        return "cpu, for there is no CUDA device"
    return "cpu or cuda:0" + (f" to cuda:{of_cuda - 1}" if of_cuda > 1 else "")


def default_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_bf16(cpuinfo: str | None = None) -> str | None:
    """The CPU extension that multiplies bf16 in hardware, or None.

    Args:
        cpuinfo: text in the form of Linux's /proc/cpuinfo; None reads this machine's.
    """
    if cpuinfo is None:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return None
        file = Path("/proc/cpuinfo")
        if (
            not file.exists()
        ):  # torch asks the processor itself, but its spelling changes by release
            flags = getattr(torch.cpu, "get_capabilities", dict)()
            return next((CPU_FLAGS[flag] for flag in CPU_FLAGS if flags.get(flag)), None)
        cpuinfo = file.read_text("utf-8", errors="replace")
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(tail.split()) for head, _, tail in lines if head.strip() == "flags"), set())
    return next((CPU_FLAGS[flag] for flag in CPU_FLAGS if flag in flags), None)
