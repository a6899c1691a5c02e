"""What a pre-flight found, for people and for other programs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from afina.errors import ConfigError, counted, nearest
from afina.train.preflight import Finding
from afina.types import Row

CLEAN, WARNED, FAILED = 0, 1, 2
"""Exit codes of `afina check`."""


def _plain(value: Any) -> Any:
    """A value with its infinities and NaNs as words, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Checked:
    """The findings of a pre-flight, in the order in which a run meets the points.

    Attributes:
        findings: one a point.
        rows: that would train, to be shown; empty where the data cannot be read.
        tokenizer: that made them; None where there is none.
    """

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...] = ()
    tokenizer: Any = None

    def __getitem__(self, name: str) -> Finding:
        """The finding of the point `name`.

        Raises:
            ConfigError: no point has this name.
        """
        found = {finding.name: finding for finding in self.findings}
        if name not in found:
            near = nearest(str(name), list(found), most=1)
            raise ConfigError(
                "no point of the check has this name",
                got=repr(name),
                wanted=", ".join(found),
                cure=f"did you mean {near[0]!r}?" if near else None,
            )
        return found[name]

    @property
    def ok(self) -> bool:
        """Whether nothing stands against the run: no error and no warning."""
        return self.exit_code(strict=True) == CLEAN

    def exit_code(self, *, strict: bool = False) -> int:
        """0 clean (notes allowed), 1 warnings under `strict`, 2 errors."""
        met = {finding.status for finding in self.findings}
        if "error" in met:
            return FAILED
        return WARNED if strict and "warning" in met else CLEAN

    def lines(self) -> list[tuple[str, str]]:
        """(status, line) of the whole report; the status of a line that goes on is ""."""
        width = max(len(finding.name) for finding in self.findings)
        told: list[tuple[str, str]] = []
        for finding in self.findings:
            told.append((finding.status, f"{finding.name:<{width}}  {finding.seen}"))
            more = [f"do: {finding.cure}"] if finding.cure else []
            told += [("", f"{'':<{width}}  {line.strip()}") for line in (*finding.details, *more)]
        return told

    def summary(self) -> str:
        """How many points have which status, worst first."""
        counts = Counter(finding.status for finding in self.findings)
        said = [
            counted(counts[status], status)
            if status in ("error", "warning", "note")
            else f"{counts[status]} {status}"
            for status in ("error", "warning", "note", "ok", "skipped")
            if counts[status]
        ]
        return ", ".join(said)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "exit_code": self.exit_code(),
            "exit_code_strict": self.exit_code(strict=True),
            "findings": [_plain(asdict(finding)) for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [f"{status:<8} {line}".rstrip() for status, line in self.lines()]
        return "\n".join([*lines, self.summary()])
