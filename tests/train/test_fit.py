"""Settings that would do nothing, or ask for what is not there: refused before a run begins, by `check` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afina.config import TrainSettings
from afina.errors import ConfigError
from afina.train.fit import refuse_idle_settings
from tests.train.kit import ragged_rows, run


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "train.betas would do nothing: SGD has no"),
        ({"optimizer": "Muon", "betas": (0.8, 0.9)}, "train.betas would do nothing"),
        ({"optimizer": "adafactor", "eps": 1e-6}, "train.eps would do nothing"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "train.weight_decay would do nothing"),
        ({"optimizer": "adamww"}, "no such optimiser"),
    ],
)
def test_an_optimiser_that_is_not_there_or_an_option_that_it_lacks_is_refused(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        refuse_idle_settings(TrainSettings(**given), validates=False)
    assert "adamw" in str(caught.value).lower()


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "sgd", "weight_decay": 0.1},
        {"optimizer": "AdamW", "betas": (0.8, 0.9), "eps": 1e-6},
        {"optimizer": "sgd", "betas": (0.9, 0.999)},  # as a written config.yaml has it
    ],
)
def test_options_that_it_has_or_that_nobody_changed_pass(given: dict[str, Any]) -> None:
    refuse_idle_settings(TrainSettings(**given), validates=False)


def test_a_score_that_is_not_measured_is_refused_with_what_would_measure_it() -> None:
    for best, cure in (("accuracy", "eval.choices"), ("exact_match", "eval.generate")):
        settings = TrainSettings(best=best)
        with pytest.raises(ConfigError, match=f"train.best is {best}") as caught:
            refuse_idle_settings(settings, True, ("loss", "perplexity"))
        assert cure in str(caught.value.cure)
        refuse_idle_settings(settings, True, ("loss", best))
        refuse_idle_settings(settings, True, None)  # not known beforehand


def test_a_run_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.betas"):
        run(tmp_path / "run", data=ragged_rows(4), steps=1, optimizer="sgd", betas=(0.5, 0.9))
    assert not (tmp_path / "run").exists()
