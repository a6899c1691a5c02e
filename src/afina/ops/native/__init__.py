"""Kernels in C++ for CPUs that multiply bf16 themselves (AMX or AVX512-BF16), built at first use and kept.

Each has a twin in plain torch, which computes wherever there is no such CPU or no compiler; `missing` says why. What
the kernels are given are addresses and sizes, so nothing of torch is compiled, and a build takes seconds. They share
torch's threads. Python's lock is free while one runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall")
NEEDED = ("avx512_bf16", "avx512bw", "avx512vl", "avx512f", "avx512dq")
"""What the CPU must know, as Linux names it; where it has a matrix unit too (AMX), that multiplies."""


def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be had, or inside `off`."""
    return _found()[0] if _wanted else None


def missing() -> str | None:
    """Why there are no kernels; None where there are."""
    return _found()[1] if _wanted else "switched off"


def serves(x: Tensor) -> bool:
    """Whether there are kernels for numbers like these."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and library() is not None


def unit() -> str:
    """What multiplies in the kernels, where there are any: AMX where the CPU has it and the system lends it."""
    return "AMX" if library() is not None and _tiles else "AVX512-BF16"


@contextmanager
def without_tiles() -> Generator[None, None, None]:
    """Inside the block the kernels multiply without the matrix unit, as on a CPU that has none."""
    global _tiles
    before, built = _tiles, library()
    if built is not None:
        _tiles = bool(built.afina_use_tiles(0))
    try:
        yield
    finally:
        if built is not None:
            _tiles = bool(built.afina_use_tiles(int(before)))


@contextmanager
def off(*, wanted: bool = True) -> Generator[None, None, None]:
    """Inside the block there are no kernels: everything goes through their twins in torch.

    Args:
        wanted: False changes nothing.
    """
    global _wanted
    before, _wanted = _wanted, _wanted and not wanted
    try:
        yield
    finally:
        _wanted = before


_wanted = True
_tiles = False


def address(x: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's first number lies; null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


@cache
def _found() -> tuple[ctypes.CDLL | None, str | None]:
    global _tiles
    lacking = [name for name in NEEDED if name not in _flags()]
    if lacking:
        return None, f"this CPU does not multiply bf16 itself (no {lacking[0]})"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None, "no C++ compiler was found (g++, clang++ or $CXX)"
    try:
        built = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the C++ kernels could not be built: {_last_line(error)}"
    _tiles = bool(built.afina_use_tiles(1))
    return built, None


def _flags() -> frozenset[str]:
    """What the CPU knows; nothing where that cannot be asked."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, ()))


def _built(compiler: str) -> Path:
    """The library of these sources for this CPU by this compiler: found in the cache, or built into it."""
    from afina.places import cache_root

    sources = sorted(HERE.glob("*.cpp"))
    texts = [path.read_bytes() for path in (*sources, *sorted(HERE.glob("*.h")))]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = [*texts, version, " ".join((*FLAGS, *sorted(_flags()))).encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = cache_root() / "native" / f"afina-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once: each in a folder of its own, and whoever is last puts the same in place.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [
            subprocess.Popen(
                [compiler, *FLAGS, "-c", str(path), "-o", str(Path(folder) / f"{path.stem}.o")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for path in sources
        ]
        said = [job.communicate()[0] for job in jobs]
        for job, words in zip(jobs, said, strict=True):
            if job.returncode:
                raise subprocess.SubprocessError(words)
        made = Path(folder) / "afina.so"
        objects = sorted(str(path) for path in Path(folder).glob("*.o"))
        link = [compiler, "-shared", "-fopenmp", *objects, "-o", str(made)]
        subprocess.run(link, capture_output=True, text=True, check=True)
        os.replace(made, target)
    return target


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "error" in line] or [str(error)]
    return lines[0].strip()
