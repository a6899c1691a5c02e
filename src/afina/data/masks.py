"""Which tokens of a rendered row are labels.

The rule for every trained turn: from the first token of the answer to its stop token, both included; what the
template writes after the stop (SmolLM2's newline) is not trained. A place in the text becomes a place in the tokens
if the tokens of the text before it are exactly the first tokens of the whole; where a token lies across that place,
the offsets of the tokens decide, and such a token belongs to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afina.data.templates import Rendered, Stop
from afina.errors import DataError

_CHUNK = 512
"""Texts tokenised in one call: enough to keep the tokenizer's threads busy, little memory."""


@dataclass(frozen=True)
class Masked:
    """Tokens and labels of a row.

    Attributes:
        tokens, trained: as in `Row`.
        starts: the first label of each trained turn.
        by_offset: turns whose place was decided by offsets.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    starts: tuple[int, ...]
    by_offset: int = 0


def encode(tokenizer: Any, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """Ids of each text; with `special`, with the tokens the tokenizer itself adds around a text."""
    ids: list[list[int]] = []
    for at in range(0, len(texts), _CHUNK):
        piece = list(texts[at : at + _CHUNK])
        ids += tokenizer(
            piece, add_special_tokens=special, return_attention_mask=False, verbose=False
        )["input_ids"]
    return ids


def mask_all(
    tokenizer: Any, rendered: Sequence[Rendered], stop: Stop, sources: Sequence[str]
) -> list[Masked]:
    """Tokens and labels of many rendered conversations, tokenised in batches.

    Raises:
        DataError: a trained turn without a stop token, or a place no offset can decide.
    """
    wholes = encode(tokenizer, [one.text for one in rendered])
    places = [_places(one) for one in rendered]
    prefixes = iter(
        encode(
            tokenizer,
            [one.text[:at] for one, each in zip(rendered, places, strict=True) for at in each],
        )
    )
    masked: list[Masked] = []
    for one, ids, each, source in zip(rendered, wholes, places, sources, strict=True):
        exact = {at: len(part) for at in each if ids[: len(part := next(prefixes))] == part}
        masked.append(_mask(tokenizer, one, ids, exact, stop, source))
    return masked


def _places(one: Rendered) -> list[int]:
    """The inner ends of the turns, in characters, in order and once each."""
    ends = {at for turn in one.turns for at in (turn.start, turn.end)}
    return sorted(ends - {0, len(one.text)})


def _mask(
    tokenizer: Any,
    one: Rendered,
    ids: list[int],
    exact: dict[int, int],
    stop: Stop,
    source: str,
) -> Masked:
    place = {0: 0, len(one.text): len(ids), **exact}
    starts_at = {turn.start for turn in one.turns}
    unsure = {at: at in starts_at for at in _places(one) if at not in exact}
    if unsure:
        place |= _by_offsets(tokenizer, one.text, unsure, source)
    trained, starts = [False] * len(ids), []
    added: list[int] = []
    for turn in one.turns:
        start, end = place[turn.start], place[turn.end]
        stops = [at for at in range(start, end) if ids[at] in stop.ids]
        if stops:
            last = stops[-1]
        elif not stop.own and ids[end : end + 1] and ids[end] in stop.ids:
            last = end  # the next turn's opening is what stops generation
        elif end == len(ids) and not stop.own and stop.ids:
            last, added = end - 1, [stop.ids[0]]
        else:
            raise _no_stop(tokenizer, one.text[turn.start : turn.end], stop, source)
        trained[start : last + 1] = [True] * (last + 1 - start)
        starts.append(start)
    return Masked(
        (*ids, *added),
        (*trained, *(True for _ in added)),
        tuple(starts),
        sum(turn.start in unsure for turn in one.turns),
    )


def _by_offsets(
    tokenizer: Any, text: str, places: Mapping[int, bool], source: str
) -> dict[int, int]:
    """Token numbers of places in the text that a token may lie across.

    `places` says of each character place whether a turn starts there. A token across the start of a turn belongs to
    the turn, and one across its end too.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{source}: the tokens of the prompt are not the first tokens of the whole row",
            got=f"a slow tokenizer ({type(tokenizer).__name__}), which gives no offsets",
            wanted="a fast tokenizer",
            cure="load the model with its tokenizer.json, or change what joins prompt and answer",
        )
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    found: dict[int, int] = {}
    for at, start in places.items():
        beyond = (i for i, (a, b) in enumerate(offsets) if (b > at if start else a >= at))
        found[at] = next(beyond, len(offsets))
    return found


def _no_stop(tokenizer: Any, turn: str, stop: Stop, source: str) -> DataError:
    names = [tokenizer.convert_ids_to_tokens(id) for id in stop.ids]
    return DataError(
        f"{source}: a trained turn has no stop token, so the model would not learn to stop",
        got=f"turn {turn[:60]!r}…{turn[-20:]!r}",
        wanted=f"one of {names} at its end" if names else "an end-of-text token in the tokenizer",
        cure="data.train_on=last (the stop is added to the last turn), or a chat template that ends its turns",
    )


def mask_plain(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], sources: Sequence[str]
) -> list[Masked]:
    """Prompt, completion and end-of-text token, without a template; the completion and the end are labels.

    A text without a prompt is the pair ("", text). The tokenizer's begin-of-text token is put first if it would
    put it there itself.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            "the tokenizer has no end-of-text token, so the model would not learn to stop",
            got="eos_token None",
            cure="set tokenizer.eos_token, or train on chats with a chat template",
        )
    first = _begin(tokenizer)
    wholes = encode(tokenizer, [prompt + answer for prompt, answer in pairs])
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    masked: list[Masked] = []
    for (prompt, answer), ids, part, source in zip(pairs, wholes, prompts, sources, strict=True):
        start, by_offset = len(part), ids[: len(part)] != part
        if by_offset:
            at = len(prompt)
            start = _by_offsets(tokenizer, prompt + answer, {at: True}, source)[at]
        start += len(first)
        tokens = [*first, *ids]
        if not answer or tokens[-1] != eos:
            tokens.append(eos)
        trained = (*(False for _ in range(start)), *(True for _ in range(start, len(tokens))))
        masked.append(Masked(tuple(tokens), trained, (start,), int(by_offset)))
    return masked


def _begin(tokenizer: Any) -> list[int]:
    """The begin-of-text token, if the tokenizer puts one before a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
