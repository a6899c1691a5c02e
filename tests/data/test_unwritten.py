"""What a row says and the chat template drops is refused by name; what it writes, in any way, is taken."""

from __future__ import annotations

from typing import Any

import pytest

from afina.data import unwritten
from afina.data.dataset import Prepared, prepare
from afina.data.settings import DataSettings
from afina.errors import DataError
from tests.data import kit
from tests.data.kit import marked, tokenizer_of, turns

CALL = {"function": {"name": "play", "arguments": {"year": 1959}}}
TOOLS = [{"type": "function", "function": {"name": "play"}}]

# As Qwen3's: thoughts are written from the last question on, and earlier ones dropped.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Two roles are written and all others passed over.
TWO_ROLES = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | upper }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A call is looked for and not written: without it the template fails.
NEEDS_CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and 'Call' in m['content'] and not m.tool_calls %}"
    "{{ raise_exception('a call is missing') }}{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def row(columns: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A question and its answer, with more columns of the row and more fields of the answer."""
    asked, answer = turns("Hi", "Hello!")["messages"]
    return {"messages": [asked, {**answer, **fields}], **(columns or {})}


def ready(chat: str | None, *rows: dict[str, Any], **settings: Any) -> Prepared:
    return prepare(rows, tokenizer_of(chat), DataSettings(**settings))


LOST: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "tools": (kit.CHATML, row({"tools": TOOLS}), "does not write tools: .*leave that column out"),
    "tool calls": (
        kit.CHATML, row(tool_calls=[CALL]), "does not write tool_calls: .*got:    tool_calls .*'play'.*content"),
    "a call alone": (
        kit.CHATML, row(tool_calls=[CALL], content=None), "does not write tool_calls: "),
    "an old call": (kit.TOOLS, row(function_call={"name": "play"}), "does not write function_call: "),
    "thoughts": (
        kit.CHATML, row(reasoning_content="So."), "write reasoning_content: .*leave reasoning_content out"),
    "two thoughts, one known": (
        THINKS, row(reasoning="Or so.", reasoning_content="So."), "does not write reasoning: .*'Or so.'"),
    "thoughts under two names, neither known": (kit.CHATML, row(reasoning="So.", thinking="So."), "write reasoning: "),
    "a role": (
        TWO_ROLES,
        {"messages": [{"role": "system", "content": "Be brief."}, *turns("Hi", "Hello!")["messages"]]},
        "does not write a message of the role system: .*'Be brief.'"),
    "a weight": (kit.CHATML, row(weight=0), "the weight of a message would do nothing.*weight 0 of message 1"),
    "half a weight": (kit.CHATML, row(weight=0.5), "the weight of a message would do nothing.*weight 0.5"),
    "a flag": (kit.CHATML, row(training=False), "the training of a message would do nothing"),
    "tools without a template": (
        None, {"prompt": "a", "completion": "b", "tools": TOOLS}, "tools would do nothing: no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_refused_by_name_or_skipped(name: str) -> None:
    chat, lossy, said = LOST[name]
    sound = turns("Paris?", "Bom dia") if chat else {"prompt": "c", "completion": "d"}
    with pytest.raises(DataError, match=rf"(?s)^row:2: .*{said}.*--on-bad-row skip"):
        ready(chat, sound, lossy)
    found = ready(chat, sound, lossy, on_bad_row="skip")
    assert ([one.source for one in found.rows], len(found.report.bad)) == (["row:1"], 1)
    assert found.report.bad[0].startswith("row:2: ")


TAKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools and calls": (kit.TOOLS, row({"tools": TOOLS}, tool_calls=[CALL]), "«Hello!CALL {"),
    "empty fields": (kit.CHATML, row({"tools": []}, tool_calls=[], reasoning_content=""), "«Hello!<"),
    "thoughts": (THINKS, row(reasoning_content="So."), "<think>So.</think>"),
    "thoughts under two names, one known": (
        THINKS, row(reasoning="So.", reasoning_content="So."), "<think>So.</think>"),
    "thoughts under another name": (THINKS, row(thinking="So."), "<think>So.</think>"),
    "content written otherwise": (TWO_ROLES, row(), "HELLO!<"),
    "who and which": (kit.CHATML, row(name="Bot", id=7, tool_call_id="x"), "«Hello!<"),
    "a weight of one": (kit.CHATML, row(weight=1, training=True), "«Hello!<"),
    "a call the template needs": (NEEDS_CALLS, row(tool_calls=[CALL], content="Call"), "Call<"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_written_in_any_way_is_taken(name: str) -> None:
    chat, sound, said = TAKEN[name]
    [made] = ready(chat, sound).rows
    assert said in marked(made, tokenizer_of(chat))


def test_thoughts_of_earlier_turns_may_be_dropped_by_a_template_that_writes_the_last() -> None:
    first, last = row(reasoning_content="One."), row(reasoning_content="Two.")
    both = {"messages": [*first["messages"], *last["messages"]]}
    [made] = ready(THINKS, both, train_on="last").rows
    assert "Two." in marked(made, tokenizer_of(THINKS))
    assert "One." not in marked(made, tokenizer_of(THINKS))


def test_a_weight_counts_for_messages_that_train_alone() -> None:
    """The cure that the error names."""
    first, last = row(weight=0), row(weight=1)
    both = {"messages": [*first["messages"], *last["messages"]]}
    with pytest.raises(DataError, match=r"weight 0 of message 1"):
        ready(kit.CHATML, both)
    [made] = ready(kit.CHATML, both, train_on="last").rows
    assert marked(made, tokenizer_of(kit.CHATML)).count("«") == 1
    asked, answer = turns("Hi", "Hello!")["messages"]
    question = {"messages": [{**asked, "weight": 0}, answer]}
    assert ready(kit.CHATML, question).report.kept == 1
    with pytest.raises(DataError, match=r"weight 0 of message 0"):
        ready(kit.CHATML, question, train_on="text")


def test_rows_without_such_fields_are_rendered_no_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    render = unwritten.render

    def counting(*given: Any, **named: Any) -> str:
        asked.append(named["source"])
        return render(*given, **named)

    monkeypatch.setattr(unwritten, "render", counting)
    ready(kit.TOOLS, turns("Hi", "Hello!"), row(name="Bot"), row({"tools": TOOLS}))
    assert asked == ["row:3"]
