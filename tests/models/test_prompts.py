"""What a prompt says reaches the model, or is refused."""

from __future__ import annotations

import pytest

from afina.errors import DataError
from afina.models.prompts import encode
from tests.data import kit

ASKED = [{"role": "user", "content": "what is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    with pytest.raises(DataError, match="does not write tools") as caught:
        encode(kit.tokenizer_of(kit.CHATML), ASKED, tools=TOOLS)
    assert "weather" in str(caught.value.got)


def test_tools_that_it_writes_are_in_the_prompt() -> None:
    tokenizer = kit.tokenizer_of(kit.TOOLS)
    with_tools = tokenizer.decode(encode(tokenizer, ASKED, tools=TOOLS))
    assert "weather" in with_tools.partition("what is")[0]
    assert encode(tokenizer, ASKED, tools=None) == encode(tokenizer, ASKED, tools=[])
