"""What every test stands on: no network, and examples that do not change from run to run."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

from hypothesis import settings

# No deadline: a test must never depend on how fast the machine is.
settings.register_profile("afina", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("afina")
