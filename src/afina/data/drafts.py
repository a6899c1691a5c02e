"""Each family of formats made into tokens and labels: chats, plain prompt and completion, texts, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from afina.data.badrows import BadRows
from afina.data.draft import Draft
from afina.data.example import Example
from afina.data.masks import Masked, encode, mask_all, mask_plain
from afina.data.settings import DataSettings
from afina.data.tags import in_order, tagged
from afina.data.templates import Rendered, has_template, render_turns, stop_of
from afina.data.unwritten import (
    refuse_shares,
    refuse_tools_without_template,
    refuse_unwritten,
)
from afina.errors import DataError, counted

T = TypeVar("T")


def draft(
    format: str,
    tokenizer: Any,
    examples: Sequence[Example],
    settings: DataSettings,
    bad: BadRows,
    labels: Sequence[str] | None = None,
    stop_ids: Sequence[int] = (),
) -> Draft:
    """Tokens and labels of all examples of one format, as `prepare` describes them; `bad` gathers what has none."""
    if format == "text_label":
        return _classes(tokenizer, examples, labels, bad)
    if format == "tokens_tags":
        return tagged(tokenizer, examples, labels, bad)
    if format == "text":
        return _texts(tokenizer, examples, bad)
    if uses_chat(tokenizer, settings, examples[0]):
        return _chats(tokenizer, examples, settings, stop_ids, bad)
    return _plain(tokenizer, examples, settings, bad)


def uses_chat(tokenizer: Any, settings: DataSettings, example: Example) -> bool:
    """Whether such rows are rendered by the chat template.

    Raises:
        DataError: they need one and there is none, or it is forbidden.
    """
    if settings.template != "none" and has_template(tokenizer):
        return True
    if settings.template == "chat" or example.plain is None:
        raise DataError(
            f"{example.source}: a conversation needs a chat template",
            got="data.template=none" if has_template(tokenizer) else "a tokenizer without one",
            wanted="a tokenizer with a chat template, or rows of prompt and completion, or text",
            cure="data.template=auto"
            if has_template(tokenizer)
            else "use the instruct variant of the model, or set tokenizer.chat_template",
        )
    return False


def _chats(
    tokenizer: Any,
    examples: Sequence[Example],
    settings: DataSettings,
    stop_ids: Sequence[int],
    bad: BadRows,
) -> Draft:
    stop = stop_of(tokenizer, stop_ids)
    drawn = bad.good(
        examples, lambda one: _rendered(tokenizer, one, settings), lambda one: one.source
    )
    sources = [example.source for example, _ in drawn]
    found = mask_all(tokenizer, [one for _, one in drawn], stop, sources)
    kept, masked = _sound(drawn, found, bad)
    examples, rendered = [example for example, _ in kept], [one for _, one in kept]
    if settings.train_on == "text":
        masked = [replace(one, trained=(True,) * len(one.tokens)) for one in masked]
    notes = _found_by_content(rendered) + _located(masked) + _control(tokenizer, examples)
    notes += _empty(examples)
    if "strftime_now" in str(tokenizer.chat_template):
        notes += ("the chat template writes today's date: these rows differ from day to day",)
    turns = [tuple(turn.message for turn in one.turns) for one in rendered]
    shown = str(tokenizer.convert_ids_to_tokens(stop.ids[0])) if stop.ids else "nothing"
    if not stop.own:
        notes += (f"the chat template ends no turn: {shown} is added to the last one",)
    return Draft(examples, masked, turns, "chat", shown, notes=notes)


def _sound(
    pairs: Sequence[tuple[Example, T]], masked: Sequence[Masked | DataError], bad: BadRows
) -> tuple[list[tuple[Example, T]], list[Masked]]:
    """The pairs whose row could be masked, and their rows."""
    kept: list[tuple[Example, T]] = []
    rows: list[Masked] = []
    for pair, one in zip(pairs, masked, strict=True):
        if isinstance(one, DataError):
            bad.add(pair[0].source, one)
        else:
            kept.append(pair)
            rows.append(one)
    return kept, rows


def _trained_turns(example: Example, settings: DataSettings) -> tuple[int, ...]:
    turns = tuple(
        number
        for number, message in enumerate(example.messages)
        if message["role"] == "assistant" and number >= example.first_trained
    )
    return turns if settings.train_on == "all" else turns[-1:]


def _rendered(tokenizer: Any, example: Example, settings: DataSettings) -> Rendered:
    """The row's text and turns, all that the row says being in them."""
    which, every = _trained_turns(example, settings), settings.train_on == "text"
    refuse_shares(example, which, every_token=every)
    try:
        rendered = render_turns(tokenizer, example, which)
    except DataError:
        if not every:
            raise
        rendered = render_turns(
            tokenizer, example, ()
        )  # every token is a label: no place is needed
    refuse_unwritten(tokenizer, example, rendered.text)
    return rendered


def _found_by_content(rendered: Sequence[Rendered]) -> tuple[str, ...]:
    count = sum(not turn.exact for one in rendered for turn in one.turns)
    if not count:
        return ()
    why = "the template's generation prompt is not how it writes an answer"
    return (f"{counted(count, 'turn')} found by content: {why}",)


def _located(masked: Sequence[Masked]) -> tuple[str, ...]:
    """What to say of answers that merge with the end of their prompts."""
    said = {
        "apart": "they are tokenised apart, as generation does",
        "offset": "the shared token counts as answer",
    }
    counts = {how: sum(one.located == how for one in masked) for how in said}
    return tuple(
        f"in {counted(count, 'row')} the first token of an answer would also hold the end of its prompt: {said[how]}; "
        "put the space or line end between them at the start of the answer"
        for how, count in counts.items()
        if count
    )


def _control(tokenizer: Any, examples: Sequence[Example]) -> tuple[str, ...]:
    """Special tokens spelled out in the data become control tokens: said, since it may be an attack or an accident."""
    names = [str(token) for token in tokenizer.all_special_tokens if len(str(token)) > 2]
    guilty = [
        example.source
        for example in examples
        if any(name in message["content"] for message in example.messages for name in names)
    ]
    if not guilty:
        return ()
    return (
        f"{counted(len(guilty), 'row')} with special tokens spelled out, read as control tokens; first: {guilty[0]}",
    )


def _empty(examples: Sequence[Example]) -> tuple[str, ...]:
    """Answers without text teach the model to stop at once: said, since it is rarely meant."""
    found = [
        example.source
        for example in examples
        if any(
            message["role"] == "assistant"
            and not message["content"]
            and "tool_calls" not in message
            for message in example.messages[example.first_trained :]
        )
    ]
    if not found:
        return ()
    return (f"{counted(len(found), 'row')} with an empty answer; first: {found[0]}",)


def _plain(
    tokenizer: Any, examples: Sequence[Example], settings: DataSettings, bad: BadRows
) -> Draft:
    def refuse(one: Example) -> None:
        uses_chat(
            tokenizer, settings, one
        )  # a row of several turns among single ones has no plain form
        refuse_tools_without_template(one)

    single = bad.good(examples, refuse, lambda one: one.source)
    pairs = [example.plain or ("", "") for example, _ in single]
    found = mask_plain(tokenizer, pairs, [example.source for example, _ in single])
    kept, masked = _sound(single, found, bad)
    examples = [example for example, _ in kept]
    if settings.train_on == "text":
        masked = [replace(one, trained=(True,) * len(one.tokens)) for one in masked]
    notes = _located(masked) + _empty(examples)
    turns = [(len(example.messages) - 1,) for example in examples]
    return Draft(examples, masked, turns, "none", str(tokenizer.eos_token), notes=notes)


def _texts(tokenizer: Any, examples: Sequence[Example], bad: BadRows) -> Draft:
    texts = [(example, example.text or "") for example in examples]
    sources = [example.source for example in examples]
    found = mask_plain(tokenizer, [("", text) for _, text in texts], sources)
    kept, masked = _sound(texts, found, bad)
    whole = [example for example, _ in kept]
    return Draft(whole, masked, [()] * len(whole), "none", str(tokenizer.eos_token))


def _classes(
    tokenizer: Any, examples: Sequence[Example], labels: Sequence[str] | None, bad: BadRows
) -> Draft:
    known = (
        in_order(str(example.label) for example in examples) if labels is None else tuple(labels)
    )
    named = bad.good(examples, lambda one: _class_of(one, known), lambda one: one.source)
    examples = [example for example, _ in named]
    tokens = encode(tokenizer, [example.text or "" for example in examples], special=True)
    masked = [Masked(tuple(ids), (False,) * len(ids), ()) for ids in tokens]
    note = (
        "to have a language model write the label: data.columns={prompt: text, completion: label}"
    )
    return Draft(examples, masked, [()] * len(examples), "classes", "", known, (note,))


def _class_of(example: Example, known: tuple[str, ...]) -> str:
    if str(example.label) not in known:
        raise DataError(
            f"{example.source}: a class that the training rows do not have",
            got=repr(example.label),
            wanted=", ".join(known[:20]),
            cure="correct the label, or train with such rows too",
        )
    return str(example.label)
