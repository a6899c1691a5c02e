"""Runs here draw no plot: it takes as long as all the rest of a tiny run. Tests of the plot ask for the real one."""

from __future__ import annotations

import pytest

from afina.train import keeper


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "plot_loss", lambda folder: None)
