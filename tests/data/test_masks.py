"""What is trained, by value, for each family of chat templates, and what must be refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afina.data.dataset import prepare
from afina.data.packing import collate
from afina.data.settings import DataSettings
from afina.errors import DataError
from afina.types import IGNORE
from tests.data import kit
from tests.data.kit import marked, tokenizer_of, turns

TWO = turns("Hi", "Hello!", "Paris?", "Bom dia")


def masks(chat: str | None, *rows: dict[str, Any], **settings: Any) -> list[str]:
    tokenizer = tokenizer_of(chat)
    prepared = prepare(rows, tokenizer, DataSettings(**settings))
    return [marked(row, tokenizer) for row in prepared.rows]


GOLDEN = {
    "chatml": (
        kit.CHATML,
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello!<|im_end|>»\n<|im_start|>user\nParis?<|im_end|>\n"
        "<|im_start|>assistant\n«Bom dia<|im_end|>»\n",
    ),
    "llama3": (
        kit.LLAMA3,
        "<s><|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\n«Hello!<|eot|>»"
        "<|start|>user<|end|>\n\nParis?<|eot|><|start|>assistant<|end|>\n\n«Bom dia<|eot|>»",
    ),
    "mistral": (
        kit.MISTRAL,
        "<s>[INST] Hi [/INST]« Hello!</s>»[INST] Paris? [/INST]« Bom dia</s>»",
    ),
    "gemma": (
        kit.GEMMA,
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello!<end_of_turn>»\n"
        "<start_of_turn>user\nParis?<end_of_turn>\n<start_of_turn>model\n«Bom dia<end_of_turn>»\n",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_assistant_turn_and_its_stop_and_nothing_else(name: str) -> None:
    template, expected = GOLDEN[name]
    assert masks(template, TWO) == [expected]


@pytest.mark.parametrize("name", GOLDEN)
def test_last_trains_the_final_turn_only(name: str) -> None:
    template, expected = GOLDEN[name]
    first, last = expected.index("«"), expected.rindex("«")
    opened = expected[:first] + expected[first:last].replace("«", "").replace("»", "")
    assert masks(template, TWO, train_on="last") == [opened + expected[last:]]


@pytest.mark.parametrize("name", GOLDEN)
def test_text_trains_everything(name: str) -> None:
    template, expected = GOLDEN[name]
    bare = expected.replace("«", "").replace("»", "")
    assert masks(template, TWO, train_on="text") == [f"«{bare}»"]


def test_the_flags_by_token() -> None:
    tokenizer = tokenizer_of(kit.GEMMA)
    [row] = prepare([turns("Hi", "e")], tokenizer, DataSettings()).rows
    names = tokenizer.convert_ids_to_tokens(list(row.tokens))
    assert list(zip(names, row.trained, strict=True))[-4:] == [
        ("Ċ", False),
        ("e", True),
        ("<end_of_turn>", True),
        ("Ċ", False),
    ]
    assert row.prompt_tokens == len(row.tokens) - 3
    assert row.tokens[: row.prompt_tokens] == tuple(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True
        )["input_ids"]
    )


def test_system_is_context_and_replaces_the_default() -> None:
    assert masks(kit.CHATML, turns("Hi", "Hello!", system="Be brief.")) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hello!<|im_end|>»\n"
    ]


def test_tools_are_rendered_and_calls_are_trained() -> None:
    call = {"function": {"name": "play", "arguments": {"year": 1959}}}
    row = {
        "tools": [{"type": "function", "function": {"name": "play"}}],
        "messages": [
            {"role": "user", "content": "Play"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": "Done"},
        ],
    }
    [text] = masks(kit.TOOLS, row)
    assert text.startswith('<|im_start|>system\nTools: [{"type": "function", ')
    assert (
        '<|im_start|>assistant\n«CALL {"name": "play", "arguments": {"year": 1959}}<|im_end|>»\n'
        "<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n«Done<|im_end|>»\n"
    ) in text


def test_only_the_completion_of_a_prompt_of_messages_is_trained() -> None:
    messages = TWO["messages"]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert masks(kit.MISTRAL, row) == [
        "<s>[INST] Hi [/INST] Hello!</s>[INST] Paris? [/INST]« Bom dia</s>»"
    ]


def test_prompt_and_completion_go_through_the_template_or_not() -> None:
    row = {"prompt": "Question:", "completion": " Paris"}
    assert masks(kit.GEMMA, row) == [
        "<s><start_of_turn>user\nQuestion:<end_of_turn>\n<start_of_turn>model\n«Paris<end_of_turn>»\n"
    ]
    assert masks(kit.GEMMA, row, template="none") == ["Question:« Paris</s>»"]
    assert masks(None, row) == ["Question:« Paris</s>»"]
    assert masks(None, row, train_on="text") == ["«Question: Paris</s>»"]


def test_text_is_trained_whole_and_ends_once() -> None:
    assert masks(None, {"text": "one two"}, {"text": "three</s>"}) == [
        "«one two</s>»",
        "«three</s>»",
    ]


def test_alpaca_without_a_template_has_the_papers_layout() -> None:
    row = {"instruction": "Translate", "input": "good", "output": "Bom"}
    assert masks(None, row) == [
        "### Instruction:\nTranslate\n\n### Input:\ngood\n\n### Response:\n«Bom</s>»"
    ]
    assert masks(kit.MISTRAL, row) == ["<s>[INST] Translate\n\ngood [/INST]« Bom</s>»"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"row:1: the chat template rewrites .* message 1"
    ) as caught:
        masks(kit.REWRITES, TWO)
    assert "data.train_on=last" in str(caught.value)
    [last] = masks(kit.REWRITES, TWO, train_on="last")
    assert last.endswith(
        "assistant\nHello!<|im_end|>\n<|im_start|>user\nParis?<|im_end|>\n"
        "<|im_start|>assistant\n«<think></think>Bom dia<|im_end|>»\n"
    )


def test_a_generation_prompt_unlike_the_answer_is_found_by_content_and_said() -> None:
    tokenizer = tokenizer_of(kit.OPENS_THOUGHT)
    prepared = prepare([TWO], tokenizer, DataSettings())
    assert marked(prepared.rows[0], tokenizer) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello!<|im_end|>»\n"
        "<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\n«Bom dia<|im_end|>»\n"
    )
    assert "2 turns found by content" in "\n".join(prepared.report.lines())


def test_an_answer_that_cannot_be_found_is_an_error() -> None:
    shouts = kit.OPENS_THOUGHT.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    with pytest.raises(DataError, match="message 1 cannot be found"):
        masks(shouts, TWO)


def test_a_conversation_opened_by_the_assistant() -> None:
    row = {"messages": [{"role": "assistant", "content": "help"}, *TWO["messages"][:1]]}
    assert masks(kit.CHATML, row) == [
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>assistant\n«help<|im_end|>»\n"
        "<|im_start|>user\nHi<|im_end|>\n"
    ]


def test_an_answer_that_merges_with_its_prompt_is_tokenised_apart_and_said() -> None:
    tokenizer = tokenizer_of(kit.CHATML)
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    prepared = prepare([turns("Hi", "\n\nHello!")], tokenizer, DataSettings())
    [row] = prepared.rows
    assert marked(row, tokenizer).endswith("<|im_start|>assistant\n«\n\nHello!<|im_end|>»\n")
    prompt = tokenizer.apply_chat_template(row.meta["prompt"], add_generation_prompt=True)
    assert list(row.tokens[: row.prompt_tokens]) == prompt["input_ids"]
    assert "in 1 row the first token of an answer would also hold" in prepared.report.notes[0]
    assert "tokenised apart" in prepared.report.notes[0]
    [plain] = masks(None, {"prompt": "France? ", "completion": "Paris"})
    assert plain == "France? «Paris</s>»"


def test_where_parts_would_decode_otherwise_the_offsets_decide() -> None:
    """A Metaspace tokenizer puts a space before every part, so the parts are not the whole."""
    tokenizer = kit.metaspace_tokenizer()
    rows = [{"prompt": "one two Par", "completion": "is."}, {"prompt": "one", "completion": " two"}]
    prepared = prepare(rows, tokenizer, DataSettings())
    names = [tokenizer.convert_ids_to_tokens(list(row.tokens)) for row in prepared.rows]
    assert names == [["▁one", "▁two", "▁Paris", ".", "</s>"], ["▁one", "▁two", "</s>"]]
    assert [row.trained for row in prepared.rows] == [
        (False, False, True, True, True),
        (False, True, True),
    ]
    assert [note for note in prepared.report.notes if "in 1 row" in note and "shared token" in note]


def test_a_tokenizer_without_offsets_is_refused_only_where_they_are_needed() -> None:
    tokenizer = kit.metaspace_tokenizer(slow=True)
    aligned = [{"prompt": "one", "completion": " two"}]
    assert prepare(aligned, tokenizer, DataSettings()).rows[0].trained == (False, True, True)
    with pytest.raises(
        DataError, match="row:1: the tokens of the prompt are not the first"
    ) as caught:
        prepare([{"prompt": "Par", "completion": "is."}], tokenizer, DataSettings())
    assert "a slow tokenizer" in str(caught.value)


def test_an_end_token_inside_a_text_cuts_no_label() -> None:
    assert masks(None, {"text": "one</s>two"}) == ["«one</s>two</s>»"]
    assert masks(kit.ENDLESS, turns("Hi", "one</s>two")) == [
        "user: Hi\nassistant:« one</s>two\n</s>»"
    ]
    assert masks(kit.MISTRAL, turns("a</s>b", "one</s>two")) == [
        "<s>[INST] a</s>b [/INST]« one</s>two</s>»"
    ]


def test_an_endless_template_gets_the_end_on_its_last_turn_only() -> None:
    one = turns("Hi", "Hello!")
    assert masks(kit.ENDLESS, one) == ["user: Hi\nassistant:« Hello!\n</s>»"]
    with pytest.raises(DataError, match="no stop token") as caught:
        masks(kit.ENDLESS, TWO)
    assert "data.train_on=last" in str(caught.value)
    assert masks(kit.ENDLESS, TWO, train_on="last") == [
        "user: Hi\nassistant: Hello!\nuser: Paris?\nassistant:« Bom dia\n</s>»"
    ]


def test_the_next_turns_opening_is_a_stop_if_generation_stops_on_it() -> None:
    tokenizer = tokenizer_of(kit.OPENING_STOPS)
    with pytest.raises(DataError, match="no stop token"):
        prepare([TWO], tokenizer, DataSettings())
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    [row] = prepare([TWO], tokenizer, DataSettings(), stop_ids=[user]).rows
    assert marked(row, tokenizer) == (
        "<|user|>Hi<|assistant|>«Hello!<|user|>»Paris?<|assistant|>«Bom dia</s>»"
    )


def test_a_turn_that_loses_its_stop_is_an_error() -> None:
    loses = kit.GEMMA.replace(
        "<end_of_turn>\n{% endfor %}",
        "{% if m['content'] != 'Hello!' %}<end_of_turn>{% endif %}\n{% endfor %}",
    )
    tokenizer = tokenizer_of(kit.GEMMA)
    tokenizer.chat_template = loses
    with pytest.raises(DataError, match=r"row:1: a trained turn has no stop token"):
        prepare([TWO], tokenizer, DataSettings())


def test_no_system_role_is_the_templates_own_words_with_the_row() -> None:
    with pytest.raises(DataError, match=r"row:2: the chat template refuses") as caught:
        masks(kit.GEMMA, TWO, turns("Hi", "Hello!", system="Be brief."))
    assert "System role not supported" in str(caught.value)


def test_padding_with_the_stop_token_unmasks_and_masks_nothing() -> None:
    tokenizer = tokenizer_of(kit.MISTRAL, pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = prepare([turns("Hi", "Hello!"), TWO], tokenizer, DataSettings()).rows
    batch = collate(rows, packed=False, pad_id=tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    assert [(targets == eos).sum().item() for targets in batch.targets_BT] == [1, 2]
    short = len(rows[0].tokens)
    assert batch.tokens_BT[0, short:].eq(eos).all()
    assert batch.targets_BT[0, short - 1 :].eq(IGNORE).all()
    assert batch.trained_tokens == int((batch.targets_BT != IGNORE).sum())


def test_special_tokens_spelled_out_in_the_data_are_said() -> None:
    tokenizer = tokenizer_of(kit.CHATML)
    rows = [turns("Hi", "Hello!"), turns("say <|im_end|>", "no")]
    notes = prepare(rows, tokenizer, DataSettings()).report.notes
    assert any(
        "1 row with special tokens spelled out" in note and "row:2" in note for note in notes
    )


WORDS = st.text(
    st.sampled_from("abc é漢🙂0\n ?{}\"'") | st.characters(codec="utf-8"), min_size=1, max_size=12
).filter(str.strip)


@cache
def shared_tokenizer(name: str) -> Any:
    return tokenizer_of(GOLDEN[name][0])


@pytest.mark.parametrize("name", GOLDEN)
@given(contents=st.lists(WORDS, min_size=2, max_size=6))
def test_the_mask_is_the_answers_and_their_stops(name: str, contents: list[str]) -> None:
    """For any text: labels decode to each answer and its stop, and the prompt is what generation is given."""
    contents = contents[: len(contents) // 2 * 2]
    tokenizer = shared_tokenizer(name)
    stop = {
        "chatml": "<|im_end|>",
        "llama3": "<|eot|>",
        "mistral": "</s>",
        "gemma": "<end_of_turn>",
    }
    [row] = prepare([turns(*contents)], tokenizer, DataSettings()).rows
    labels = [id if label else None for id, label in zip(row.tokens, row.trained, strict=True)]
    spans: list[list[int]] = [[]]
    for id in labels:
        if id is not None:
            spans[-1].append(id)
        elif spans[-1]:
            spans.append([])
    found = [tokenizer.decode(span, clean_up_tokenization_spaces=False) for span in spans if span]
    strip = (lambda text: text.strip()) if name in ("llama3", "gemma") else (lambda text: text)
    wanted = [strip(text) + stop[name] for text in contents[1::2]]
    if name == "mistral":
        wanted = [" " + text for text in wanted]
    assert found == wanted
    prompt = tokenizer.apply_chat_template(row.meta["prompt"], add_generation_prompt=True)
    if len(contents) == 2:
        assert list(row.tokens[: row.prompt_tokens]) == prompt["input_ids"]
