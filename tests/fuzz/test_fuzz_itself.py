"""Controls: the examples reach results and errors alike, and an error that is not ours is seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st

from afina.config.document import read_text
from afina.data.dataset import prepare
from afina.data.settings import DataSettings
from afina.errors import DataError
from tests.data import kit as data
from tests.fuzz.kit import mutated, result_or_error, texts
from tests.fuzz.test_fuzz_config import SEEDS as DOCUMENTS
from tests.fuzz.test_fuzz_data import ROW, SEEDS

SEARCH = settings(
    max_examples=500, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def test_an_error_that_is_not_ours_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        result_or_error(lambda: 1 // 0)
    with pytest.raises(AssertionError):
        result_or_error(lambda: (_ for _ in ()).throw(DataError("x" * 20_000)))
    assert result_or_error(lambda: 1) == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_files_and_rows_and_documents_reach_both_ends(wanted: bool, tmp_path: Any) -> None:
    tokenizer = data.tokenizer_of(data.CHATML)

    def of_file(content: bytes) -> bool:
        (tmp_path / "a.jsonl").write_bytes(content)
        made = result_or_error(lambda: prepare(tmp_path / "a.jsonl", tokenizer, DataSettings()))
        return (made is not None) == wanted

    def of_rows(rows: Any) -> bool:
        return (
            result_or_error(lambda: prepare(rows, tokenizer, DataSettings())) is not None
        ) == wanted

    def of_text(text: str) -> bool:
        return (result_or_error(lambda: read_text(text, "x")) is not None) == wanted

    assert isinstance(find(mutated(SEEDS), of_file, settings=SEARCH), bytes)
    assert find(st.lists(ROW, min_size=1, max_size=3), of_rows, settings=SEARCH) is not None
    written = mutated(DOCUMENTS).map(lambda content: content.decode("utf-8", "replace"))
    assert find(written | texts(), of_text, settings=SEARCH) is not None
