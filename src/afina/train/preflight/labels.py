"""Which tokens train, and whether the model learns from them where to stop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

from afina.errors import counted
from afina.train.preflight.finding import Finding, Subject, places, skipped
from afina.types import Row


def turns(row: Row) -> Iterator[tuple[int, int]]:
    """The trained turns of a row: [start, end) of each run of labels."""
    at = 0
    for label, run in groupby(row.trained):
        length = sum(1 for _ in run)
        if label:
            yield at, at + length
        at += length


def labels(rows: Sequence[Row], stops: Sequence[int]) -> Finding:
    """Whether there are tokens to learn, and answers among them that are more than their end."""
    tokens = sum(len(row.tokens) for row in rows)
    trained = sum(row.trained_tokens for row in rows)
    silent = [row for row in rows if row.label is None and not row.trained_tokens]
    empty = [
        row
        for row in rows
        if any(row.tokens[start] in stops and end - start == 1 for start, end in turns(row))
    ]
    values = {"tokens": tokens, "trained_tokens": trained, "rows_without_labels": len(silent)}
    if not trained:
        return Finding(
            "labels",
            "error",
            f"not one of {counted(tokens, 'token')} would be trained",
            "give the rows answers, or set data.train_on=text",
            values=values,
        )
    are = "is" if trained == 1 else "are"
    share = (
        f"{trained} of {counted(tokens, 'token')} {are} trained ({100 * trained / tokens:.0f} %)"
    )
    if silent:
        return Finding(
            "labels",
            "warning",
            f"{counted(len(silent), 'row')} without a trained token: {places(silent)}; {share}",
            "leave out what has no answer, or give it one",
            values=values,
        )
    if empty:
        return Finding(
            "labels",
            "warning",
            f"{counted(len(empty), 'row')} with an empty answer, which teaches to stop at once: {places(empty)}",
            "fill in what is empty, or leave it out",
            values=values,
        )
    return Finding("labels", "ok", share, values=values)


def stop_token(subject: Subject) -> Finding:
    """Whether every trained turn ends with a token that generation stops on."""
    tokenizer, stops = subject.tokenizer, set(subject.stops)
    if tokenizer is None:
        return skipped("stop token", "no tokenizer was given")
    if any(row.label is not None for row in subject.rows):
        return skipped("stop token", "the rows are for classification")
    ends: set[int] = set()
    cut: list[Row] = []
    endless: list[Row] = []
    count = 0
    for row in subject.rows:
        for start, end in turns(row):
            count += 1
            last = _last_word(tokenizer, row.tokens[start:end], stops)
            if last in stops:
                ends.add(last)
            elif end == len(row.tokens) == subject.limit:
                cut.append(row)
            else:
                endless.append(row)
    values = {
        "turns": count,
        "without_stop": len(cut) + len(endless),
        "stop_tokens": [_name(tokenizer, id) for id in sorted(ends)],
    }
    if endless or cut:
        return _endless(endless or cut, count, bool(endless), subject, values)
    names = " and ".join(_name(tokenizer, id) for id in sorted(ends))
    said = f"every trained turn ({count}) ends with {names}, and generation stops on it"
    unnamed = sorted(ends - set(subject.named_stops))
    if unnamed:
        name = _name(tokenizer, unnamed[0])
        return Finding(
            "stop token",
            "note",
            f"{said}; the model's generation settings do not name {name}, so other programs may not stop there",
            f"add {unnamed[0]} ({name}) to eos_token_id in the model's generation_config.json",
            values=values,
        )
    return Finding("stop token", "ok", said, values=values)


def _endless(
    rows: Sequence[Row], count: int, masked: bool, subject: Subject, values: dict[str, Any]
) -> Finding:
    """The finding about turns without a stop; worst when none has one and nobody chose it."""
    known = " or ".join(_name(subject.tokenizer, id) for id in subject.stops) or "no stop token"
    none_stops = not values["stop_tokens"]
    why = "" if masked else " (cut there)"
    do = "does" if values["without_stop"] == 1 else "do"
    return Finding(
        "stop token",
        "error" if masked and none_stops and not subject.given else "warning",
        f"{values['without_stop']} of {counted(count, 'trained turn')} {do} not end with {known}{why}, so the model "
        f"does not learn to stop there: {places(rows)}",
        "end each answer with the stop token, and label it"
        if masked
        else "shorten what is too long, or set data.over_long=drop",
        values=values,
    )


def _last_word(tokenizer: Any, tokens: Sequence[int], stops: Collection[int]) -> int:
    """The last token that is a stop or more than white space, which a template may write after its stop."""
    for token in reversed(tokens):
        if token in stops or tokenizer.decode([token]).strip():
            return token
    return tokens[-1]


def _name(tokenizer: Any, id: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(id))
