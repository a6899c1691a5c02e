"""Tools and settings that take turns in windows of training, each window in a fresh process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .meter import compiling_s, counted, read_notes, tokens_per_second
from .pieces import began_s, result_of
from .report import Figure
from .rows import shared_share
from .side import PEER, SideBySide, median
from .variants import Variant, Windows

OURS = "default"
"""afina's setting, which every other stands beside."""


class Race:
    """The windows of some settings over one set of rows.

    Args:
        side: the pieces.
        kind: of pieces.
        variants: in the order of a round; afina's is among them.
        size: of the windows.
        label: what tells these figures from others of the same settings.
        peers: names of tools by setting; any other setting is the usual peer's.
        more: further fields of the jobs.
        shares: say how much afina's sharing leaves.
    """

    def __init__(
        self,
        side: SideBySide,
        kind: str,
        variants: Sequence[Variant],
        size: Windows,
        *,
        label: str = "",
        peers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
        shares: bool = False,
    ) -> None:
        self.side, self.kind, self.variants, self.size = side, kind, variants, side.rounds(size)
        self.label, self.peers, self.more = label, dict(peers or {}), dict(more or {})
        self.shares = shares
        self.found: dict[str, list[Path]] = {}

    def round(self, window: int) -> None:
        """One window of each setting, with other rows than in the rounds before and the same for all."""
        size = self.size
        for variant in self.variants:
            steps = size.warm + size.steps
            job = self.side.job(variant, window, steps, size.warm, size.batch, **self.more)
            folder = self.side.train(job, f"{self.kind}{window}")
            if folder is not None:
                self.found.setdefault(variant.setting, []).append(folder)

    def figures(self) -> Iterator[Figure]:
        """afina's beside each setting's, over the windows that were run: medians, and the extremes of some."""
        ours = self._measured(OURS)
        if self.shares and ours["speed"]:
            share = shared_share(self.side.rows, self.size.batch, self.size.steps)
            yield self.side.figure("", "tokens left by shared beginnings", "share", share, None)
        for variant in self.variants:
            name = variant.setting
            theirs = self._measured(name)
            if name == OURS or (name in self.peers and not theirs["speed"]):
                continue
            setting = f"{self.label}, {name}" if self.label else name
            peer = self.peers.get(name, PEER)
            for metric, unit, choose in METRICS:
                values = [choose(each[metric.partition(",")[0]]) for each in (ours, theirs)]
                yield self.side.figure(setting, metric, unit, *values, peer=peer)

    def _measured(self, setting: str) -> dict[str, list[float]]:
        """What was measured of a setting, a number for each window."""
        folders = self.found.get(setting, [])
        found: dict[str, list[float]] = {name: [] for name in ("speed", "total speed", *MORE)}
        tokens, seconds = 0, 0.0
        for folder in folders:
            result, notes, began = result_of(folder), read_notes(folder), began_s(folder)
            assert result is not None
            found["speed"].append(tokens_per_second(notes, self.size.warm))
            more_tokens, more_seconds = counted(notes, self.size.warm)
            tokens, seconds = tokens + more_tokens, seconds + more_seconds
            found["peak memory"].append(result["peak_bytes"] / 2**30)
            if "loaded_bytes" in result:
                found["memory when loaded"].append(result["loaded_bytes"] / 2**30)
            found["compilation"].append(compiling_s(notes[-1]))
            if began is not None:
                found["start to first step"].append(notes[0]["end_s"] - began)
        if seconds:
            found["total speed"] = [tokens / seconds]
        return found


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


MORE = ("peak memory", "memory when loaded", "start to first step", "compilation")
METRICS = (
    ("speed", "tokens/s", median),
    ("speed, lowest window", "tokens/s", _least),
    ("speed, highest window", "tokens/s", _most),
    ("total speed", "tokens/s", median),
    ("peak memory", "GiB", median),
    ("peak memory, lowest window", "GiB", _least),
    ("peak memory, highest window", "GiB", _most),
    ("memory when loaded", "GiB", median),
    ("start to first step", "s", median),
    ("compilation", "s", median),
)
"""Name, unit, and what is taken of the windows' numbers; a name's beginning says which numbers."""
