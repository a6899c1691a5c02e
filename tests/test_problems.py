"""Settings made in Python are judged as those of a file are: the nearest name, what was wanted, all at once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from afina.config import EvalSettings, GenerateSettings, TrainSettings
from afina.data.settings import DataSettings
from afina.errors import ConfigError
from afina.problems import Frozen
from afina.table import TECHNIQUES

KINDS: list[type[Frozen]] = [
    *TECHNIQUES.values(),
    DataSettings,
    TrainSettings,
    EvalSettings,
    GenerateSettings,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_nobody_knows_is_answered_with_the_nearest(kind: Any) -> None:
    for name in kind.model_fields:
        misspelt = name[:-1] + name[-1] * 2
        with pytest.raises(ConfigError) as caught:
            kind(**{misspelt: 1})
        said = str(caught.value)
        assert f"unknown setting '{kind.__name__}.{misspelt}'" in said
        assert f"{kind.__name__}.{name}" in said.partition("cure:")[2]


@pytest.mark.parametrize("kind", KINDS)
def test_settings_have_names(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} takes its settings by name"):
        kind(1)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_made_and_frozen(kind: Any) -> None:
    made = kind()
    assert made == kind(**made.model_dump(exclude_unset=True))
    name = next(iter(kind.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, name, getattr(made, name))


@pytest.mark.parametrize("kind", KINDS)
def test_truth_is_no_number(kind: Any) -> None:
    refused = 0
    for name, field in kind.model_fields.items():
        if field.annotation in (int, float):
            with pytest.raises(ConfigError):
                kind(**{name: True})
            refused += 1
    assert refused or not {"rank", "seed", "lr"} & set(kind.model_fields)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (TrainSettings, {"lr": 0}, "TrainSettings.lr cannot have this value\n  got:    0\n  wanted: greater than 0"),
        (TrainSettings, {"schedule": "cosin"}, "did you mean cosine?"),
        (TrainSettings, {"steps": 1, "epochs": 2}, "steps and epochs say the same thing twice"),
        (TrainSettings, {"steps": "many"}, 'got:    "many"\n  wanted: an integer'),
        (GenerateSettings, {"top_p": 0}, "GenerateSettings.top_p"),
        (DataSettings, {"on_bad_row": "skipp"}, "did you mean skip?"),
        (DataSettings, {"format": "chatml"}, "DataSettings.format cannot have this value"),
        (DataSettings, {"max_rows": 0, "val_fraction": 1}, "2 settings cannot be used"),
        (EvalSettings, {"answers": {"seed": -1}}, "EvalSettings.answers"),
        (EvalSettings, {"choices": ("",)}, "EvalSettings.choices"),
    ],
)  # fmt: skip
def test_a_value_is_answered_with_what_was_wanted(kind: Any, values: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("token", "wanted"),
    [
        (-1, "greater than or equal to 0"),
        ("", "a text that is not empty"),
        (1.5, "an integer or a text"),
    ],
)
def test_of_a_number_or_a_text_only_what_the_value_can_be_is_wanted(
    token: Any, wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TECHNIQUES["trainable_tokens"](tokens=(token, {}))
    assert caught.value.wanted == wanted
    assert caught.value.cure == ("put it in quotes" if token == 1.5 else None)


def test_a_file_still_sees_the_place_of_each_value() -> None:
    with pytest.raises(ValidationError):
        TrainSettings.model_validate({"lr": 0})
