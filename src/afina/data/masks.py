"""Which tokens of a rendered row are labels.

The rule for every trained turn: from the first token of the answer to its stop token, both included; what the
template writes after the stop (SmolLM2's newline) is not trained.

A place in the text becomes a place in the tokens in the first of three ways that holds:

1. the tokens of the text before it are exactly the first tokens of the whole;
2. a token would lie across it, so the text is cut at its turns and the parts are tokenised apart, as happens in
   generation, where the prompt is tokenised alone (only if the parts still decode to the same text);
3. the offsets of the tokens decide, and a token across the start of an answer belongs to the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from afina.data.templates import Rendered, Stop, Turn
from afina.errors import DataError

_CHUNK = 512
"""Texts tokenised in one call: enough to keep the tokenizer's threads busy, little memory."""

Located = Literal["exact", "apart", "offset"]


@dataclass(frozen=True)
class Masked:
    """Tokens and labels of a row.

    Attributes:
        tokens, trained: as in `Row`.
        starts: the first label of each trained turn.
        located: in which of the three ways its turns were found.
        tags: as in `Row`.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    starts: tuple[int, ...]
    located: Located = "exact"
    tags: tuple[int, ...] | None = None


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
) -> list[Masked | DataError]:
    """Tokens and labels of many rendered conversations, tokenised in batches.

    In the place of a row with a trained turn without a stop token, or with a place that no offset can decide, is the
    error that says so.
    """
    wholes = encode(tokenizer, [one.text for one in rendered])
    places = [_places(one) for one in rendered]
    prefixes = iter(
        encode(
            tokenizer,
            [one.text[:at] for one, each in zip(rendered, places, strict=True) for at in each],
        )
    )
    masked: list[Masked | DataError] = []
    for one, ids, each, source in zip(rendered, wholes, places, sources, strict=True):
        exact = {at: len(part) for at in each if ids[: len(part := next(prefixes))] == part}
        try:
            masked.append(_mask(tokenizer, one, ids, exact, stop, source))
        except DataError as error:
            masked.append(error)
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
    ids, place, located = _locate(tokenizer, one, ids, exact, source)
    trained, starts = [False] * len(ids), []
    added: list[int] = []
    for turn in one.turns:
        start, end = place[turn.start], place[turn.end]
        if stop.own:
            last = next((at for at in range(end - 1, start - 1, -1) if ids[at] in stop.ids), None)
        elif end < len(ids):  # the next turn's opening may be what stops generation
            last = end if ids[end] in stop.ids else None
        elif end > start and ids[end - 1] in stop.ids:
            last = end - 1
        else:
            last, added = (end - 1, [stop.ids[0]]) if stop.ids else (None, [])
        if last is None:
            raise _no_stop(tokenizer, one.text[turn.start : turn.end], stop, source)
        trained[start : last + 1] = [True] * (last + 1 - start)
        starts.append(start)
    tokens, labels = (*ids, *added), (*trained, *(True for _ in added))
    return Masked(tokens, labels, tuple(starts), located)


def _locate(
    tokenizer: Any, one: Rendered, ids: list[int], exact: dict[int, int], source: str
) -> tuple[list[int], dict[int, int], Located]:
    """Ids of the row, the token number of each place in it, and which way found them."""
    places = _places(one)
    if len(exact) == len(places):
        return ids, {0: 0, len(one.text): len(ids), **exact}, "exact"
    cuts = [0, *places, len(one.text)]
    parts = encode(tokenizer, [one.text[a:b] for a, b in pairwise(cuts)])
    apart = [id for part in parts for id in part]
    if _decode(tokenizer, apart) == _decode(tokenizer, ids):
        numbers = [sum(map(len, parts[:n])) for n in range(len(cuts))]
        return apart, dict(zip(cuts, numbers, strict=True)), "apart"
    unsure = [at for at in places if at not in exact]
    place = {0: 0, len(one.text): len(ids), **exact}
    return ids, place | _by_offsets(tokenizer, one, unsure, source), "offset"


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _by_offsets(
    tokenizer: Any, one: Rendered, places: Sequence[int], source: str
) -> dict[int, int]:
    """Token numbers of places in the text that a token lies across."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{source}: the tokens of the prompt are not the first tokens of the whole row",
            got=f"a slow tokenizer ({type(tokenizer).__name__}), which gives no offsets",
            wanted="a fast tokenizer",
            cure="load the model with its tokenizer.json, or change what joins prompt and answer",
        )
    offsets = tokenizer(
        one.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    starts = {turn.start for turn in one.turns}
    found: dict[int, int] = {}
    for at in places:
        beyond = (i for i, (a, b) in enumerate(offsets) if (b > at if at in starts else a >= at))
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
) -> list[Masked | DataError]:
    """Prompt, completion and end-of-text token, without a template; the completion and the end are labels.

    A text without a prompt is the pair ("", text). The tokenizer's begin-of-text token is put first if it would
    put it there itself. Errors of rows are in their place, as `mask_all` says.

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
    rendered = [
        Rendered(prompt + answer, (Turn(0, len(prompt), len(prompt + answer), exact=True),))
        for prompt, answer in pairs
    ]
    masked = mask_all(tokenizer, rendered, Stop((eos,), own=False), sources)
    first = _begin(tokenizer)
    return [one if isinstance(one, DataError) else _after(first, one) for one in masked]


def _after(first: Sequence[int], one: Masked) -> Masked:
    return replace(
        one,
        tokens=(*first, *one.tokens),
        trained=(*(False for _ in first), *one.trained),
        starts=tuple(start + len(first) for start in one.starts),
    )


def _begin(tokenizer: Any) -> list[int]:
    """The begin-of-text token, if the tokenizer puts one before a text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
