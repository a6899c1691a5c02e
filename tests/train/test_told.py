"""What a run says of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from afina.train.told import of_rows
from tests.tiny import tiny_llama

HEADLESS = "all logits of a micro-batch are made: the head is not a plain linear"


@pytest.mark.parametrize(
    ("head", "whole", "said"), [(None, True, [HEADLESS]), (None, False, []), ("found", True, [])]
)
def test_a_stage_without_the_head_says_nothing_of_it(
    head: Any, whole: bool, said: list[str]
) -> None:
    plan: Any = SimpleNamespace(notes=lambda: [])
    passes: Any = SimpleNamespace(shared=False, packed=False, head=head, model=tiny_llama())
    assert list(of_rows(plan, passes, None, whole=whole)) == said
