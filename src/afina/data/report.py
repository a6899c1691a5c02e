"""What became of the rows: counted, never silent."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from afina.errors import counted
from afina.types import Row

_QUANTILES = (("min", 0.0), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True)
class DataReport:
    """The account of one `prepare`.

    Attributes:
        source, role: what was read, for what.
        format, why: the recognised format and the reason.
        template: "chat" (the tokenizer's chat template), "none", or "classes".
        stop: the token that ends a trained turn, as text; "" for classes.
        read, kept: rows.
        dropped: reason -> rows.
        places: reason, or "truncated" -> where the first such rows are.
        bad: the first rows that could not be used, each with what is wrong with it.
        truncated: rows kept but cut; lost_tokens: tokens lost by cutting and by dropping long rows.
        max_tokens: the longest row allowed; None is no limit.
        readable_tokens: what the model can read; None is not known.
        tokens, trained_tokens: of the kept rows.
        lengths: quantiles of the rows' tokens before any cut: min, p50, p90, p99, max.
        duplicates: rows whose content occurred before.
        labels: class names, in the order of their numbers.
        notes: what else the user should know.
        fingerprint: sha256 of the kept rows' tokens, labels and order.
    """

    source: str
    role: str
    format: str
    why: str
    template: str
    stop: str
    read: int
    kept: int
    dropped: dict[str, int]
    truncated: int
    lost_tokens: int
    max_tokens: int | None
    tokens: int
    trained_tokens: int
    lengths: dict[str, int]
    duplicates: int
    fingerprint: str
    readable_tokens: int | None = None
    labels: tuple[str, ...] = ()
    places: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def may_be_longer(self) -> bool:
        """Whether a larger data.max_tokens is possible: the model would read longer rows than those allowed."""
        if self.max_tokens is None:
            return False
        return self.readable_tokens is None or self.max_tokens < self.readable_tokens

    def lines(self) -> list[str]:
        """The report for the log, most important first."""
        share = f" ({100 * self.trained_tokens / self.tokens:.0f} %)" if self.trained_tokens else ""
        out = [
            f"data ({self.role}): {self.source}",
            f"  format   {self.format}: {self.why}",
            f"  rows     {self.kept} of {self.read} kept"
            + "".join(f"; {count} dropped: {why}" for why, count in self.dropped.items())
            + (f"; {self.truncated} truncated" if self.truncated else "")
            + (f"; {counted(self.lost_tokens, 'token')} lost" if self.lost_tokens else ""),
            f"  tokens   {self.tokens}, of which trained {self.trained_tokens}{share}",
            "  lengths  "
            + ", ".join(f"{name} {value}" for name, value in self.lengths.items())
            + f" (limit {self.max_tokens or 'none'})",
        ]
        if self.template != "classes":
            out.append(f"  template {self.template}; a turn ends with {self.stop}")
        if self.labels:
            shown = ", ".join(self.labels[:8]) + (", …" if len(self.labels) > 8 else "")
            out.append(f"  classes  {len(self.labels)}: {shown}")
        if self.duplicates:
            again = counted(self.duplicates, "row")
            out.append(f"  note     {again} with the content of an earlier row")
        out += [f"  skipped  {line}" for line in self.bad]
        return out + [f"  note     {note}" for note in self.notes]


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Order statistics (nearest rank below) of some lengths; empty for none."""
    ordered = sorted(lengths)
    return {name: ordered[int(q * (len(ordered) - 1))] for name, q in _QUANTILES} if ordered else {}


def fingerprint(rows: Sequence[Row]) -> str:
    """sha256 over tokens, label flags, prompt lengths and classes, in order."""
    digest = hashlib.sha256()
    for row in rows:
        head = array(
            "q",
            (row.id, len(row.tokens), row.prompt_tokens, -1 if row.label is None else row.label),
        )
        digest.update(head.tobytes() + array("q", row.tokens).tobytes() + bytes(row.trained))
    return digest.hexdigest()
