"""What an evaluation measures is known beforehand: the names are those that `evaluate` then gives."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from afina.config import EvalSettings, GenerateSettings
from afina.config.settings import Metric
from afina.errors import ConfigError, DataError
from afina.evaluate.evaluate import evaluate
from afina.evaluate.measured import measured
from afina.types import Row
from tests.tiny import byte_tokenizer, row, says

TOKENIZER = byte_tokenizer()
ASKED = [row(TOKENIZER, "say", "ab"), row(TOKENIZER, "say it", "cd", number=1)]
CHOSEN = [row(TOKENIZER, "say", "ab", choices=["ab", "cd"]), *ASKED]
TEXT = [Row(tuple(range(8)), (False, *(True,) * 7), 0)]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (ASKED, {}),
        (ASKED, {"generate": False}),
        (ASKED, {"choices": ("ab", "cd")}),
        (CHOSEN, {"generate": False}),
        (CHOSEN, {"max_rows": 1}),
        (CHOSEN[::-1], {"max_rows": 1}),
        (TEXT, {"choices": ("ab", "cd")}),
    ],
)
def test_the_names_are_those_that_are_measured(rows: list[Row], settings: dict[str, Any]) -> None:
    chosen = EvalSettings(answers=GenerateSettings(max_new_tokens=1), **settings)
    told = measured(rows, chosen, TOKENIZER)
    found = evaluate(says(TOKENIZER, "ab"), TOKENIZER, rows, chosen).values
    assert set(told) == set(found) & set(get_args(Metric))


def test_what_an_evaluation_would_refuse_is_refused_beforehand() -> None:
    with pytest.raises(DataError, match="not among the choices"):
        measured(ASKED, EvalSettings(choices=("ab", "xy")), TOKENIZER)
    with pytest.raises(ConfigError, match=r"eval\.answers\.system"):
        measured(ASKED, EvalSettings(answers=GenerateSettings(system="Be brief.")), TOKENIZER)
