"""From a source to the rows of a run: read, recognise, render, mask, cut, account for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from afina.data.badrows import BadRows
from afina.data.draft import Draft
from afina.data.drafts import draft
from afina.data.example import Example
from afina.data.formats import Format, convert, recognise, rename
from afina.data.masks import Masked
from afina.data.report import DataReport, fingerprint, quantiles
from afina.data.settings import DataSettings, Role
from afina.data.sources import Read, Source, read
from afina.data.tags import cut as closed
from afina.data.tags import in_order
from afina.errors import DataError, counted
from afina.types import IGNORE, Row

OVER_LONG = "longer than max_tokens"
UNTRAINED = "no trained token"
CUT_AWAY = "no trained token left after truncation"
TRUNCATED = "truncated"
BAD = "cannot be used (data.on_bad_row=skip)"

PLACES = 5
"""How many rows of each fate the report names."""


@dataclass(frozen=True)
class Prepared:
    """Rows ready for an epoch, and the account of how they came about."""

    rows: list[Row]
    report: DataReport


def prepare(
    source: Source,
    tokenizer: Any,
    settings: DataSettings,
    *,
    role: Role = "train",
    max_tokens: int | None = None,
    labels: Sequence[str] | None = None,
    stop_ids: Sequence[int] = (),
    keep: Collection[str] = (),
) -> Prepared:
    """Rows of tokens and labels from any source.

    `Row.meta` carries what evaluation needs: `prompt` (messages, or a text where no template is used), `reference`
    (the answer of the last trained turn), `tools` and `choices` where given, `digest` of the content; for classes
    `text` and `label`; and under `columns` what a row has in the columns that are to be kept.

    Args:
        source: see `sources.read`.
        tokenizer: of Transformers.
        settings: how.
        role: which split of a folder or hub data set is read; named in the report.
        max_tokens: the model's context; `settings.max_tokens` may only be smaller.
        labels: class names in the order of their numbers, from the training rows' report; None numbers the sorted
            names of this source.
        stop_ids: tokens that generation stops on, if known beyond the tokenizer's.
        keep: columns, as the source names them.

    Raises:
        DataError: the data cannot be read, recognised, rendered or masked, or no row is left.
    """
    bad = BadRows()
    found = read(source, settings, role, bad)
    given = {row.id: row.columns for row in found.rows}
    format, examples = _examples(found, settings, bad)
    made = draft(format.name, tokenizer, examples, settings, bad, labels, stop_ids)
    _refuse(bad, found, settings, left=len(made.examples))
    readable = _readable(tokenizer, max_tokens)
    tally = _Tally(_limit(settings, readable), readable, settings.over_long)
    for place, _ in bad.found:
        tally.refused(place)
    rows = [
        row
        for example, masked, turns in zip(made.examples, made.masked, made.turns, strict=True)
        if (row := tally.row(tokenizer, example, masked, turns, made)) is not None
    ]
    tally.refuse_long()
    if keep:
        rows = [_with_columns(row, given[row.id], keep) for row in rows]
    report = _report(found, role, format, bad, made, tally, rows)
    if not rows:
        raise DataError(
            f"{found.name}: no row is left to train on",
            got="; ".join(
                f"{count} of {counted(found.total, 'row')} dropped: {why}"
                for why, count in tally.dropped.items()
            ),
            wanted="rows with an answer, no longer than max_tokens",
            cure=_cure(tally, report),
        )
    return Prepared(rows, report)


def _with_columns(row: Row, columns: Mapping[str, Any], keep: Collection[str]) -> Row:
    kept = {name: columns[name] for name in keep if name in columns}
    return replace(row, meta={**row.meta, "columns": kept})


def classes(source: Source, settings: DataSettings) -> tuple[str, tuple[str, ...]] | None:
    """Whether rows have classes: their format (text_label, tokens_tags) and the classes' names in their order.

    For whoever must know before there is a tokenizer; None for rows of any other format.

    Raises:
        DataError: the data cannot be read, or its rows cannot be used.
    """
    bad = BadRows()
    format, examples = _examples(read(source, settings, "train", bad), settings, bad)
    if format.name == "text_label":
        return format.name, in_order(str(example.label) for example in examples)
    if format.name == "tokens_tags":
        return format.name, in_order(tag for example in examples for tag in example.tags)
    return None


def _examples(found: Read, settings: DataSettings, bad: BadRows) -> tuple[Format, list[Example]]:
    """The format of what was read, and the rows in their common form; at least one."""
    raw = rename(found.rows, settings.columns, bad)
    if not raw:
        _refuse(bad, found, settings, left=0)
    format, fitting = recognise(raw, settings, bad)
    examples = convert(fitting, format, bad)
    _refuse(bad, found, settings, left=len(examples))  # before tokens are made, which takes longest
    return format, examples


def _refuse(bad: BadRows, found: Read, settings: DataSettings, *, left: int) -> None:
    """Raises the bad rows where that is the policy, or where no other is left."""
    if settings.on_bad_row == "error" or not left:
        bad.refuse(found.name, found.total)


def _readable(tokenizer: Any, max_tokens: int | None) -> int | None:
    """Tokens that the model can read; None where nobody says."""
    own = getattr(tokenizer, "model_max_length", None)
    if (
        max_tokens is None and own is not None and own < 10**9
    ):  # Transformers says "unknown" with 1e30
        return int(own)
    return max_tokens


def _limit(settings: DataSettings, readable: int | None) -> int | None:
    """The longest row allowed."""
    if readable is not None and settings.max_tokens is not None and settings.max_tokens > readable:
        raise DataError(
            "data.max_tokens is more than the model can read",
            got=settings.max_tokens,
            wanted=f"at most {readable}",
            cure=f"data.max_tokens={readable}, or leave it out",
        )
    return settings.max_tokens or readable


@dataclass
class _Tally:
    """Cuts or drops one row at a time and keeps count."""

    limit: int | None
    readable: int | None
    over_long: str
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    long: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    truncated: int = 0
    lost_tokens: int = 0

    def row(
        self, tokenizer: Any, example: Example, masked: Masked, turns: tuple[int, ...], made: Draft
    ) -> Row | None:
        """The finished row, or None if it is dropped."""
        length = len(masked.tokens)
        cut = self.limit is not None and length > self.limit
        if cut and self.over_long == "error":
            self.long.append((example.source, length))
            return None
        if cut and self.over_long == "drop":
            return self._drop(OVER_LONG, example.source, length)
        tokens, trained = masked.tokens[: self.limit], masked.trained[: self.limit]
        label, tags = None, None
        if masked.tags is not None:
            tags = masked.tags
            if cut:
                tokens, tags = closed(tokenizer, masked, self.limit or length)
            if all(tag == IGNORE for tag in tags):
                return self._drop(UNTRAINED, example.source, length)
        elif made.template == "classes":
            label = made.labels.index(str(example.label))
            if cut:  # keeps the closing special token
                tokens = tuple(
                    tokenizer(example.text, truncation=True, max_length=self.limit)["input_ids"]
                )
        elif not any(trained[1:]):
            why = CUT_AWAY if any(masked.trained[1:]) else UNTRAINED
            return self._drop(why, example.source, length)
        if cut:
            self.truncated += 1
            self._place(TRUNCATED, example.source)
        self.lost_tokens += length - len(tokens)
        left = [
            place for place in zip(masked.starts, turns, strict=False) if place[0] < len(tokens)
        ]
        start, turn = left[-1] if left else (0, None)
        return Row(
            tokens,
            trained,
            example.id,
            example.source,
            prompt_tokens=start,
            label=label,
            meta=_meta(example, turn, made.template),
            tags=tags,
        )

    def refused(self, place: str) -> None:
        """Counts a row that cannot be used."""
        self.dropped[BAD] += 1
        self._place(BAD, place)

    def refuse_long(self) -> None:
        """Raises for the rows that are too long, where that is an error.

        Raises:
            DataError: naming the first, and the length that would do for all.
        """
        if not self.long:
            return
        (place, length), *others = self.long
        longest = max(each for _, each in self.long)
        also = f", and {counted(len(others), 'more row')}" if others else ""
        raise DataError(
            f"{place}: row longer than max_tokens, and data.over_long is error",
            got=f"{counted(length, 'token')}{also}, the longest of {longest}"
            if others
            else f"{length} tokens",
            wanted=f"at most {self.limit}",
            cure=f"data.max_tokens={longest}, or data.over_long=drop or truncate"
            if self.readable is None or longest <= self.readable
            else f"data.over_long=drop or truncate: the model reads {self.readable} tokens",
        )

    def _drop(self, why: str, source: str, length: int) -> None:
        self.dropped[why] += 1
        self.lost_tokens += length
        self._place(why, source)

    def _place(self, why: str, source: str) -> None:
        places = self.places.setdefault(why, [])
        if len(places) < PLACES:
            places.append(source)


def _meta(example: Example, turn: int | None, template: str) -> dict[str, Any]:
    """What evaluation needs of a row; see `prepare`."""
    meta: dict[str, Any] = {"digest": example.digest}
    if example.text is not None:
        meta["text"] = example.text
    if example.label is not None:
        meta["label"] = str(example.label)
    if example.words:
        meta["words"], meta["tags"] = list(example.words), list(example.tags)
    if turn is not None:
        chat = template == "chat"
        plain = example.plain or ("", "")
        meta["prompt"] = list(example.messages[:turn]) if chat else plain[0]
        meta["reference"] = example.messages[turn]["content"] if chat else plain[1]
        if chat and example.tools:
            meta["tools"] = example.tools
    if example.choices:
        meta["choices"] = list(example.choices)
    return meta


def _report(
    found: Read,
    role: str,
    format: Format,
    bad: BadRows,
    made: Draft,
    tally: _Tally,
    rows: Sequence[Row],
) -> DataReport:
    return DataReport(
        source=found.name,
        role=role,
        format=format.name,
        why=format.why,
        template=made.template,
        stop=made.stop,
        read=found.total,
        kept=len(rows),
        dropped=dict(tally.dropped),
        places={why: tuple(places) for why, places in tally.places.items()},
        bad=bad.lines(),
        truncated=tally.truncated,
        lost_tokens=tally.lost_tokens,
        max_tokens=tally.limit,
        readable_tokens=tally.readable,
        tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(row.trained_tokens for row in rows),
        lengths=quantiles([len(one.tokens) for one in made.masked]),
        duplicates=len(made.examples) - len({example.digest for example in made.examples}),
        fingerprint=fingerprint(rows),
        labels=made.labels,
        notes=found.notes + made.notes,
    )


def _cure(tally: _Tally, report: DataReport) -> str:
    """What helps when no row is left."""
    if tally.dropped[OVER_LONG] or tally.dropped[CUT_AWAY]:
        longest, most = report.lengths["max"], report.readable_tokens
        if report.may_be_longer:
            enough = longest if most is None else min(longest, most)
            return f"data.max_tokens={enough} (the longest row has {longest}), or shorten the rows"
        what = "the rows" if tally.dropped[OVER_LONG] else "their prompts"
        cut = ", or cut them: data.over_long=truncate" if tally.dropped[OVER_LONG] else ""
        return f"shorten {what}: the model reads {most} tokens{cut}"
    if report.format == "text":
        return "give the rows a text"
    return "give every row an assistant's answer, or data.train_on=text to train on every token"
