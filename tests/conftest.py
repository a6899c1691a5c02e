"""What every test stands on: no network, no waiting for a disk, and examples that do not change from run to run."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; threads only fight over the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, if it is here

import pytest
from hypothesis import settings

# No deadline: a test must never depend on how fast the machine is.
settings.register_profile("afina", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("afina")


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test here cuts the power of a machine, so none has to wait until the disk holds what the system already shows.

    That everything is forced to the disk, and in which order, is shown of the calls (`train/test_checkpoint.py`).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file
        yield


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """A verb that makes afina's log talk does so for its process, which the next test is not meant to hear."""
    level = logging.getLogger("afina").level
    yield
    logging.getLogger("afina").setLevel(level)


@pytest.fixture
def multiplies(request: pytest.FixtureRequest) -> Iterator[str]:
    """What multiplies in the kernels in C++: each that this CPU has, one after the other."""
    from afina.ops import native

    with nullcontext() if request.param == "AMX" else native.without_tiles():
        yield request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of the kernels run once for each unit that can multiply in them."""
    if "multiplies" not in metafunc.fixturenames:
        return
    from afina.ops import native

    units = ("AMX", "AVX512-BF16") if native.unit() == "AMX" else ("AVX512-BF16",)
    metafunc.parametrize("multiplies", units, indirect=True)


def pytest_collection() -> None:
    """Collecting makes a million objects that all stay: looking for garbage among them finds none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor does it in the tests, where a full collection need not walk through the modules of torch."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of a GPU where there is none, and says so."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not of_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
