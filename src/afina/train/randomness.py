"""The states of the global random generators: torch's (every device), Python's and numpy's.

Nothing of afina draws from them across steps: data order is a hash of seed and epoch, and torch is seeded anew for
each micro-batch, so that dropout is a function of the step. They are kept for the functions in the loop's seams and for
scorers, which may draw from any of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def states() -> dict[str, Tensor]:
    """The states now, as tensors by name."""
    version, words, gauss = random.getstate()
    drawn: Any = np.random.get_state(legacy=False)
    mt, own = drawn["state"], drawn["has_gauss"]
    found = {
        "torch.cpu": torch.get_rng_state(),
        "python.words": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.words": torch.tensor([*mt["key"].tolist(), mt["pos"], own], dtype=torch.int64),
        "numpy.gauss": torch.tensor([drawn["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            found[f"torch.cuda.{number}"] = state
    return found


def restore(saved: Mapping[str, Tensor]) -> None:
    """Sets the generators to states that `states` gave; a GPU that this machine lacks is left out."""
    torch.set_rng_state(saved["torch.cpu"])
    version, *words = saved["python.words"].tolist()
    gauss = saved["python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *key, pos, own = saved["numpy.words"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": pos},
            "has_gauss": own,
            "gauss": saved["numpy.gauss"].item(),
        }
    )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(here):
        if f"torch.cuda.{number}" in saved:
            torch.cuda.set_rng_state(saved[f"torch.cuda.{number}"], number)
